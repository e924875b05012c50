"""Segments of nested dimensions against their elements, one by one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.nests import Dimension, nested_segments
from kvferry.runs import MAX_RUNS
from kvferry.segments import Segment

ITEM = 2
ELEMENT = Segment(3, None, 1000, 4096, 5, 200, ITEM, 1, ITEM, ITEM)


@st.composite
def nests(draw: st.DrawFn) -> list[Dimension]:
    """Dimensions that lie in any order, with and without gaps, on both sides."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    strides = []
    for _ in range(2):
        step, side = ITEM, [0] * len(sizes)
        order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else [
            *range(len(sizes))
        ]  # fmt: skip
        for dim in order:
            step += draw(st.sampled_from([0, 0, 0, ITEM]))
            side[dim] = step
            step *= sizes[dim]
        strides.append(side)
    tokens = draw(st.integers(-1, len(sizes) - 1))
    step = draw(st.integers(1, 3))
    return [
        Dimension(size, inner, outer, step if number == tokens else 0)
        for number, (size, inner, outer) in enumerate(zip(sizes, *strides, strict=True))
    ]


def bytes_of(dimensions: list[Dimension], token: int) -> dict[int, tuple[int, int]]:
    """Pool address to object offset and token, of every byte."""
    found = {}
    for indices in itertools.product(*(range(each.size) for each in dimensions)):
        steps = list(zip(indices, dimensions, strict=True))
        address = 1000 + sum(index * each.pool_stride_bytes for index, each in steps)
        offset = 200 + sum(index * each.object_stride_bytes for index, each in steps)
        here = token + sum(index * each.token_step for index, each in steps)
        for byte in range(ITEM):
            found[address + byte] = (offset + byte, here)
    return found


@given(nests(), st.sampled_from([None, 0, 2]))
def test_every_byte_once_with_its_token(dimensions: list[Dimension], token: int | None) -> None:
    wanted = bytes_of(dimensions, token or 0)
    got: dict[int, tuple[int, int]] = {}
    for segment in nested_segments(ELEMENT, dimensions, token=token):
        assert (segment.layer_id, segment.page_stride_bytes, segment.num_pages) == (3, 4096, 5)
        for part, byte in itertools.product(range(segment.count), range(segment.part_bytes)):
            address = segment.address + part * segment.pool_pitch_bytes + byte
            offset = segment.object_offset + part * segment.object_pitch_bytes + byte
            assert address not in got
            if token is None:
                assert segment.token_bytes == 0
                got[address] = (offset, wanted[address][1])
            else:
                place = segment.token_start_bytes + part * segment.token_part_bytes + byte
                got[address] = (offset, place // segment.token_bytes)
    assert got == wanted


def test_few_segments() -> None:
    def count(*dimensions: Dimension, token: int | None = None) -> int:
        return len(nested_segments(ELEMENT, dimensions, token=token))

    dense = [Dimension(8, 256, 256, 1), Dimension(4, 64, 64), Dimension(32, 2, 2)]
    assert count(*dense) == 1
    assert count(*dense, token=0) == 1
    assert count(Dimension(8, 512, 256, 1), *dense[1:]) == 1  # tokens at a pitch
    assert count(Dimension(8, 64, 256, 1), Dimension(4, 512, 64), dense[2]) == 4  # by head
    assert count(Dimension(3, 9000, 9000)) == 1


def test_too_many_segments_are_refused() -> None:
    wide = [Dimension(MAX_RUNS + 1, 10, 100), Dimension(MAX_RUNS + 2, 10**6, 10**7)]
    with pytest.raises(LayoutError, match=f"{MAX_RUNS + 1} segments of {MAX_RUNS + 2} parts"):
        nested_segments(ELEMENT, wide)
