"""Plans: what a transfer will do, and every argument that is refused before it does it."""

from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout
from kvferry.linker.keys import KeyScheme
from kvferry.linker.plan import plan_transfer
from kvferry.testing import make_tensors

LAYOUT: dict[str, Any] = {
    "page_size": 2,
    "num_layers": 2,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [10], "dtype": "uint8",
         "layers": [0, 1]},
        {"name": "ssm", "index": "state", "rows": "page", "row_shape": [100], "dtype": "uint8",
         "layers": [1]},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def layout() -> CacheLayout:
    plain = CacheLayout.from_description(LAYOUT)
    return plain.bind(make_tensors(plain, {"full": 8, "state": 3}))


def plan(
    layout: CacheLayout, keys: Any, ids: Any, *, unique: bool = True, trailer: bool = False
) -> Any:
    return plan_transfer(
        layout, KeyScheme.of(layout, "n"), keys, ids, unique=unique, trailer=trailer
    )


def test_spaces_keys_ids_and_sizes(layout: CacheLayout) -> None:
    full, state = plan(layout, ["a", "b", "c"], {"full": [5, 0, 2], "state": [-1, -1, 1]})
    assert [key.rsplit("/", 2)[1:] for key in full.keys] == [
        ["a", "full"], ["b", "full"], ["c", "full"],
    ]  # fmt: skip
    assert full.page_ids.tolist() == [5, 0, 2]
    assert (full.object_bytes, full.stride_bytes, full.num_bytes) == (40, 64, 120)
    assert list(full.addresses(1000)) == [1000, 1064, 1128]
    assert full.sizes == [40, 40, 40]
    assert [key.rsplit("/", 2)[1:] for key in state.keys] == [["c", "state"]]
    assert state.page_ids.tolist() == [1]
    assert (state.object_bytes, state.stride_bytes) == (100, 128)


def test_parts_keep_order_and_fit(layout: CacheLayout) -> None:
    (full,) = plan(layout, list("abcdefg"), {"full": [6, 5, 4, 3, 2, 1, 0]})
    parts = list(full.parts(64 * 3 + 63))
    assert [part.page_ids.tolist() for part in parts] == [[6, 5, 4], [3, 2, 1], [0]]
    assert [part.staging_bytes for part in parts] == [192, 192, 64]
    assert [key for part in parts for key in part.keys] == full.keys
    assert [len(part.keys) for part in full.parts(1)] == [1] * 7
    some = full.select([True, False, True, False, False, False, True])
    assert some.page_ids.tolist() == [6, 4, 0]
    assert some.keys == [full.keys[0], full.keys[2], full.keys[6]]
    assert full.select([True] * 7) is full


@pytest.mark.parametrize(
    "ids", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)]
)
def test_any_form_of_ids(layout: CacheLayout, ids: Any) -> None:
    (full,) = plan(layout, ["a", "b"], {"full": ids})
    assert full.page_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("keys", "ids", "match"),
    [
        (["a", "b"], {"full": [1]}, r"page_ids of 'full' have shape \[1\], wanted \[2\]"),
        (["a"], {"full": [[1]]}, r"shape \[1, 1\]"),
        (["a", "b"], {"full": [1, 1]}, "hold 1 twice"),
        (["a"], {"full": [8]}, r"hold 8, wanted 0 .. 7"),
        (["a"], {"full": [-2]}, "hold -2"),
        (["a"], {"full": [1.5]}, "float64"),
        (["a"], {"swa": [1]}, r"name \['swa'\], wanted index spaces \('full', 'state'\)"),
        (["a"], [1], "wanted a mapping"),
        (["a", "a"], {"full": [1, 2]}, r"keys\[1\] repeats"),
    ],
)
def test_bad_arguments_are_refused(layout: CacheLayout, keys: Any, ids: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        plan(layout, keys, ids)


def test_one_page_may_be_saved_under_two_keys(layout: CacheLayout) -> None:
    (full,) = plan(layout, ["a", "b"], {"full": [1, 1]}, unique=False)
    assert full.page_ids.tolist() == [1, 1]


def test_nothing_to_do_is_no_plan(layout: CacheLayout) -> None:
    assert plan(layout, [], {"full": []}) == ()
    assert plan(layout, ["a"], {"full": [-1], "state": [-1]}) == ()
