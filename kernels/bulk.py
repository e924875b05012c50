"""Long runs by bulk copies: one thread a program has tiles copied through a ring in shared memory.

No GPU has run this yet: it was compiled and its machine code read, no more. So nothing takes it by
itself: `Packer(layout, space, LaunchConfig(form="bulk", max_programs=n))` asks for it. What it does
not do (checksums, tails, 64-bit page ids) goes by the page kernel of `tiles`, as all does without
it, and which moves the same bytes from the same table.

A tile takes two asynchronous copies and no register: from global memory into a stage of the ring,
where a barrier counts its bytes, and from there to global memory. A program has some stages of
TILE_BYTES each; while one is stored, the others are being filled.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvferry.errors import ArgumentError
from kvferry.kernels.device import PACK, UNPACK, WHOLE
from kvferry.kernels.handles import Launch
from kvferry.kernels.metadata import tiles_metadata
from kvferry.kernels.tables import Move, Table
from kvferry.kernels.tiles import _TILE_ARGUMENTS, _find_tile, tile_launches
from kvferry.launch import LaunchConfig

RING_BYTES = 48 * 1024
"""Of shared memory, the same for all sizes of tiles: what a kernel may have at most without asking
the driver for more."""

STAGE_NOTE_BYTES = 32
"""Behind the stages, for each: its barrier (8 bytes), where its tile goes (8), its bytes (4)."""

LEAST_CAPABILITY = (9, 0)


@triton.jit
def _open_ring():
    """Return the ring's address in shared memory."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 ring[49152]; mov.u32 $0, ring; }",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _open_stage(note):
    """Make a stage's barrier: one arrival, and the bytes that it announces, end a phase."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 thread;
        mov.b32 $0, 0;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$1], 1;
        }""",
        "=&r,r",
        [note],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _show_stages():
    """Let asynchronous copies see the barriers."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _start_load(stage, note, source, target, num_bytes):
    """Start copying a tile into a stage, whose last tile but one store has been read by now."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first, some; .reg .b32 thread; .reg .b64 state;
        mov.b32 $0, 0;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.wait_group.read 1;
        @first st.shared.b64 [$2+8], $4;
        @first st.shared.b32 [$2+16], $5;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 state, [$2], $5;
        setp.ne.and.b32 some, $5, 0, first;
        @some cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [$1], [$3], $5, [$2];
        }""",
        "=&r,r,r,l,l,r",
        [stage, note, source, target, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _start_store(stage, note, parity):
    """Wait until a stage's tile is there, and start copying it to where it belongs."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred other, there, some; .reg .b32 thread, bytes; .reg .b64 target;
        mov.b32 $0, 0;
        mov.u32 thread, %tid.x;
        setp.ne.u32 other, thread, 0;
        @other bra end;
        wait: mbarrier.try_wait.parity.shared::cta.b64 there, [$2], $3;
        @!there bra wait;
        ld.shared.b64 target, [$2+8];
        ld.shared.b32 bytes, [$2+16];
        setp.ne.b32 some, bytes, 0;
        @some cp.async.bulk.global.shared::cta.bulk_group [target], [$1], bytes;
        cp.async.bulk.commit_group;
        end:
        }""",
        "=&r,r,r,r",
        [stage, note, parity],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _close_ring():
    """Wait until all that was stored has arrived: the memory of a program that ended is reused."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=_TILE_ARGUMENTS, launch_metadata=tiles_metadata)
def _move_bulk_kernel(
    rows_address: tl.int64,  # [num_rows, 7] int64, see `Tables.tiles`
    ids_address: tl.int64,  # [num_pages] int32 page ids
    object_address: tl.int64,  # object 0, such that row offsets count from here
    object_stride: tl.int64,
    sums_address: tl.int64,  # not used, nor are the next and `tail_tokens`: as the page kernel's
    num_layers: tl.int64,
    num_pages: tl.int32,
    page_divisor: tl.int64,
    num_pool_pages: tl.int64,
    tail_tokens: tl.int64,
    num_tiles: tl.int32,
    TILE_BYTES: tl.constexpr,  # of a stage, and of a tile at most
    MOVE: tl.constexpr,  # PACK or UNPACK
    STAGES: tl.constexpr,  # two or more
):
    ring = _open_ring()
    notes = ring + STAGES * TILE_BYTES
    for stage in tl.static_range(STAGES):
        _open_stage(notes + stage * 32)
    _show_stages()
    number = tl.program_id(0).to(tl.int64)
    turn = 0
    # Each turn stores the tile that was loaded STAGES - 1 turns ago, and loads another.
    while number - (STAGES - 1) * tl.num_programs(0) < num_tiles:
        # Where the tile lies is found before the wait for an older one, and so during it.
        _, _, pool, packed, num_bytes = _find_tile(
            tl.minimum(number, num_tiles - 1).to(tl.int32), rows_address, ids_address,
            object_address, object_stride, num_pages, page_divisor, num_pool_pages, MOVE, 4,
        )  # fmt: skip
        if turn >= STAGES - 1:
            loaded = turn - (STAGES - 1)
            at = loaded % STAGES
            _start_store(ring + at * TILE_BYTES, notes + at * 32, loaded // STAGES % 2)
        if number < num_tiles:
            at = turn % STAGES
            source = pool if MOVE == 0 else packed
            target = packed if MOVE == 0 else pool
            _start_load(
                ring + at * TILE_BYTES, notes + at * 32, source, target, num_bytes.to(tl.int32)
            )
        number += tl.num_programs(0)
        turn += 1
    _close_ring()


def num_stages(tile_bytes: int) -> int:
    """Return how many stages of this size the ring has."""
    return RING_BYTES // (tile_bytes + STAGE_NOTE_BYTES)


def takes_bulk(move: Move, config: LaunchConfig) -> bool:
    """Whether a move's long runs go by bulk copies: they are asked for, and can do all of it."""
    return (
        config.form == "bulk"
        and move.kind in (PACK, UNPACK)
        and move.tail == WHOLE
        and not move.with_sums
        and move.id_bytes == 4
    )


def bulk_launches(table: Table, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield the page kernel's launches of a move that `takes_bulk`, for this kernel."""
    for launch in tile_launches(table, move, config):
        constants = (config.tile_bytes, move.kind, num_stages(config.tile_bytes))
        yield launch._replace(kernel=_move_bulk_kernel, constants=constants, num_warps=1)


def check_device(device: torch.device) -> None:
    """See that a device has bulk copies.

    Raises:
        ArgumentError: it has not.
    """
    name = str(device)
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= LEAST_CAPABILITY:
            return
        name += f", of compute capability {capability[0]}.{capability[1]}"
    raise ArgumentError(
        f"form is 'bulk' and the pools are on {name}, wanted an NVIDIA GPU of compute capability "
        f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
    )
