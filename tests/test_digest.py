"""Digests of configurations: equal for equal ones, in any process, and for no others."""

import enum
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.digest import config_digest
from kvferry.errors import ArgumentError


class Kind(enum.Enum):
    NEOX = "neox"


class Name(str, enum.Enum):
    NEOX = "neox"


ROPE = {"rope": {"type": "yarn", "theta": 10000.0, "factor": 4}, "heads": 8, "norm_eps": 1e-6}


@pytest.mark.parametrize(
    "alike",
    [
        {"norm_eps": 1e-6, "heads": 8, "rope": {"factor": 4, "theta": 10000.0, "type": "yarn"}},
        {**ROPE, "rope": {"type": "yarn", "theta": 10000, "factor": 4.0}},
        {**ROPE, "heads": np.int64(8), "norm_eps": np.float64(1e-6)},
    ],
)
def test_one_meaning_has_one_digest(alike: dict[str, Any]) -> None:
    assert config_digest(alike) == config_digest(ROPE)


def test_other_spellings_of_one_value() -> None:
    for values in (
        [[1, 2], (1, 2), {2, 1}, frozenset({1.0, 2})],
        ["neox", Kind.NEOX, Name.NEOX],
        ["bfloat16", torch.bfloat16],
        [{3: 1}, {"3": 1}],
        [0, 0.0, -0.0],
    ):
        assert len({config_digest({"a": value}) for value in values}) == 1, values


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
configs = st.dictionaries(
    st.text(),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    max_size=4,
)


def told(value: Any) -> Any:
    """The value such that == tells what a digest does: truth values and numbers differ."""
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, list):
        return [told(item) for item in value]
    return (isinstance(value, bool), value)


@given(configs, configs)
def test_other_configurations_have_other_digests(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (config_digest(one) == config_digest(other)) == (told(one) == told(other))
    assert config_digest(dict(reversed(one.items()))) == config_digest(one)


def test_any_change_is_told() -> None:
    changed: list[dict[str, Any]] = [
        {**ROPE, "rope": {**ROPE["rope"], "theta": 10000.5}},  # type: ignore[dict-item]
        {**ROPE, "rope": None},
        {key: value for key, value in ROPE.items() if key != "rope"},
        {**ROPE, "heads": True},
        {**ROPE, "heads": "8"},
        {**ROPE, "heads": [8]},
    ]
    assert len({config_digest(each) for each in [ROPE, *changed]}) == 1 + len(changed)


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from kvferry import config_digest;"
        "print(config_digest({'names': {'b', 'a', 'c'}, 'theta': 1e4}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == config_digest({"theta": 10000, "names": ["a", "b", "c"]})


def endless() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    inner["again"] = inner
    return inner


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"a": {"b": [1, object()]}}, r"config\['a'\]\['b'\]\[1\] is a object, wanted None, bool"),
        ({"a": float("nan")}, r"config\['a'\] is nan"),
        ({"a": b"bytes"}, r"config\['a'\] is a bytes"),
        ({"a": len}, r"config\['a'\] is a builtin_function_or_method"),
        ({"a": 1 + 2j}, r"config\['a'\] is a complex"),
        ({1.5: 0}, r"config has the key 1.5"),
        ({3: 0, "3": 1}, "config has the key '3' twice"),
        (endless(), "deeper than 32"),
        ([("a", 1)], "config is a list, wanted a mapping"),
    ],
)
def test_what_has_no_stable_text_is_refused(bad: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        config_digest(bad)
