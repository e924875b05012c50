"""What the compiler made of one kernel variant for one GPU, as one row of figures."""

import contextlib
from dataclasses import dataclass, field

from triton.backends.compiler import GPUTarget

from kvferry.tuning.amd import read_amd
from kvferry.tuning.compiled import Variant, compile_for
from kvferry.tuning.occupancy import bytes_in_flight, occupancy, programs_per_multiprocessor
from kvferry.tuning.sass import NoInstructionsError, Sass, read_sass

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
_WARP_THREADS_AMD = 64
_SYSTEM_SHARED_FROM = 90  # compute capability 9.0
_SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Inspected:
    """Figures of one variant on one target; what cannot be known there is None.

    Attributes:
        name, target: which.
        num_warps: per program.
        instructions: in all; 0 if the machine code could not be read.
        registers: per thread.
        spills: instructions that use local memory; on AMD, registers that were spilled.
        spill_bytes: stack and local memory per thread.
        shared_bytes: per program.
        access_bytes: width that the payload should have.
        loads, stores: width in bytes to number of such accesses, per thread.
        instructions_per_16_bytes: of payload, those outside a loop too; None without payload.
        payload_share: share of the payload that moves at that width, of reads or of writes,
            whichever is less.
        programs: resident on a multiprocessor.
        occupancy: share of its warps.
        in_flight_bytes: what it has asked memory for, at most.
        ordering: barriers, fences, atomic operations, stores and strong loads, in order.
        cache: the hint that the payload's accesses should carry, of `launch.CACHE_HINTS`.
        evict_first_loads, evict_first_stores: as `loads` and `stores`, those that carry it.
        bulk: bulk copies and what waits for them, in order.
        unread: why there are no instructions, if there are none.
    """

    name: str
    target: str
    num_warps: int
    instructions: int
    registers: int
    spills: int
    spill_bytes: int
    shared_bytes: int
    access_bytes: int
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    instructions_per_16_bytes: float | None = None
    payload_share: float | None = None
    programs: int | None = None
    occupancy: float | None = None
    in_flight_bytes: int | None = None
    ordering: tuple[str, ...] = ()
    cache: str = "none"
    evict_first_loads: dict[int, int] = field(default_factory=dict)
    evict_first_stores: dict[int, int] = field(default_factory=dict)
    bulk: tuple[str, ...] = ()
    unread: str = ""


def inspect(variant: Variant, target: str) -> Inspected:
    """Compile a variant and read what was generated; no GPU is needed.

    Args:
        variant: what to compile.
        target: `sm_90`, or `gfx942`.
    """
    return (
        _inspect_amd(variant, target)
        if target.startswith("gfx")
        else _inspect_cuda(variant, target)
    )


def _inspect_cuda(variant: Variant, target: str) -> Inspected:
    arch = int(target.removeprefix("sm_"))
    compiled = compile_for(variant, GPUTarget("cuda", arch, 32))
    shared_bytes: int = compiled.metadata.shared
    try:
        sass = read_sass(compiled.asm["cubin"])
    except NoInstructionsError as error:
        return _unread(variant, target, shared_bytes, str(error))
    if arch >= _SYSTEM_SHARED_FROM:
        # Not all kernels are said to have the system's part.
        shared_bytes += max(0, sass.static_shared_bytes - _SYSTEM_SHARED_BYTES)
    programs = occupied = in_flight = None
    with contextlib.suppress(ValueError):  # a GPU whose limits are not known
        programs = programs_per_multiprocessor(
            arch, sass.registers, variant.num_warps, shared_bytes
        )
        occupied = occupancy(arch, programs, variant.num_warps)
    payload = variant.payload_bytes / (32 * variant.num_warps)
    if programs is not None and payload:
        in_flight = bytes_in_flight(
            programs, variant.num_warps, 1, _asked_bytes(sass, variant.access_bytes, payload)
        )
    return Inspected(
        variant.name,
        target,
        variant.num_warps,
        sass.instructions,
        sass.registers,
        sass.spills,
        sass.spill_bytes,
        shared_bytes,
        variant.access_bytes,
        sass.loads,
        sass.stores,
        sass.instructions * 16 / payload if payload else None,
        _payload_share(variant, payload, sass.loads, sass.stores),
        programs,
        occupied,
        in_flight,
        sass.ordering,
        variant.cache,
        sass.evict_first_loads,
        sass.evict_first_stores,
        sass.bulk,
    )


def _inspect_amd(variant: Variant, target: str) -> Inspected:
    compiled = compile_for(variant, GPUTarget("hip", target, _WARP_THREADS_AMD))
    amd = read_amd(compiled.asm["amdgcn"])
    payload = variant.payload_bytes / (_WARP_THREADS_AMD * variant.num_warps)
    return Inspected(
        variant.name,
        target,
        variant.num_warps,
        amd.instructions,
        amd.registers,
        amd.spills,
        amd.spill_bytes,
        compiled.metadata.shared,
        variant.access_bytes,
        amd.loads,
        amd.stores,
        amd.instructions * 16 / payload if payload else None,
        _payload_share(variant, payload, amd.loads, amd.stores),
        cache=variant.cache,
        evict_first_loads=amd.evict_first_loads,
        evict_first_stores=amd.evict_first_stores,
    )


def _asked_bytes(sass: Sass, access_bytes: int, payload: float) -> int:
    """Payload that a thread has asked for before it stores any; no more than it has in all.

    Where no load has the width that payload should have, loads of tables and ids count too.
    """
    wide = sass.first_loads.get(access_bytes, 0) * access_bytes
    every = sum(width * number for width, number in sass.first_loads.items())
    return int(min(wide or every, payload))


def _unread(variant: Variant, target: str, shared_bytes: int, why: str) -> Inspected:
    return Inspected(
        variant.name,
        target,
        variant.num_warps,
        *(0, 0, 0, 0, shared_bytes, variant.access_bytes),
        unread=why,
    )


def _payload_share(
    variant: Variant, payload: float, loads: dict[int, int], stores: dict[int, int]
) -> float | None:
    """Of loads some are of tables and ids, so payload is what must be there; stores are payload."""
    if not payload:
        return None
    width = variant.access_bytes
    read = min(1.0, loads.get(width, 0) * width / payload)
    if not variant.writes:
        return 0.0 if stores else read
    stored = sum(bytes_each * number for bytes_each, number in stores.items())
    return min(read, stores.get(width, 0) * width / max(payload, stored))
