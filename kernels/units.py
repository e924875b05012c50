"""Short or narrow runs: a kernel that moves units of 16, 8, 4, 2 or 1 bytes, and its launcher.

Token rows, head slices, scales, odd pages. The launcher computes launches and starts none; the
plain-torch twin of both this and `tiles` is `reference.move_reference`.
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
from kvferry.kernels.metadata import units_metadata
from kvferry.kernels.tables import SUMMED_BYTES, Move, Table, divisor
from kvferry.launch import CACHE_HINTS, LaunchConfig

MAX_ROWS_PER_LAUNCH = 65535
"""Grid limit along the second axis."""

MAX_BLOCKS = 2**31 - 2**16
"""Blocks of one launch that programs under a budget count through."""

FEW_PAGES_UNITS = 128
"""From so many units per page on, a program's pages are so few that it sums one after another."""

_UNIT_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "sums_address", "num_layers",
    "num_pages", "num_pool_pages", "tail_page", "tail_tokens", "num_blocks", "row_divisor",
    "blocks_per_row",
)  # fmt: skip


@triton.jit
def _move_block(
    row, first, ids_address, object_address, object_stride, sums_address, num_layers, num_pages,
    num_pool_pages, tail_page, tail_tokens, UNITS: tl.constexpr, UNIT_BYTES: tl.constexpr,
    MOVE: tl.constexpr, ID_BYTES: tl.constexpr, TAIL: tl.constexpr, SUM: tl.constexpr,
    FEW_PAGES: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Move UNITS units of a row, from number `first` on, if there are so many."""
    units_per_part = tl.load(row + 3).to(tl.int32)
    units_per_page = tl.load(row + 4).to(tl.int32)
    num_units = num_pages * units_per_page  # under 2**31, as the launcher sees to
    if first < num_units:
        unit = first + tl.arange(0, UNITS)
        mask = unit < num_units
        page = divide(unit, tl.load(row + 8))
        in_page = unit + page * -units_per_page  # the negation once, not for every unit
        part = divide(in_page, tl.load(row + 7))
        in_part = in_page + part * -units_per_part
        # Known not to be negative, 32 bits take half as many instructions to multiply by 64.
        wide_page = page.to(tl.uint32).to(tl.int64)
        wide_part = part.to(tl.uint32).to(tl.int64)
        in_part_bytes = in_part.to(tl.uint32).to(tl.int64) * UNIT_BYTES
        in_object = tl.load(row + 2) + wide_part * tl.load(row + 6) + in_part_bytes
        packed = wide_page * object_stride + in_object
        # Where the stores go is worked out first: so the compiler keeps it in fewer registers, and
        # one more program fits on a multiprocessor.
        if MOVE == 0:
            packed_at = object_address.to(tl.int64) + packed
        pool = packed
        if MOVE != 2:
            page_id = load_page_id(ids_address.to(tl.int64), page, mask, ID_BYTES)
            # As unsigned numbers, so that a negative id is out of bounds too.
            mask = mask & (page_id.to(tl.uint64) < num_pool_pages.to(tl.uint64))
            pool = page_id.to(tl.uint32).to(tl.int64) * tl.load(row + 1)
            pool += wide_part * tl.load(row + 5) + in_part_bytes
        is_there = mask
        kept = mask
        if TAIL != 0:
            token_byte = tl.load(row + 11) + wide_part * tl.load(row + 10) + in_part_bytes
            cut = (page == tail_page) & (token_byte >= tail_tokens.to(tl.int64) * tl.load(row + 9))
            kept = mask & (cut == 0)
        pool_at = tl.load(row) + pool
        if MOVE != 0:
            packed_at = object_address.to(tl.int64) + packed
        if UNIT_BYTES == 16:
            # Two words of 8 bytes: the hint on the pointers makes one access of them.
            half = tl.arange(0, 2)[None, :]
            pool_units = tl.multiple_of(pool_at.to(tl.pointer_type(tl.int64)), 16)[:, None] + half
            packed_units = (
                tl.multiple_of(packed_at.to(tl.pointer_type(tl.int64)), 16)[:, None] + half
            )
            mask = mask[:, None]
            kept = kept[:, None]
        elif UNIT_BYTES == 8:
            pool_units = pool_at.to(tl.pointer_type(tl.int64))
            packed_units = packed_at.to(tl.pointer_type(tl.int64))
        elif UNIT_BYTES == 4:
            pool_units = pool_at.to(tl.pointer_type(tl.int32))
            packed_units = packed_at.to(tl.pointer_type(tl.int32))
        elif UNIT_BYTES == 2:
            pool_units = pool_at.to(tl.pointer_type(tl.int16))
            packed_units = packed_at.to(tl.pointer_type(tl.int16))
        else:
            pool_units = pool_at.to(tl.pointer_type(tl.uint8))
            packed_units = packed_at.to(tl.pointer_type(tl.uint8))
        source = pool_units if MOVE == 0 else packed_units
        value = load_payload(source, mask, CACHE)
        if MOVE == 0:
            store_payload(packed_units, value, mask, CACHE)
        elif MOVE == 1 and TAIL != 1:
            store_payload(pool_units, value, kept, CACHE)
        if SUM:
            # Which pair of words of their object they are, in 32 bits, as objects are under 2 GiB.
            tl.static_assert(UNIT_BYTES >= 8, "narrower units are summed by `pairs`")
            position = tl.load(row + 2) + wide_part * tl.load(row + 6) + in_part_bytes
            pair = position.to(tl.uint32) >> 3
            sums = sums_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.load(row + 12)
            if UNIT_BYTES == 16:
                pair = pair[:, None] + tl.arange(0, 2)[None, :].to(tl.uint32)
                terms = tl.sum(checksum_terms(value, pair), axis=1)
            else:
                terms = checksum_terms(value, pair)
            if FEW_PAGES:
                current = divide(first, tl.load(row + 8))
                last = divide(tl.minimum(first + UNITS, num_units) - 1, tl.load(row + 8))
                while current <= last:
                    total = tl.sum(tl.where(is_there & (page == current), terms, 0), axis=0)
                    tl.atomic_add(sums + current.to(tl.int64) * num_layers, total, sem="relaxed")
                    current += 1
            else:
                cells = sums + wide_page * num_layers
                tl.atomic_add(cells, terms, mask=is_there, sem="relaxed")
        # Behind the sum: else what a tail zeroes takes registers of its own meanwhile, and spills.
        if MOVE == 1 and TAIL == 1:
            store_payload(pool_units, tl.where(kept, value, 0), mask, CACHE)


@triton.jit(do_not_specialize=_UNIT_ARGUMENTS, launch_metadata=units_metadata)
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
    num_blocks: tl.int32,  # of all rows; if PERSISTENT
    row_divisor: tl.int64,  # by the blocks of a row; if PERSISTENT
    blocks_per_row: tl.int32,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    MOVE: tl.constexpr,  # PACK, UNPACK or SUM_ONLY
    ID_BYTES: tl.constexpr,
    TAIL: tl.constexpr,  # WHOLE, ZERO_TAIL or KEEP_TAIL
    SUM: tl.constexpr,
    FEW_PAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,  # whether programs go on to further blocks
    CACHE: tl.constexpr,  # a place in `CACHE_HINTS`
):
    rows = rows_address.to(tl.int64).to(tl.pointer_type(tl.int64))
    if PERSISTENT:
        number = tl.program_id(0)
        while number < num_blocks:
            row = divide(number, row_divisor.to(tl.int64))
            _move_block(
                rows + row.to(tl.int64) * 13, (number - row * blocks_per_row) * UNITS, ids_address,
                object_address, object_stride, sums_address, num_layers, num_pages, num_pool_pages,
                tail_page, tail_tokens, UNITS, UNIT_BYTES, MOVE, ID_BYTES, TAIL, SUM, FEW_PAGES,
                CACHE,
            )  # fmt: skip
            number += tl.num_programs(0)
    else:
        _move_block(
            rows + tl.program_id(1).to(tl.int64) * 13, tl.program_id(0) * UNITS, ids_address,
            object_address, object_stride, sums_address, num_layers, num_pages, num_pool_pages,
            tail_page, tail_tokens, UNITS, UNIT_BYTES, MOVE, ID_BYTES, TAIL, SUM, FEW_PAGES, CACHE,
        )  # fmt: skip


def unit_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield one launch per range of layers: programs `(units of all pages, row)`.

    A program counts units in 32 bits; more pages than that allows take several launches.
    """
    with_sums = move.with_sums and table.unit_bytes >= SUMMED_BYTES
    pages_per_launch = max(1, (2**31 - config.units_per_program) // table.max_units)
    for first_layer, end_layer in move.layer_ranges:
        first, end = table.layer_starts[first_layer], table.layer_starts[end_layer]
        for page in range(0, move.num_pages, pages_per_launch):
            num_pages = min(pages_per_launch, move.num_pages - page)
            blocks = -(-num_pages * table.max_units // config.units_per_program)
            rows_per_launch = min(MAX_ROWS_PER_LAUNCH, max(1, MAX_BLOCKS // blocks))
            for row in range(first, end, rows_per_launch):
                num_rows = min(rows_per_launch, end - row)
                num_blocks = num_rows * blocks
                num_programs = config.programs_for(num_blocks)
                is_persistent = num_programs < num_blocks
                yield Launch(
                    _move_units_kernel,
                    (num_programs, 1) if is_persistent else (blocks, num_rows),
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
                        num_blocks,
                        divisor(blocks),
                        blocks,
                    ),
                    (
                        config.units_per_program,
                        table.unit_bytes,
                        move.kind,
                        move.id_bytes,
                        move.tail,
                        with_sums,
                        with_sums and table.min_units >= FEW_PAGES_UNITS,
                        is_persistent,
                        CACHE_HINTS.index(config.cache),
                    ),
                    config.unit_warps,
                )
