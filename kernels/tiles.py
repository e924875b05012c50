"""Long aligned runs: a kernel that moves a tile of one page's run per program, and its launcher.

The launcher computes launches and starts none, so that the host's work can be timed and tested
without a GPU. The plain-torch twin of both this and `units` is `reference.move_reference`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import divide, load_page_id
from kvferry.kernels.handles import Launch
from kvferry.kernels.tables import Move, Table, divisor
from kvferry.launch import LaunchConfig

MAX_PROGRAMS = 2**31 - 1
"""Grid limit along the first axis."""

_TILE_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride",
    "num_pages", "page_divisor", "num_pool_pages",
)  # fmt: skip


@triton.jit(do_not_specialize=_TILE_ARGUMENTS)
def _move_tiles_kernel(
    rows_address: tl.int64,  # [num_rows, 4] int64: pool address, page stride, object offset, bytes
    ids_address: tl.int64,  # [num_pages] page ids of ID_BYTES each
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    num_pages: tl.int32,
    page_divisor: tl.int64,
    num_pool_pages: tl.int64,
    TILE_BYTES: tl.constexpr,
    UNPACK: tl.constexpr,
    ID_BYTES: tl.constexpr,
):
    program = tl.program_id(0)
    tile = divide(program, page_divisor.to(tl.int64))
    page = program - tile * num_pages
    row = rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tile.to(tl.int64) * 4
    page_id = load_page_id(ids_address.to(tl.int64), page, True, ID_BYTES)
    pool = tl.load(row) + page_id * tl.load(row + 1)
    packed = object_address.to(tl.int64) + page.to(tl.int64) * object_stride + tl.load(row + 2)
    # A page id outside the pools moves nothing: a wrong id must not reach foreign memory.
    valid = (page_id >= 0) & (page_id < num_pool_pages)
    num_bytes = tl.where(valid, tl.load(row + 3), 0)
    # The hint must stand on the pointer, after all arithmetic: a cast from an integer drops
    # earlier ones, and the accesses fall apart into 4-byte ones. The same holds for the bound.
    tl.assume(pool % 16 == 0)
    tl.assume(packed % 16 == 0)
    pool_words = tl.multiple_of(pool.to(tl.pointer_type(tl.int64)), 16)
    packed_words = tl.multiple_of(packed.to(tl.pointer_type(tl.int64)), 16)
    word = tl.arange(0, TILE_BYTES // 8)
    mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2)
    if UNPACK:
        tl.store(pool_words + word, tl.load(packed_words + word, mask=mask), mask=mask)
    else:
        tl.store(packed_words + word, tl.load(pool_words + word, mask=mask), mask=mask)


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
                    move.num_pages,
                    divisor(move.num_pages),
                    move.num_pool_pages,
                ),
                (config.tile_bytes, move.unpack, move.id_bytes),
                config.tile_warps,
            )
