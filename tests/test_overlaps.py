"""Buffers that share bytes are refused; views woven into one allocation are not."""

import random
from typing import Any

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout import CacheLayout
from kvferry.overlaps import Strided, _share
from kvferry.pools import PoolTensors

PAGE, PAGES, HEADS, WIDTH = 4, 6, 2, 8


def bind(*pools: Any, page_size: int = PAGE) -> CacheLayout:
    """Bind pools, each a list of tensors by layer, or a pair of space and such a list."""
    named = [pool if isinstance(pool, tuple) else ("full", pool) for pool in pools]
    return CacheLayout.from_tensors(
        [
            PoolTensors(f"p{number}", space, "page", dict(enumerate(tensors)))
            for number, (space, tensors) in enumerate(named)
        ],
        page_size=page_size,
        num_layers=max(len(tensors) for _, tensors in named),
    )


def memory(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


WOVEN = {
    "keys and values side by side in a page": lambda: [
        [layer[:, 0] for layer in memory(3, PAGES, 2, PAGE, WIDTH)],
        [layer[:, 1] for layer in memory(3, PAGES, 2, PAGE, WIDTH)],
    ],
    "layers and halves side by side in a block": lambda: (
        lambda blocks: [
            [blocks[:, layer, half] for layer in range(5)] for half in range(2)
        ]
    )(memory(PAGES, 5, 2, PAGE, WIDTH)),
    "heads before blocks": lambda: (
        lambda blocks: [[blocks[half, :, :, layer].transpose(0, 1) for layer in range(3)]
                        for half in range(2)]
    )(memory(2, HEADS, PAGES, 3, PAGE, WIDTH)),
    "keys and values in turn, token by token": lambda: (
        lambda rows: [[rows[:, :, half]] for half in range(2)]
    )(memory(PAGES, PAGE, 2, HEADS, WIDTH)),
    "a slack behind the last page": lambda: (
        lambda rows: [[rows[:PAGES], rows[PAGES - 1 :][1:]]]
    )(memory(2 * PAGES, PAGE, WIDTH)),
    "pages of one kind between those of another": lambda: (
        lambda flat: [
            [flat.as_strided((PAGES, 24), (64, 1), 0)],
            [flat.as_strided((2 * PAGES, 8), (32, 1), 24)],
        ]
    )(memory(PAGES * 64)),
    "strides without a common place": lambda: (
        # Pages at 0, 30, 60 and at 10, 45, 80: no two meet, though gcd(30, 35) is 5.
        lambda flat: [
            [flat.as_strided((3, 6), (30, 1), 0)],
            [flat.as_strided((3, 9), (35, 1), 10)],
        ]
    )(memory(100)),
}  # fmt: skip


@pytest.mark.parametrize("name", WOVEN)
def test_woven_views_are_bound(name: str) -> None:
    bind(*WOVEN[name]())


def test_pages_that_no_id_names_may_lie_under_a_neighbour() -> None:
    rows = memory(8, 16)
    longer, shorter = rows, memory(4, 16)
    bind([longer, shorter], [rows[4:], memory(4, 16)])  # ids end at 4, the shortest buffer's pages


SHARED = {
    "one begins within the other": lambda rows: [[rows[0:PAGES], rows[1 : PAGES + 1]]],
    "one page is shared": lambda rows: [[rows[:PAGES], rows[PAGES - 1 : 2 * PAGES - 1]]],
    "one element is shared": lambda rows: [
        [rows.view(-1)[: PAGES * 32].view(PAGES, 32)],
        [rows.view(-1)[PAGES * 32 - 1 : 2 * PAGES * 32 - 1].view(PAGES, 32)],
    ],
    "halves of a page and all of it": lambda rows: [
        [rows], [rows.view(2 * PAGES, 2, -1)[:, 1]]],
    "columns that cross": lambda rows: [
        [rows.view(2 * PAGES, 32)[:, :20]], [rows.view(2 * PAGES, 32)[:, 16:]]],
    "in two index spaces": lambda rows: [[rows[:PAGES]], ("state", [rows[2 : PAGES + 2]])],
    "strides that meet far on": lambda rows: [
        [rows.view(-1).as_strided((12, 4), (30, 1), 0)],
        [rows.view(-1).as_strided((10, 4), (35, 1), 20)],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_shared_bytes_are_refused(name: str) -> None:
    rows = memory(2 * PAGES, PAGE, WIDTH)
    with pytest.raises(LayoutError, match=r"layer \d: shares memory with pool 'p\d' layer \d"):
        bind(*SHARED[name](rows))


@pytest.mark.parametrize("seed", range(40))
def test_as_a_set_of_bytes_says(seed: int) -> None:
    chance = random.Random(seed)

    def some(owner: int) -> Strided:
        length, count = chance.randint(1, 6), chance.choice([1, 1, 2, 5, 20])
        stride = length + chance.randint(0, 20) if count > 1 else 0
        return Strided(chance.randint(0, 120), length, stride, count, owner)

    def held(piece: Strided) -> set[int]:
        starts = [piece.start + number * piece.stride for number in range(piece.count)]
        return {start + byte for start in starts for byte in range(piece.length)}

    for _ in range(100):
        one, other = some(0), some(1)
        if chance.random() < 0.3 and one.count > 1:
            other = Strided(other.start, min(other.length, one.stride), one.stride, 7, 1)
        assert _share(one, other) == _share(other, one) == bool(held(one) & held(other))


def test_the_check_is_quick_where_many_layers_lie_in_a_block() -> None:
    from time import process_time

    blocks = torch.empty((2000, 96, 2, PAGE, 2, WIDTH), dtype=torch.uint8)
    begin_s = process_time()
    layout = bind(*([blocks[:, layer, half] for layer in range(96)] for half in range(2)))
    assert layout.num_pages == {"full": 2000}
    assert process_time() - begin_s < 1.0
