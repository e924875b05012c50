"""Long aligned runs: a kernel that moves a tile of one page's run per program, and its launcher.

The launcher computes launches and starts none, so that the host's work can be timed and tested
without a GPU. The plain-torch twin of both this and `units` is `reference.move_reference`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import checksum_of_pairs, divide, load_page_id
from kvferry.kernels.handles import Launch
from kvferry.kernels.tables import Move, Table, divisor
from kvferry.launch import LaunchConfig

MAX_PROGRAMS = 2**31 - 1
"""Grid limit along the first axis."""

_TILE_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "sums_address", "num_layers",
    "num_pages", "page_divisor", "num_pool_pages", "tail_tokens",
)  # fmt: skip


@triton.jit(do_not_specialize=_TILE_ARGUMENTS)
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
    TILE_BYTES: tl.constexpr,
    MOVE: tl.constexpr,  # PACK, UNPACK or SUM_ONLY
    ID_BYTES: tl.constexpr,
    TAIL: tl.constexpr,  # WHOLE, ZERO_TAIL or KEEP_TAIL
    SUM: tl.constexpr,
):
    program = tl.program_id(0)
    tile = divide(program, page_divisor.to(tl.int64))
    page = program - tile * num_pages
    row = rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tile.to(tl.int64) * 7
    object_offset = tl.load(row + 2)
    num_bytes = tl.load(row + 3)
    packed = object_address.to(tl.int64) + page.to(tl.int64) * object_stride + object_offset
    # The hint must stand on the pointer, after all arithmetic: a cast from an integer drops
    # earlier ones, and the accesses fall apart into 4-byte ones. The same holds for the bound.
    tl.assume(packed % 16 == 0)
    packed_words = tl.multiple_of(packed.to(tl.pointer_type(tl.int64)), 16)
    word = tl.arange(0, TILE_BYTES // 8)
    if MOVE == 2:
        mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2)
        value = tl.load(packed_words + word, mask=mask, other=0)
    else:
        page_id = load_page_id(ids_address.to(tl.int64), page, True, ID_BYTES)
        pool = tl.load(row) + page_id * tl.load(row + 1)
        # A page id outside the pools moves nothing: a wrong id must not reach foreign memory.
        inside = (page_id >= 0) & (page_id < num_pool_pages)
        num_bytes = tl.where(inside, num_bytes, 0)
        tl.assume(pool % 16 == 0)
        pool_words = tl.multiple_of(pool.to(tl.pointer_type(tl.int64)), 16)
        mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2)
        if MOVE == 0:
            value = tl.load(pool_words + word, mask=mask, other=0)
            tl.store(packed_words + word, value, mask=mask)
        else:
            value = tl.load(packed_words + word, mask=mask, other=0)
            if TAIL == 0:
                tl.store(pool_words + word, value, mask=mask)
            else:
                kept = tail_tokens.to(tl.int64) * tl.load(row + 4) - tl.load(row + 5)
                kept = tl.minimum(tl.maximum(kept, 0), num_bytes)
                kept = tl.where(page == num_pages - 1, kept, num_bytes)
                in_tail = word < tl.multiple_of((kept >> 3).to(tl.int32), 2)
                if TAIL == 1:
                    tl.store(pool_words + word, tl.where(in_tail, value, 0), mask=mask)
                else:
                    tl.store(pool_words + word, value, mask=in_tail)
    if SUM:
        # In 32 bits, the tile's part once: 64-bit positions would cost more than the products.
        weight = ((object_offset >> 2) * 2 + 1).to(tl.uint32) + (word * 4).to(tl.uint32)
        total = tl.sum(checksum_of_pairs(value, weight), axis=0)
        sums = sums_address.to(tl.int64).to(tl.pointer_type(tl.int64))
        cell = page.to(tl.int64) * num_layers + tl.load(row + 6)
        tl.atomic_add(sums + cell, total, sem="relaxed")


def tile_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield one launch per range of layers: program `tile * num_pages + page`."""
    for first_layer, end_layer in move.layer_ranges:
        first, end = table.layer_starts[first_layer], table.layer_starts[end_layer]
        rows_per_launch = max(1, MAX_PROGRAMS // move.num_pages)
        for row in range(first, end, rows_per_launch):
            num_rows = min(rows_per_launch, end - row)
            yield Launch(
                _move_tiles_kernel,
                (num_rows * move.num_pages, 1),
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
                ),
                (config.tile_bytes, move.kind, move.id_bytes, move.tail, move.with_sums),
                config.tile_warps,
            )
