"""Long aligned runs: a kernel that moves tiles of pages' runs, and its launcher.

The launcher computes launches and starts none, so that the host's work can be timed and tested
without a GPU. The plain-torch twin of both this and `units` is `reference.move_reference`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import (
    checksum_terms,
    divide,
    load_page_id,
    load_payload,
    store_payload,
)
from kvferry.kernels.handles import Launch
from kvferry.kernels.metadata import tiles_metadata
from kvferry.kernels.tables import Move, Table, divisor
from kvferry.launch import CACHE_HINTS, LaunchConfig

MAX_TILES = 2**31 - 2**16
"""Tiles of one launch: the grid's limit along the first axis, less the programs of a budget."""

_TILE_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "sums_address", "num_layers",
    "num_pages", "page_divisor", "num_pool_pages", "tail_tokens", "num_tiles",
)  # fmt: skip


@triton.jit
def _find_tile(
    number, rows_address, ids_address, object_address, object_stride, num_pages, page_divisor,
    num_pool_pages, MOVE: tl.constexpr, ID_BYTES: tl.constexpr,
):  # fmt: skip
    """Tile `number`: its row of the table, page, places in pool and object, and bytes."""
    tile = divide(number, page_divisor.to(tl.int64))
    page = number - tile * num_pages
    row = rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tile.to(tl.int64) * 7
    num_bytes = tl.load(row + 3)
    packed = object_address.to(tl.int64) + page.to(tl.int64) * object_stride + tl.load(row + 2)
    pool = packed
    if MOVE != 2:
        page_id = load_page_id(ids_address.to(tl.int64), page, True, ID_BYTES)
        pool = tl.load(row) + page_id * tl.load(row + 1)
        # A page id outside the pools moves nothing: a wrong id must not reach foreign memory.
        inside = (page_id >= 0) & (page_id < num_pool_pages)
        num_bytes = tl.where(inside, num_bytes, 0)
    return row, page, pool, packed, num_bytes


@triton.jit
def _load_tile(word, pool, packed, num_bytes, MOVE: tl.constexpr, CACHE: tl.constexpr):
    """Return the tile's words, and which of them there are."""
    # The hint must stand on the pointer, after all arithmetic: a cast from an integer drops
    # earlier ones, and the accesses fall apart into 4-byte ones. The same holds for the bound.
    source = pool if MOVE == 0 else packed
    tl.assume(source % 16 == 0)
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2)
    return load_payload(words + word, mask, CACHE), mask


