"""Launches that are remembered by their shape are those that a move would have had anew."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels import launches as module
from kvferry.kernels.device import PACK, UNPACK
from kvferry.kernels.pack import Packer
from kvferry.kernels.tables import Move
from kvferry.layout import CacheLayout
from kvferry.testing import make_tensors

ADDRESSES = st.integers(1 << 20, 1 << 44).map(lambda number: number * 8)


def bound() -> CacheLayout:
    """Three layers of long runs, short runs and odd bytes."""
    pools: list[dict[str, Any]] = [
        {"name": name, "index": "full", "rows": "token", "row_shape": [size], "dtype": "uint8",
         "layers": [0, 1, 2]}
        for name, size in (("k", 10240), ("index", 256), ("scale", 18))
    ]  # fmt: skip
    plain = CacheLayout.from_description({"page_size": 4, "num_layers": 3, "pools": pools})
    return plain.bind(make_tensors(plain, 4, torch.device("cpu")))


LAYOUT = bound()


@st.composite
def moves(draw: st.DrawFn) -> Move:
    # So many pages that the short runs' units take several launches.
    return Move(
        draw(ADDRESSES),
        draw(st.sampled_from([4, 8])),
        draw(st.sampled_from([1, 2, 3 * 10**7])),
        4,
        draw(ADDRESSES),
        draw(st.sampled_from([1 << 20, (1 << 20) + 8])),
        draw(st.sampled_from([((0, 3),), ((0, 1),), ((0, 1), (2, 3))])),
        draw(st.sampled_from([PACK, UNPACK])),
        draw(st.sampled_from([0]) | ADDRESSES),
        3,
        draw(st.sampled_from([0, 1, 2])),
        draw(st.integers(0, 3)),
    )


@given(moves(), moves(), st.data())
def test_remembered_launches_are_those_worked_out_anew(
    first: Move, other: Move, data: st.DataObject
) -> None:
    packer = Packer(LAYOUT, "full")
    # Moves that share all but one number with the first: what differs must not be mixed up.
    relatives = [
        first._replace(**{name: value}) for name, value in zip(Move._fields, other, strict=True)
    ]
    elsewhere = first._replace(
        ids_address=data.draw(ADDRESSES),
        object_address=data.draw(ADDRESSES),
        sums_address=data.draw(ADDRESSES) if first.sums_address else 0,
    )
    for move in (first, *relatives, elsewhere, other, first):
        config = packer._config_for(move)
        align = math.gcd(16, move.object_address, move.stride_bytes)
        tables = packer._tables_for(align, move.tail != 0, config)
        assert list(packer.launches(move)) == list(module.launches_of(tables, move, config))


def test_no_more_is_remembered_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SHAPES", 5)
    packer = Packer(LAYOUT, "full")
    for num_pages in range(1, 40):
        move = Move(1 << 30, 8, num_pages, 4, 1 << 31, 1 << 20, ((0, 3),), PACK)
        assert packer.launches(move)
        assert 1 <= len(packer._memory._known) <= 5
