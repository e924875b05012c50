"""How many programs a multiprocessor holds at once, and how many bytes they keep in flight."""

from dataclasses import dataclass

WARP_THREADS = 32
_REGISTERS_PER_ALLOCATION = 256
_WARPS_PER_ALLOCATION = 4
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs on one multiprocessor share.

    Attributes:
        registers: of 32 bits.
        warps: resident at once.
        programs: resident at once.
        shared_bytes: of shared memory, 1 KiB of which each program costs beyond its own.
    """

    registers: int
    warps: int
    programs: int
    shared_bytes: int


MULTIPROCESSORS = {
    80: Multiprocessor(65536, 64, 32, 164 * 1024),
    90: Multiprocessor(65536, 64, 32, 228 * 1024),
    100: Multiprocessor(65536, 64, 32, 228 * 1024),
    103: Multiprocessor(65536, 64, 32, 228 * 1024),
    120: Multiprocessor(65536, 48, 24, 100 * 1024),
}
"""By compute capability, `90` being 9.0.

Source: «Technical Specifications per Compute Capability» in the CUDA C++ Programming Guide; how
registers, warps and shared memory are allocated is in `cuda_occupancy.h` of the CUDA toolkit.
"""


def programs_per_multiprocessor(
    arch: int, registers: int, num_warps: int, shared_bytes: int = 0
) -> int:
    """Return how many programs are resident on one multiprocessor at once.

    Limits are those of `MULTIPROCESSORS`, from the CUDA C++ Programming Guide and
    `cuda_occupancy.h`: registers go to warps by 256, and to four warps at a time.

    Args:
        arch: compute capability, `90` for 9.0.
        registers: per thread.
        num_warps: per program.
        shared_bytes: of shared memory, per program.

    Raises:
        ValueError: the limits of this compute capability are not known.
    """
    limits = MULTIPROCESSORS.get(arch)
    if limits is None:
        known = ", ".join(f"sm_{one}" for one in MULTIPROCESSORS)
        raise ValueError(f"arch is sm_{arch}, wanted one of {known}")
    per_warp = max(_round_up(registers * WARP_THREADS, _REGISTERS_PER_ALLOCATION), 1)
    warps_by_registers = limits.registers // per_warp // _WARPS_PER_ALLOCATION
    by_shared = limits.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES)
    return min(
        warps_by_registers * _WARPS_PER_ALLOCATION // num_warps,
        limits.warps // num_warps,
        limits.programs,
        by_shared,
    )


def occupancy(arch: int, programs: int, num_warps: int) -> float:
    """Return the share of the warps that could be resident which `programs` programs are."""
    return programs * num_warps / MULTIPROCESSORS[arch].warps


def bytes_in_flight(programs: int, num_warps: int, loads_in_flight: int, access_bytes: int) -> int:
    """Return the bytes that a multiprocessor has asked memory for and not got yet, at most.

    Args:
        programs: resident on it.
        num_warps: per program.
        loads_in_flight: of one thread: what it loads before it first needs one of them.
        access_bytes: of one load.
    """
    return programs * num_warps * WARP_THREADS * loads_in_flight * access_bytes


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
