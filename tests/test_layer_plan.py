"""Layer groups of many requests cut into store calls: every byte once, no key twice in a call."""

import itertools
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linker_bed import HYBRID

from kvferry.errors import ArgumentError
from kvferry.groups import choose_groups
from kvferry.layout import CacheLayout
from kvferry.linker.layer_plan import Rows, cut, groups_for, merge
from kvferry.linker.plan import SpacePlan, stride_bytes
from kvferry.trailer import stored_bytes

LAYOUT = CacheLayout.from_description(HYBRID)


def plan(
    space: str, keys: list[str], page_ids: list[int], *, trailer: bool = True, last: bool = False
) -> SpacePlan:
    size = LAYOUT.object_bytes[space]
    return SpacePlan(
        space,
        keys,
        np.array(page_ids, dtype=np.int64),
        size,
        stored_bytes(size, LAYOUT.num_layers) if trailer else size,
        stride_bytes(LAYOUT, space, trailer=trailer),
        last,
    )


Drawn: TypeAlias = tuple[
    list[tuple[SpacePlan, ...]], dict[str, Rows], tuple[tuple[int, int], ...], int
]


@st.composite
def batches(draw: Any) -> Drawn:
    """Some requests with keys in common, groups of layers, and room for a part."""
    trailer = draw(st.booleans())
    pages = iter(range(1000))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        plans = []
        for space in draw(st.lists(st.sampled_from(LAYOUT.spaces), unique=True, min_size=1)):
            keys = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
            plans.append(plan(space, [f"{key}/{space}" for key in keys],
                              [next(pages) for _ in keys], trailer=trailer))  # fmt: skip
        requests.append(tuple(plans))
    inner = draw(st.lists(st.integers(1, LAYOUT.num_layers - 1), unique=True))
    edges = [0, *sorted(inner), LAYOUT.num_layers]
    return (
        requests,
        merge(requests, [None] * len(requests)),
        tuple(itertools.pairwise(edges)),
        draw(st.integers(1, 60_000)),
    )


@given(batches(), st.integers(1, 4))
def test_every_byte_of_every_row_travels_once(batch: Drawn, first_parts: int) -> None:
    _, rows, groups, max_bytes = batch
    travelled = {space: np.zeros((len(one), one.plan.size_bytes), int) for space, one in
                 rows.items()}  # fmt: skip
    for number, parts in enumerate(cut(LAYOUT, rows, groups, max_bytes, first_parts)):
        for part in parts:
            assert (part.group, (part.first_layer, part.end_layer)) == (number, groups[number])
            keys = [rows[p.space].plan.keys[row] for p in part.pieces
                    for row in range(p.first_row, p.end_row)]  # fmt: skip
            assert len(set(keys)) == len(keys)
            assert part.staging_bytes <= max_bytes or len(keys) == 1
            used = np.zeros(part.staging_bytes, int)
            for piece in part.pieces:
                end = piece.origin_bytes + piece.range_bytes
                travelled[piece.space][
                    piece.first_row : piece.end_row, piece.origin_bytes : end
                ] += 1
                offsets = LAYOUT.layer_offsets[piece.space]
                assert piece.origin_bytes == offsets[part.first_layer]
                if not piece.has_end:
                    assert end == offsets[part.end_layer]
                for address in piece.addresses(0):
                    assert (address - piece.origin_bytes) % 16 == 0  # as aligned as in the object
                    used[address : address + piece.range_bytes] += 1
            assert used.max() == 1
    for counts in travelled.values():
        assert (counts == 1).all()


@pytest.mark.parametrize(("num_pages", "counts"), [(7, [7]), (16, [8, 8]), (64, [16] * 4)])
def test_the_first_group_comes_in_parts_of_like_size(num_pages: int, counts: list[int]) -> None:
    space = LAYOUT.spaces[0]
    keys = [f"{number}/{space}" for number in range(num_pages)]
    rows = merge([(plan(space, keys, list(range(num_pages))),)], [None])
    first, second = cut(LAYOUT, rows, ((0, 1), (1, LAYOUT.num_layers)), 1 << 30, first_parts=4)
    assert [sum(piece.num_rows for piece in part.pieces) for part in first] == counts
    assert len(second) == 1