@triton.jit
def _store_tile(
    word, value, mask, row, page, pool, packed, num_bytes, sums_address, num_layers, num_pages,
    tail_tokens, MOVE: tl.constexpr, TAIL: tl.constexpr, SUM: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Store the tile's words where they belong, and add their checksum."""
    if MOVE != 2:
        target = packed if MOVE == 0 else pool
        tl.assume(target % 16 == 0)
        words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        if TAIL == 0 or MOVE == 0:
            store_payload(words + word, value, mask, CACHE)
        else:
            kept = tail_tokens.to(tl.int64) * tl.load(row + 4) - tl.load(row + 5)
            kept = tl.minimum(tl.maximum(kept, 0), num_bytes)
            kept = tl.where(page == num_pages - 1, kept, num_bytes)
            in_tail = word < tl.multiple_of((kept >> 3).to(tl.int32), 2)
            if TAIL == 1:
                store_payload(words + word, tl.where(in_tail, value, 0), mask, CACHE)
            else:
                store_payload(words + word, value, in_tail, CACHE)
    if SUM:
        # In 32 bits, as objects are under 2 GiB. Words that are not there add nothing.
        pair = (tl.load(row + 2) >> 3).to(tl.uint32) + word.to(tl.uint32)
        total = tl.sum(tl.where(mask, checksum_terms(value, pair), 0), axis=0)
        sums = sums_address.to(tl.int64).to(tl.pointer_type(tl.int64))
        cell = page.to(tl.int64) * num_layers + tl.load(row + 6)
        tl.atomic_add(sums + cell, total, sem="relaxed")


@triton.jit(do_not_specialize=_TILE_ARGUMENTS, launch_metadata=tiles_metadata)
def _move_tiles_kernel(
    rows_address: tl.int64,  # [num_rows, 7] int64, see `Tables.tiles`
    ids_address: tl.int64,  # [num_pages] page ids of ID_BYTES each
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    sums_address: tl.int64,  # [num_pages, num_layers] int64, added to; if SUM
    num_layers: tl.int64,
    num_pages: tl.int32,
    page_divisor: tl.int64,
    num_pool_pages: tl.int64,
    tail_tokens: tl.int64,  # of the last page; if TAIL
    num_tiles: tl.int32,  # of all pages; if PERSISTENT
    TILE_BYTES: tl.constexpr,
    MOVE: tl.constexpr,  # PACK, UNPACK or SUM_ONLY
    ID_BYTES: tl.constexpr,
    TAIL: tl.constexpr,  # WHOLE, ZERO_TAIL or KEEP_TAIL
    SUM: tl.constexpr,
    PERSISTENT: tl.constexpr,  # whether programs go on to further tiles
    CACHE: tl.constexpr,  # a place in `CACHE_HINTS`
):
    number = tl.program_id(0)
    word = tl.arange(0, TILE_BYTES // 8)
    row, page, pool, packed, num_bytes = _find_tile(
        number, rows_address, ids_address, object_address, object_stride, num_pages, page_divisor,
        num_pool_pages, MOVE, ID_BYTES,
    )  # fmt: skip
    if PERSISTENT:
        while number < num_tiles:
            value, mask = _load_tile(word, pool, packed, num_bytes, MOVE, CACHE)
            number += tl.num_programs(0)
            # Where the next tile lies is found while this one's words are on their way. Behind the
            # last one it is the last again, and of no use.
            next_row, next_page, next_pool, next_packed, next_bytes = _find_tile(
                tl.minimum(number, num_tiles - 1), rows_address, ids_address, object_address,
                object_stride, num_pages, page_divisor, num_pool_pages, MOVE, ID_BYTES,
            )  # fmt: skip
            _store_tile(
                word, value, mask, row, page, pool, packed, num_bytes, sums_address, num_layers,
                num_pages, tail_tokens, MOVE, TAIL, SUM, CACHE,
            )  # fmt: skip
            row, page, pool, packed, num_bytes = (
                next_row, next_page, next_pool, next_packed, next_bytes
            )  # fmt: skip
    else:
        value, mask = _load_tile(word, pool, packed, num_bytes, MOVE, CACHE)
        _store_tile(
            word, value, mask, row, page, pool, packed, num_bytes, sums_address, num_layers,
            num_pages, tail_tokens, MOVE, TAIL, SUM, CACHE,
        )  # fmt: skip


def tile_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield one launch per range of layers: tile `row * num_pages + page`.

    Each has a program of its own; under a budget of programs, program i has the tiles i, i + budget
    and so on, which lie far apart in size but close in layers.
    """
    for first_layer, end_layer in move.layer_ranges:
        first, end = table.layer_starts[first_layer], table.layer_starts[end_layer]
        rows_per_launch = max(1, MAX_TILES // move.num_pages)
        for row in range(first, end, rows_per_launch):
            num_tiles = min(rows_per_launch, end - row) * move.num_pages
            num_programs = config.programs_for(num_tiles)
            yield Launch(
                _move_tiles_kernel,
                (num_programs, 1),
                (
                    table.row_address(row),
                    move.ids_address,
                    move.object_address,
                    move.stride_bytes,
                    move.sums_address,
                    move.num_layers,
                    move.num_pages,
                    divisor(move.num_pages),
                    move.num_pool_pages,
                    move.tail_tokens,
                    num_tiles,
                ),
                (
                    config.tile_bytes,
                    move.kind,
                    move.id_bytes,
                    move.tail,
                    move.with_sums,
                    num_programs < num_tiles,
                    CACHE_HINTS.index(config.cache),
                ),
                config.tile_warps,
            )
