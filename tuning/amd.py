"""What AMD's assembly of a compiled kernel tells of it, as the compiler wrote it."""

import re
from collections import Counter
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)
_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_NON_TEMPORAL = re.compile(r"^\s+((?:global|buffer|flat)_\w+)[^\n;]*\bnt\b", re.MULTILINE)
_COUNT = re.compile(r"^\s+\.(\w+_count|private_segment_fixed_size):\s+(\d+)$", re.MULTILINE)
_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1}
_PADDING = ("s_nop", "s_code_end")


@dataclass(frozen=True)
class Amd:
    """What one kernel's assembly holds.

    Attributes:
        instructions: in all, without padding.
        registers: vector registers per thread.
        scalar_registers: per warp of 64 threads.
        spill_bytes: of memory that each thread keeps for itself.
        spills: registers that were spilled, of both kinds.
        loads, stores: width in bytes to number of such accesses to global memory, per thread.
        evict_first_loads, evict_first_stores: those that are non-temporal, as AMD calls it.
    """

    instructions: int
    registers: int
    scalar_registers: int
    spill_bytes: int
    spills: int
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    evict_first_loads: dict[int, int] = field(default_factory=dict)
    evict_first_stores: dict[int, int] = field(default_factory=dict)


def read_amd(assembly: str) -> Amd:
    """Read an assembly: its instructions, and the counts in its metadata.

    Raises:
        KeyError: the metadata lacks a count.
    """
    names = [name for name in _INSTRUCTION.findall(assembly) if name not in _PADDING]
    counts = {name: int(number) for name, number in _COUNT.findall(assembly)}
    evict_first = _NON_TEMPORAL.findall(assembly)
    return Amd(
        len(names),
        counts["vgpr_count"],
        counts["sgpr_count"],
        counts["private_segment_fixed_size"],
        counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        _widths("load", names),
        _widths("store", names),
        _widths("load", evict_first),
        _widths("store", evict_first),
    )


def _widths(way: str, names: list[str]) -> dict[int, int]:
    accesses = filter(None, map(_ACCESS.match, names))
    return dict(Counter(_width(found.group(2)) for found in accesses if found.group(1) == way))


def _width(kind: str) -> int:
    """Bytes of `dwordx4`, `ushort`, `byte_d16_hi` and so on."""
    stem = kind.split("_")[0]
    return _WIDTHS.get(stem) or _WIDTHS[stem[1:]]
