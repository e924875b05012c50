"""Restorable prefixes against a brute-force statement of the rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.restore import restorable


def by_the_rule(exists: dict[str, list[bool]], window: int | None) -> list[int]:
    num_pages = len(next(iter(exists.values())))
    lengths = []
    for length in range(1, num_pages + 1):
        needed = {
            "full": range(length),
            "swa": range(0 if window is None else max(0, length - window), length),
            "state": [length - 1],
        }
        if all(exists[space][page] for space in exists for page in needed[space]):
            lengths.append(length)
    return lengths


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, list[bool]], int | None]:
    num_pages = draw(st.integers(0, 24))
    # Mostly present, so that long prefixes are not one in a million.
    page = st.integers(0, 9).map(lambda digit: digit > 0)
    spaces = draw(st.sets(st.sampled_from(["full", "swa", "state"]), min_size=1))
    rows = {space: draw(st.lists(page, min_size=num_pages, max_size=num_pages)) for space in spaces}
    return rows, draw(st.none() | st.integers(1, 6))


@given(cases())
def test_restorable_is_the_rule(case: tuple[dict[str, list[bool]], int | None]) -> None:
    exists, window = case
    arrays = {space: np.asarray(row, dtype=bool) for space, row in exists.items()}
    assert restorable(arrays, window) == by_the_rule(exists, window)


def test_sparse_lengths() -> None:
    exists = {
        "full": np.array([1, 1, 1, 1, 0, 1], dtype=bool),
        "swa": np.array([0, 1, 1, 1, 1, 1], dtype=bool),
        "state": np.array([1, 0, 1, 0, 1, 1], dtype=bool),
    }
    assert restorable(exists, 2) == [3]
    assert restorable({"full": exists["full"]}, None) == [1, 2, 3, 4]
    assert restorable({"state": exists["state"]}, None) == [1, 3, 5, 6]


def test_bad_arguments_are_refused() -> None:
    row = np.ones(3, dtype=bool)
    with pytest.raises(ArgumentError, match="'swa': 2"):
        restorable({"full": row, "swa": row[:2]}, 1)
    with pytest.raises(ArgumentError, match="one length"):
        restorable({}, 1)
    with pytest.raises(ArgumentError, match="window_pages is 0"):
        restorable({"full": row}, 0)
