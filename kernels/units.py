"""Short or narrow runs: a kernel that moves units of 16, 8, 4, 2 or 1 bytes, and its launcher.

Token rows, head slices, scales, odd pages. The launcher computes launches and starts none; the
plain-torch twin of both this and `tiles` is `reference.move_reference`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import divide, load_page_id
from kvferry.kernels.handles import Launch
from kvferry.kernels.tables import Move, Table
from kvferry.launch import LaunchConfig

MAX_ROWS_PER_LAUNCH = 65535
"""Grid limit along the second axis."""

_UNIT_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "num_pages", "num_pool_pages",
)  # fmt: skip


@triton.jit(do_not_specialize=_UNIT_ARGUMENTS)
def _move_units_kernel(
    rows_address: tl.int64,  # [num_rows, 9] int64, see `Tables.units`
    ids_address: tl.int64,  # [num_pages] page ids of ID_BYTES each
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    num_pages: tl.int32,
    num_pool_pages: tl.int64,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    UNPACK: tl.constexpr,
    ID_BYTES: tl.constexpr,
):
    row = (
        rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.program_id(1).to(tl.int64) * 9
    )
    units_per_part = tl.load(row + 3).to(tl.int32)
    units_per_page = tl.load(row + 4).to(tl.int32)
    first = tl.program_id(0) * UNITS
    num_units = num_pages * units_per_page  # under 2**31, as the launcher sees to
    if first < num_units:
        unit = first + tl.arange(0, UNITS)
        mask = unit < num_units
        page = divide(unit, tl.load(row + 8))
        in_page = unit - page * units_per_page
        part = divide(in_page, tl.load(row + 7))
        in_part = in_page - part * units_per_part
        page_id = load_page_id(ids_address.to(tl.int64), page, mask, ID_BYTES)
        mask = mask & (page_id >= 0) & (page_id < num_pool_pages)
        pool_offset = (
            page_id * tl.load(row + 1)
            + part.to(tl.int64) * tl.load(row + 5)
            + in_part.to(tl.int64) * UNIT_BYTES
        )
        packed_offset = (
            page.to(tl.int64) * object_stride
            + part.to(tl.int64) * tl.load(row + 6)
            + in_part.to(tl.int64) * UNIT_BYTES
        )
        pool = tl.load(row)
        packed = object_address.to(tl.int64) + tl.load(row + 2)
        if UNIT_BYTES == 16:
            half = tl.arange(0, 2)[None, :]
            pool_words = tl.multiple_of(pool.to(tl.pointer_type(tl.int64)), 16) + (
                tl.multiple_of(pool_offset >> 3, 2)[:, None] + half
            )
            packed_words = tl.multiple_of(packed.to(tl.pointer_type(tl.int64)), 16) + (
                tl.multiple_of(packed_offset >> 3, 2)[:, None] + half
            )
            mask2 = mask[:, None]
            if UNPACK:
                tl.store(pool_words, tl.load(packed_words, mask=mask2), mask=mask2)
            else:
                tl.store(packed_words, tl.load(pool_words, mask=mask2), mask=mask2)
        else:
            if UNIT_BYTES == 8:
                pool_units = pool.to(tl.pointer_type(tl.int64)) + (pool_offset >> 3)
                packed_units = packed.to(tl.pointer_type(tl.int64)) + (packed_offset >> 3)
            elif UNIT_BYTES == 4:
                pool_units = pool.to(tl.pointer_type(tl.int32)) + (pool_offset >> 2)
                packed_units = packed.to(tl.pointer_type(tl.int32)) + (packed_offset >> 2)
            elif UNIT_BYTES == 2:
                pool_units = pool.to(tl.pointer_type(tl.int16)) + (pool_offset >> 1)
                packed_units = packed.to(tl.pointer_type(tl.int16)) + (packed_offset >> 1)
            else:
                pool_units = pool.to(tl.pointer_type(tl.uint8)) + pool_offset
                packed_units = packed.to(tl.pointer_type(tl.uint8)) + packed_offset
            if UNPACK:
                tl.store(pool_units, tl.load(packed_units, mask=mask), mask=mask)
            else:
                tl.store(packed_units, tl.load(pool_units, mask=mask), mask=mask)


def unit_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield one launch per range of layers: programs `(units of all pages, row)`.

    A program counts units in 32 bits; more pages than that allows take several launches.
    """
    pages_per_launch = max(1, (2**31 - config.units_per_program) // table.max_units)
    for first_layer, end_layer in move.layer_ranges:
        first, end = table.layer_starts[first_layer], table.layer_starts[end_layer]
        for page in range(0, move.num_pages, pages_per_launch):
            num_pages = min(pages_per_launch, move.num_pages - page)
            for row in range(first, end, MAX_ROWS_PER_LAUNCH):
                yield Launch(
                    _move_units_kernel,
                    (
                        -(-num_pages * table.max_units // config.units_per_program),
                        min(MAX_ROWS_PER_LAUNCH, end - row),
                    ),
                    (
                        table.row_address(row),
                        move.ids_address + page * move.id_bytes,
                        move.object_address + page * move.stride_bytes,
                        move.stride_bytes,
                        num_pages,
                        move.num_pool_pages,
                    ),
                    (config.units_per_program, table.unit_bytes, move.unpack, move.id_bytes),
                    config.unit_warps,
                )
