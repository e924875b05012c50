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
    layout: CacheLayout,
    keys: Any,
    ids: Any,
    *,
    unique: bool = True,
    trailer: bool = False,
    partial: bool = True,
) -> Any:
    scheme = KeyScheme.of(layout, "n")
    return plan_transfer(layout, scheme, keys, ids, unique=unique, trailer=trailer, partial=partial)


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
        (
            ["a", "b"],
            {"full": np.array([1, 2**64 - 1], dtype=np.uint64)},
            "hold 18446744073709551615",
        ),
        (["a", "b"], {"full": [1, 2**64 - 1]}, "are float64"),
        (
            ["a", "b"],
            {"full": torch.tensor([1, -1]).view(torch.uint64)},
            "hold 1844674407370955161",
        ),
        (["a", "b"], {"full": [2**64, 1]}, "are object, wanted int32 or int64"),
        (["a", "b"], {"full": [1, True]}, r"page_ids\[1\] is True, wanted an integer"),
        (["a", "b"], {"full": (False, 1)}, r"page_ids\[0\] is False, wanted an integer"),
        (["a", "b"], {"full": [2, np.True_]}, r"page_ids\[1\] is True, wanted an integer"),
        (["a", "b"], {"full": [2, torch.tensor(True)]}, r"page_ids\[1\] is True"),
        (["a", "b"], {"full": np.array([True, False])}, "are bool, wanted int32 or int64"),
        (["a", "b"], {"full": torch.tensor([True, False])}, "are bool, wanted int32 or int64"),
        (["a", "b"], {"full": [1.0, 2.0]}, "are float64, wanted int32 or int64"),
        (["a", "b"], {"full": torch.tensor([1.0, 2.0])}, "are float32, wanted int32 or int64"),
        (["a", "b"], {"full": torch.tensor([1.0, 2.0]).bfloat16()}, "page_ids are tensor"),
        (["a", "b"], {"full": torch.tensor([[1, 2]])}, r"shape \[1, 2\], wanted \[num_pages\]"),
        (["a", "b"], {"full": torch.empty(2, dtype=torch.int64, device="meta")}, "are on meta"),
        (["a", "b"], {"full": [1, None]}, "are object"),
        (["a", "b"], {"full": [[1], 2]}, r"are \[\[1\], 2\], wanted integers \[num_pages\]"),
        (["a", "b"], {"full": None}, r"are None, wanted integers \[num_pages\]"),
        (["a", "b"], {"full": "12"}, r"are '12', wanted integers \[num_pages\]"),
        (["a", "b"], {"full": {1, 2}}, r"are \{1, 2\}, wanted integers \[num_pages\]"),
        ("ab", {"full": [1, 2]}, "keys is one string 'ab', wanted a sequence of strings"),
        (["a", b"b"], {"full": [1, 2]}, r"keys\[1\] is b'b', wanted a string"),
        (["a", "\ud800"], {"full": [1, 2]}, r"keys\[1\] is '.ud800', wanted a string"),
        (["a", "b" * 1025], {"full": [1, 2]}, r"keys\[1\] is 'b+'\.\.\.'b+' \(1025 characters\)"),
        (None, {"full": [1, 2]}, "keys is None, wanted a sequence of strings"),
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
    assert plan(layout, [], {}) == ()
    assert plan(layout, ["a"], {"full": [-1], "state": [-1]}, unique=False) == ()


WHOLE = {"full": [1, 2, 3], "state": [-1, -1, 1]}


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ({}, "page_ids are an empty mapping, wanted some of \\('full', 'state'\\)"),
        ({"full": [1, 2, 3]}, "have no 'state', wanted all of .* or partial=True"),
        ({"state": [-1, -1, 1]}, "have no 'full'"),
        (
            {**WHOLE, "full": [1, -1, 3]},
            r"'full' are -1 for keys\[1\], wanted a page for the last 3 of 3 keys, or partial=True",
        ),
        (
            {**WHOLE, "state": [0, 1, -1]},
            r"'state' are -1 for keys\[2\], wanted .* last 1 of 3 keys",
        ),
        ({"full": [-1] * 3, "state": [-1] * 3}, r"'full' are -1 for keys\[0\]"),
    ],
)
def test_a_load_leaves_no_page_unfilled(layout: CacheLayout, ids: Any, match: str) -> None:
    plan(layout, ["a", "b", "c"], WHOLE, partial=False)
    with pytest.raises(ArgumentError, match=match):
        plan(layout, ["a", "b", "c"], ids, partial=False)


def test_a_window_wants_its_last_pages_alone() -> None:
    pool = {"rows": "token", "row_shape": [8], "dtype": "uint8", "layers": [0]}
    pools = [{"name": "k", "index": "full", **pool}, {"name": "swa_k", "index": "swa", **pool}]
    swa = {"page_size": 4, "num_layers": 1, "window_tokens": 8, "pools": pools}
    plain = CacheLayout.from_description(swa)
    layout = plain.bind(make_tensors(plain, 8))
    for window in ([-1, -1, 6, 7], [-1, 5, 6, 7], [4, 5, 6, 7]):
        ids = {"full": [0, 1, 2, 3], "swa": window}
        assert len(plan(layout, list("abcd"), ids, partial=False)) == 2
    with pytest.raises(ArgumentError, match=r"'swa' are -1 for keys\[2\], wanted .* last 2 of 4"):
        plan(layout, list("abcd"), {"full": [0, 1, 2, 3], "swa": [4, 5, -1, 7]}, partial=False)


def test_a_partial_load_still_has_a_page_for_each_key(layout: CacheLayout) -> None:
    (state,) = plan(layout, ["a", "b"], {"state": [1, 2]})
    assert state.page_ids.tolist() == [1, 2]
    full, state = plan(layout, ["a", "b"], {"full": [-1, 4], "state": [1, -1]})
    assert (full.page_ids.tolist(), state.page_ids.tolist()) == ([4], [1])
    for ids in ({"full": [1, -1]}, {"full": [1, -1], "state": [2, -1]}):
        with pytest.raises(ArgumentError, match=r"-1 in every index space for keys\[1\], 'b'"):
            plan(layout, ["a", "b"], ids)
