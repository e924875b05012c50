"""Machine code of a compiled kernel, read with the tools that come with Triton: no GPU needed."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")
_REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ORDERING = re.compile(r"BAR|MEMBAR|RED|ATOM|STG|ST\.|CCTL|LDG\..*STRONG")
_BULK = re.compile(r"UBLKCP|UTMACMDFLUSH|DEPBAR|SYNCS\.(PHASECHK|ARRIVE)|CCTL|EXIT")
_TOOL_LIMIT_S = 60


class NoInstructionsError(RuntimeError):
    """The tool printed no instruction, most likely because it is older than the architecture."""


@dataclass(frozen=True)
class Sass:
    """What one kernel's machine code holds.

    Attributes:
        instructions: in all, without the padding at the end.
        registers: per thread.
        spill_bytes: stack and local memory per thread.
        spills: instructions that use local memory.
        loads, stores: width in bytes to number of such accesses to global memory, per thread.
        first_loads: those of the loads that come before the first store or atomic operation.
        ordering: barriers, fences, atomic operations, stores and strong loads, in order.
        evict_first_loads, evict_first_stores: those that ask the caches to drop their lines first.
        static_shared_bytes: of shared memory that the code declares; from sm_90 on, mostly with
            1 KiB of the system's own.
        bulk: bulk copies and what waits for them, in order; none if there are no copies.
    """

    instructions: int
    registers: int
    spill_bytes: int
    spills: int
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    first_loads: dict[int, int] = field(default_factory=dict)
    ordering: tuple[str, ...] = ()
    evict_first_loads: dict[int, int] = field(default_factory=dict)
    evict_first_stores: dict[int, int] = field(default_factory=dict)
    static_shared_bytes: int = 0
    bulk: tuple[str, ...] = ()


def read_sass(cubin: bytes) -> Sass:
    """Read a cubin.

    Raises:
        NoInstructionsError: the tool failed, or there are none in what it printed.
    """
    names = instruction_names(cubin)
    while names and names[-1] == "NOP":
        names.pop()
    if names and names[-1] == "BRA":  # to itself, behind the end
        names.pop()
    usage = _REGISTERS.search(_read("-res-usage", cubin))
    if not names or usage is None:
        raise NoInstructionsError(
            "cuobjdump printed no instructions: its version knows not this GPU"
        )
    registers, stack, shared, local = (int(number) for number in usage.groups())
    evict_first = [name for name in names if ".EF" in name]
    writes = (at for at, name in enumerate(names) if name.startswith(("STG", "RED", "ATOM")))
    return Sass(
        len(names),
        registers,
        stack + local,
        sum(name.startswith(("LDL", "STL")) for name in names),
        _widths("LDG", names),
        _widths("STG", names),
        _widths("LDG", names[: next(writes, len(names))]),
        tuple(name for name in names if _ORDERING.match(name)),
        _widths("LDG", evict_first),
        _widths("STG", evict_first),
        shared,
        tuple(filter(_BULK.match, names)) if any("UBLKCP" in name for name in names) else (),
    )


def instruction_names(cubin: bytes) -> list[str]:
    """Return the instructions in order, without operands: `MEMBAR.ALL.SYS`, and so on.

    Raises:
        NoInstructionsError: the tool failed.
    """
    matches = map(_INSTRUCTION.search, _read("-sass", cubin).splitlines())
    return [match.group(1) for match in matches if match]


def _read(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        return _tool(option, file.name)


def _tool(option: str, path: str) -> str:
    done = subprocess.run(
        [_BIN / "cuobjdump", option, path], capture_output=True, text=True, timeout=_TOOL_LIMIT_S
    )
    if done.returncode:
        raise NoInstructionsError(f"cuobjdump {option} failed: {done.stderr.strip()}")
    return done.stdout


def _widths(start: str, names: list[str]) -> dict[int, int]:
    return dict(Counter(_width(name) for name in names if name.startswith(start)))


def _width(name: str) -> int:
    """Bytes of an access, by the parts of its name: `LDG.E.128` moves 16, without a number 4."""
    parts = name.split(".")[1:]
    known = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((known[part] for part in parts if part in known), 4)