@given(batches())
def test_merging_keeps_whose_page_each_row_is(batch: Drawn) -> None:
    requests, rows, _, _ = batch
    wanted = {
        (plan.space, number, key, page)
        for number, plans in enumerate(requests)
        for plan in plans
        for key, page in zip(plan.keys, plan.page_ids.tolist(), strict=True)
    }
    merged = [
        (space, owner, key, page)
        for space, one in rows.items()
        for owner, key, page in zip(
            one.owners.tolist(), one.plan.keys, one.plan.page_ids.tolist(), strict=True
        )
    ]
    assert sorted(merged) == sorted(wanted)
    for one in rows.values():
        edges = [0, *(end for _, end in one.rounds)]
        assert list(one.rounds) == list(itertools.pairwise(edges))
        assert edges[-1] == len(one)
        for first, end in one.rounds:
            assert len(set(one.plan.keys[first:end])) == end - first


def test_requests_keep_their_tails_when_keys_are_shared() -> None:
    merged = merge(
        [
            (plan("full", ["a", "b"], [1, 2], last=True),),
            (plan("full", ["b", "c"], [3, 4], last=True),),
            (plan("state", ["b"], [5], last=True),),
        ],
        [(1, "zero"), (2, "keep"), (3, "zero")],
    )
    full = merged["full"]
    assert full.plan.keys == ["a", "b", "c", "b"]
    assert full.plan.page_ids.tolist() == [1, 2, 4, 3]
    assert full.owners.tolist() == [0, 0, 1, 1]
    assert full.tails == {1: (1, "zero"), 2: (2, "keep")}
    assert full.rounds == ((0, 3), (3, 4))
    assert merged["state"].tails == {}  # a state is always whole


def test_requests_with_a_page_in_common_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'full' hold 2 in two requests"):
        merge([(plan("full", ["a"], [2]),), (plan("full", ["b"], [2]),)], [None, None])


def test_groups_follow_the_objects_that_travel() -> None:
    full = merge([(plan("full", ["a"], [1]),)], [None])
    assert groups_for(LAYOUT, full, None, None, None) == choose_groups(LAYOUT.layer_offsets["full"])
    fixed = ((0, 2), (2, 5))
    assert groups_for(LAYOUT, full, fixed, None, None) == fixed
    with pytest.raises(ArgumentError, match="groups are"):
        groups_for(LAYOUT, full, ((0, 2),), None, None)
    # Layer 1 has bytes only in `swa`: with one page of it among many, it still counts as a layer.
    many = merge(
        [(plan("full", [str(i) for i in range(99)], list(range(99))), plan("swa", ["a"], [1]))],
        [None],
    )
    assert groups_for(LAYOUT, many, None, None, None)[0] == (0, 1)


def test_a_slow_wire_makes_longer_groups() -> None:
    wide = CacheLayout.from_description({
        "page_size": 64, "num_layers": 32,
        "pools": [{"name": "k", "index": "full", "rows": "token", "row_shape": [8, 128],
                   "dtype": "bfloat16", "layers": list(range(32))}],
    })  # fmt: skip
    size = wide.object_bytes["full"]
    one = SpacePlan("full", ["a"] * 1, np.array([0]), size, size, size, False)
    rows = merge([(one,)], [None])
    slow = groups_for(wide, rows, None, 1.0, 0.1)
    fast = groups_for(wide, rows, None, 1e6, 100.0)
    assert max(end - first for first, end in slow) == 17
    assert max(end - first for first, end in fast) == 8  # 1 MiB each: more gains nothing
