"""Checksums of what moves by units of less than 8 bytes: a kernel that reads it in objects.

The checksum mixes pairs of words, 8 bytes, and narrower units or layers' odd ends hold parts of
one. So these are summed by a launch of their own, behind the one that has packed them: each lane
gathers a pair from bytes. It is slow, and there are few such bytes.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from kvferry.kernels.device import SUM_ONLY, checksum_terms, divide, load_page_id
from kvferry.kernels.handles import Launch
from kvferry.kernels.metadata import pairs_metadata
from kvferry.kernels.tables import Move, Table, divisor
from kvferry.launch import LaunchConfig

PAIRS_PER_PROGRAM = 128
NUM_WARPS = 4

_PAIR_ARGUMENTS = (
    "rows_address", "ids_address", "object_address", "object_stride", "sums_address", "num_layers",
    "num_pages", "num_pool_pages", "num_blocks", "row_divisor", "blocks_per_row",
)  # fmt: skip


@triton.jit(do_not_specialize=_PAIR_ARGUMENTS, launch_metadata=pairs_metadata)
def _sum_pairs_kernel(
    rows_address: tl.int64,  # [num_rows, 5] int64, see `Tables.pairs`
    ids_address: tl.int64,  # [num_pages] page ids of ID_BYTES each; if CHECKED
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    sums_address: tl.int64,  # [num_pages, num_layers] int64, added to
    num_layers: tl.int64,
    num_pages: tl.int32,
    num_pool_pages: tl.int64,
    num_blocks: tl.int32,  # of all rows
    row_divisor: tl.int64,  # by the blocks of a row
    blocks_per_row: tl.int32,
    PAIRS: tl.constexpr,  # of a program at once
    CHECKED: tl.constexpr,  # whether pages of ids outside the pools are left out
    ID_BYTES: tl.constexpr,
):
    number = tl.program_id(0)
    while number < num_blocks:
        block = divide(number, row_divisor.to(tl.int64))
        row = rows_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + block.to(tl.int64) * 5
        start, end, num_pairs = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
        lane = (number - block * blocks_per_row) * PAIRS + tl.arange(0, PAIRS)
        mask = lane < num_pages * num_pairs  # under 2**31, as the launcher sees to
        page = divide(lane, tl.load(row + 3))
        pair = (start >> 3) + (lane - page * num_pairs).to(tl.int64)
        if CHECKED:
            page_id = load_page_id(ids_address.to(tl.int64), page, mask, ID_BYTES)
            # What the kernels did not move they do not sum either.
            mask = mask & (page_id >= 0) & (page_id < num_pool_pages)
        packed = object_address.to(tl.int64) + page.to(tl.int64) * object_stride
        value = tl.zeros([PAIRS], dtype=tl.int64)
        for byte in tl.static_range(8):
            place = pair * 8 + byte
            inside = mask & (place >= start) & (place < end)
            one = tl.load((packed + place).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            value = value | (one.to(tl.int64) << (byte * 8))
        sums = sums_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + tl.load(row + 4)
        terms = checksum_terms(value, pair.to(tl.uint32))
        tl.atomic_add(sums + page.to(tl.int64) * num_layers, terms, mask=mask, sem="relaxed")
        number += tl.num_programs(0)


def pair_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield one launch per range of layers; more pages or rows than 31 bits count take several."""
    pages_per_launch = max(1, (2**31 - PAIRS_PER_PROGRAM) // table.max_units)
    for first_layer, end_layer in move.layer_ranges:
        first, end = table.layer_starts[first_layer], table.layer_starts[end_layer]
        for page in range(0, move.num_pages, pages_per_launch):
            num_pages = min(pages_per_launch, move.num_pages - page)
            blocks = -(-num_pages * table.max_units // PAIRS_PER_PROGRAM)
            rows_per_launch = max(1, (2**31 - 2**16) // blocks)
            for row in range(first, end, rows_per_launch):
                num_blocks = min(rows_per_launch, end - row) * blocks
                yield Launch(
                    _sum_pairs_kernel,
                    (config.programs_for(num_blocks), 1),
                    (
                        table.row_address(row),
                        move.ids_address + page * move.id_bytes,
                        move.object_address + page * move.stride_bytes,
                        move.stride_bytes,
                        move.sums_address + page * 8 * move.num_layers,
                        move.num_layers,
                        num_pages,
                        move.num_pool_pages,
                        num_blocks,
                        divisor(blocks),
                        blocks,
                    ),
                    (PAIRS_PER_PROGRAM, move.kind != SUM_ONLY, move.id_bytes),
                    NUM_WARPS,
                )
