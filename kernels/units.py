"""Short or narrow runs: a kernel that moves units of 16, 8, 4, 2 or 1 bytes, and its launcher.

Token rows, head slices, scales, odd pages. The launcher computes launches and starts none; the
plain-torch twin of both this and `tiles` is `reference.move_reference`.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import checksum_terms, divide, load_page_id
from kvferry.kernels.handles import Launch
from kvferry.kernels.tables import Move, Table
from kvferry.launch import LaunchConfig

MAX_ROWS_PER_LAUNCH = 65535
"""Grid limit along the second axis."""

FEW_PAGES_UNITS = 128
"""From so many units per page on, a program's pages are so few that it sums one after another."""

_UNIT_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "sums_address", "num_layers",
    "num_pages", "num_pool_pages", "tail_page", "tail_tokens",
)  # fmt: skip


@triton.jit(do_not_specialize=_UNIT_ARGUMENTS)
def _move_units_kernel(
    rows_address: tl.int64,  # [num_rows, 13] int64, see `Tables.units`
    ids_address: tl.int64,  # [num_pages] page ids of ID_BYTES each
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    sums_address: tl.int64,  # [num_pages, num_layers] int64, added to; if SUM
    num_layers: tl.int64,
    num_pages: tl.int32,
    num_pool_pages: tl.int64,
    tail_page: tl.int64,  # which page has the tail; if TAIL
    tail_tokens: tl.int64,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    MOVE: tl.constexpr,  # PACK, UNPACK or SUM_ONLY
    ID_BYTES: tl.constexpr,
    TAIL: tl.constexpr,  # WHOLE, ZERO_TAIL or KEEP_TAIL
    SUM: tl.constexpr,
    FEW_PAGES: tl.constexpr,
):
    row = (
        rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.program_id(1).to(tl.int64) * 13
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
        position = (  # in the object
            tl.load(row + 2)
            + part.to(tl.int64) * tl.load(row + 6)
            + in_part.to(tl.int64) * UNIT_BYTES
        )
        packed = page.to(tl.int64) * object_stride + position
        if MOVE != 2:
            page_id = load_page_id(ids_address.to(tl.int64), page, mask, ID_BYTES)
            mask = mask & (page_id >= 0) & (page_id < num_pool_pages)
            pool = (
                page_id * tl.load(row + 1)
                + part.to(tl.int64) * tl.load(row + 5)
                + in_part.to(tl.int64) * UNIT_BYTES
            )
        else:
            pool = packed
        kept = mask
        if TAIL != 0:
            token_byte = (
                tl.load(row + 11)
                + part.to(tl.int64) * tl.load(row + 10)
                + in_part.to(tl.int64) * UNIT_BYTES
            )
            cut = (page == tail_page) & (token_byte >= tail_tokens.to(tl.int64) * tl.load(row + 9))
            kept = mask & (cut == 0)
        pool_address = tl.load(row)
        object_address = object_address.to(tl.int64)
        if UNIT_BYTES == 16:
            half = tl.arange(0, 2)[None, :]
            pool_units = tl.multiple_of(pool_address.to(tl.pointer_type(tl.int64)), 16) + (
                tl.multiple_of(pool >> 3, 2)[:, None] + half
            )
            packed_units = tl.multiple_of(object_address.to(tl.pointer_type(tl.int64)), 16) + (
                tl.multiple_of(packed >> 3, 2)[:, None] + half
            )
            position = position[:, None] + half * 8
            mask = mask[:, None]
            kept = kept[:, None]
        elif UNIT_BYTES == 8:
            pool_units = pool_address.to(tl.pointer_type(tl.int64)) + (pool >> 3)
            packed_units = object_address.to(tl.pointer_type(tl.int64)) + (packed >> 3)
        elif UNIT_BYTES == 4:
            pool_units = pool_address.to(tl.pointer_type(tl.int32)) + (pool >> 2)
            packed_units = object_address.to(tl.pointer_type(tl.int32)) + (packed >> 2)
        elif UNIT_BYTES == 2:
            pool_units = pool_address.to(tl.pointer_type(tl.int16)) + (pool >> 1)
            packed_units = object_address.to(tl.pointer_type(tl.int16)) + (packed >> 1)
        else:
            pool_units = pool_address.to(tl.pointer_type(tl.uint8)) + pool
            packed_units = object_address.to(tl.pointer_type(tl.uint8)) + packed
        if MOVE == 0:
            value = tl.load(pool_units, mask=mask, other=0)
            tl.store(packed_units, value, mask=mask)
        else:
            value = tl.load(packed_units, mask=mask, other=0)
            if MOVE == 1:
                if TAIL == 1:
                    tl.store(pool_units, tl.where(kept, value, 0), mask=mask)
                else:
                    tl.store(pool_units, value, mask=kept)
        if SUM:
            sums = sums_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.load(row + 12)
            if UNIT_BYTES == 16:
                terms = tl.sum(checksum_terms(value, position, 8), axis=1)
            else:
                terms = checksum_terms(value, position, UNIT_BYTES)
            if FEW_PAGES:
                current = divide(first, tl.load(row + 8))
                last = divide(tl.minimum(first + UNITS, num_units) - 1, tl.load(row + 8))
                while current <= last:
                    total = tl.sum(tl.where(page == current, terms, 0), axis=0)
                    tl.atomic_add(sums + current.to(tl.int64) * num_layers, total, sem="relaxed")
                    current += 1
            else:
                cells = sums + page.to(tl.int64) * num_layers
                tl.atomic_add(cells, terms, mask=unit < num_units, sem="relaxed")


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
                        move.sums_address + page * 8 * move.num_layers,
                        move.num_layers,
                        num_pages,
                        move.num_pool_pages,
                        move.num_pages - 1 - page,
                        move.tail_tokens,
                    ),
                    (
                        config.units_per_program,
                        table.unit_bytes,
                        move.kind,
                        move.id_bytes,
                        move.tail,
                        move.with_sums,
                        move.with_sums and table.min_units >= FEW_PAGES_UNITS,
                    ),
                    config.unit_warps,
                )
