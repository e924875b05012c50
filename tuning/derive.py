"""Derives launch numbers for GPUs that nobody has measured on, from machine code alone.

Every candidate is compiled for the GPU's architecture and its machine code read. What spills, or
moves payload by less than 16 bytes at a time, is out. Of the others, for each direction:

- without a budget, the one whose programs keep the most bytes in flight on a multiprocessor: all
  multiprocessors are full then;
- under a budget, the one that keeps the most bytes in flight in one program: programs are so few
  that each has a multiprocessor to itself; but from 32 programs on none that moves more than 16 KiB
  at once, since so many programs share such tiles out unevenly (`tests/test_balance.py`);
- of several, the smallest: small tiles balance better, and a run that is shorter than its tile
  leaves less of it idle; then the one with the fewest instructions per 16 bytes, then warps.

The default takes the worst of each figure over the CUDA architectures. For AMD's GPUs occupancy is
not worked out here: they take the default, compiled for their architecture. A derived file holds
the figures of every candidate, so that its choices can be followed without compiling.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kvferry.kernels.device import PACK, UNPACK, WHOLE
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.kernels.units import _move_units_kernel
from kvferry.launch import CACHE_HINTS, DEFAULT_LAUNCH
from kvferry.tuned import CONFIGS, DEFAULT_NAME, DIRECTIONS, SCHEMA
from kvferry.tuning.compiled import Variant, compile_for
from kvferry.tuning.occupancy import WARP_THREADS, bytes_in_flight, programs_per_multiprocessor
from kvferry.tuning.sass import instruction_names, read_sass

GPUS = {
    "NVIDIA_A100": ("sm_80", ("NVIDIA A100",)),
    "NVIDIA_H100": ("sm_90", ("NVIDIA H100",)),
    "NVIDIA_H200": ("sm_90", ("NVIDIA H200",)),
    "NVIDIA_B200": ("sm_100", ("NVIDIA B200",)),
    # The cuobjdump of Triton 3.6 cannot read sm_103; its machine code is close to sm_100's.
    "NVIDIA_B300": ("sm_100", ("NVIDIA B300",)),
    "NVIDIA_GB200": ("sm_100", ("NVIDIA GB200",)),
    "AMD_MI300X": ("gfx942", ("AMD Instinct MI300X",)),
    DEFAULT_NAME: ("all", ()),
}
"""A file's name to what is compiled for, and the beginnings of the names that torch reports."""

CUDA_ARCHES = ("sm_80", "sm_90", "sm_100")
CLASS_BYTES = 64 << 20
"""The one size class of a derived file: nothing in its figures depends on the size of a move."""

LARGEST_BYTES = {0: 32768, 16: 32768, 32: 16384}
"""A derived file's budgets, and what a program may move at once under each. At 16 programs a mix of
page sizes stays within 4 % of evenly shared with tiles of 32 KiB; at 32 it can be 17 % off."""

PAYLOAD_ACCESS_BYTES = 16
_KINDS = {"pack": PACK, "unpack": UNPACK}


@dataclass(frozen=True)
class Candidate:
    """One kernel with numbers that it could be launched with.

    Attributes:
        kernel: `tiles` or `units`.
        direction: `pack` or `unpack`.
        persistent: the form under a budget.
        size: bytes of a tile, or units of a program.
        num_warps: per program.
    """

    kernel: str
    direction: str
    persistent: bool
    size: int
    num_warps: int

    @property
    def payload_bytes(self) -> int:
        """What a program moves at once."""
        return self.size if self.kernel == "tiles" else self.size * PAYLOAD_ACCESS_BYTES

    @property
    def variant(self) -> Variant:
        """As it is compiled: with the 32-bit page ids that transfers use, without checksums."""
        constants: dict[str, Any] = {
            "MOVE": _KINDS[self.direction], "ID_BYTES": 4, "TAIL": WHOLE, "SUM": False,
            "PERSISTENT": self.persistent, "CACHE": CACHE_HINTS.index(DEFAULT_LAUNCH.cache),
        }  # fmt: skip
        if self.kernel == "tiles":
            constants["TILE_BYTES"] = self.size
        else:
            constants |= {
                "UNITS": self.size, "UNIT_BYTES": PAYLOAD_ACCESS_BYTES, "FEW_PAGES": False
            }  # fmt: skip
        kernel = _move_tiles_kernel if self.kernel == "tiles" else _move_units_kernel
        name = f"{self.direction}_{self.kernel}_{self.size}_{self.num_warps}"
        return Variant(
            name, kernel, constants, self.num_warps, self.payload_bytes, PAYLOAD_ACCESS_BYTES
        )


@dataclass(frozen=True)
class Figures:
    """What a candidate's machine code says.

    Attributes:
        registers: per thread.
        spill_bytes: per thread.
        programs: on one multiprocessor at once.
        program_bytes_in_flight: that one program has asked memory for at once.
        bytes_in_flight: the same of all programs of a multiprocessor.
        instructions_per_16_bytes: of payload.
    """

    registers: int
    spill_bytes: int
    programs: int
    program_bytes_in_flight: int
    bytes_in_flight: int
    instructions_per_16_bytes: float


def candidates() -> list[Candidate]:
    """Return what is compared: sizes and warps of both kernels, directions and forms."""
    sizes = {"tiles": (8192, 16384, 32768), "units": (512, 1024, 2048)}
    return [
        Candidate(kernel, direction, persistent, size, num_warps)
        for kernel in sizes
        for direction, persistent in product(DIRECTIONS, (False, True))
        for size, num_warps in product(sizes[kernel], (4, 8))
    ]


def loads_in_flight(names: Sequence[str]) -> int:
    """Return how many 16-byte loads stand between two stores, at most: nothing waits for them."""
    most = count = 0
    for name in names:
        if name.startswith("LDG") and ".128" in name:
            count += 1
            most = max(most, count)
        elif name.startswith("STG"):
            count = 0
    return most


@cache
def figures_of(candidate: Candidate, arch: str) -> Figures:
    """Compile a candidate for `sm_90` or the like and read its machine code."""
    number = int(arch.removeprefix("sm_"))
    compiled = compile_for(candidate.variant, GPUTarget("cuda", number, 32))
    cubin = compiled.asm["cubin"]
    sass = read_sass(cubin)
    loads = loads_in_flight(instruction_names(cubin))
    programs = programs_per_multiprocessor(
        number, sass.registers, candidate.num_warps, compiled.metadata.shared
    )
    thread_bytes = candidate.payload_bytes // (WARP_THREADS * candidate.num_warps)
    in_flight = (candidate.num_warps, loads, PAYLOAD_ACCESS_BYTES)
    return Figures(
        sass.registers,
        sass.spill_bytes,
        programs,
        bytes_in_flight(1, *in_flight),
        bytes_in_flight(programs, *in_flight),
        round(sass.instructions * PAYLOAD_ACCESS_BYTES / thread_bytes, 2),
    )


def worst_of(figures: Sequence[Figures]) -> Figures:
    """Return the worst of each figure."""
    return Figures(
        max(one.registers for one in figures),
        max(one.spill_bytes for one in figures),
        min(one.programs for one in figures),
        min(one.program_bytes_in_flight for one in figures),
        min(one.bytes_in_flight for one in figures),
        max(one.instructions_per_16_bytes for one in figures),
    )


def is_pruned(figures: Figures) -> bool:
    """Whether a candidate is out: it spills, or loads no payload at full width."""
    return figures.spill_bytes > 0 or figures.program_bytes_in_flight == 0


def pick(rows: Iterable[tuple[Candidate, Figures]]) -> Candidate:
    """Return the best candidate by the rule above; all are of one kernel, direction and form."""
    left = [row for row in rows if not is_pruned(row[1])]

    def rank(row: tuple[Candidate, Figures]) -> tuple[float, ...]:
        candidate, figures = row
        in_flight = (
            figures.program_bytes_in_flight if candidate.persistent else figures.bytes_in_flight
        )
        return (
            -in_flight,
            candidate.payload_bytes,
            figures.instructions_per_16_bytes,
            candidate.num_warps,
        )

    return min(left, key=rank)[0]


def classes_of(rows: Sequence[tuple[Candidate, Figures]]) -> list[dict[str, Any]]:
    """Return a file's classes: each direction without a budget, and under each budget."""
    classes = []
    for direction, (budget, largest_bytes) in product(DIRECTIONS, LARGEST_BYTES.items()):
        tiles, units = (
            pick(
                (candidate, figures)
                for candidate, figures in rows
                if (candidate.kernel, candidate.direction, candidate.persistent)
                == (kernel, direction, budget > 0)
                and candidate.payload_bytes <= largest_bytes
            )
            for kernel in ("tiles", "units")
        )
        config = {
            "tile_bytes": tiles.size,
            "tile_warps": tiles.num_warps,
            "units_per_program": units.size,
            "unit_warps": units.num_warps,
            "page_run_bytes": DEFAULT_LAUNCH.page_run_bytes,
        }
        classes.append(
            {
                "direction": direction,
                "num_bytes": CLASS_BYTES,
                "max_programs": budget,
                "config": config,
            }
        )
    return classes


def content_of(name: str) -> dict[str, Any]:
    """Return what the file of a GPU of `GPUS` should hold."""
    arch, device_names = GPUS[name]
    is_amd = arch.startswith("gfx")
    arches = (arch,) if arch in CUDA_ARCHES else CUDA_ARCHES
    rows = [
        (candidate, worst_of([figures_of(candidate, one) for one in arches]))
        for candidate in candidates()
    ]
    classes = classes_of(rows)
    if is_amd:
        compile_all(classes, arch)
    return {
        "schema": SCHEMA,
        "gpu": device_names[0] if device_names else name,
        "device_names": list(device_names),
        "origin": "derived",
        "architecture": arch if arch != "all" else ", ".join(CUDA_ARCHES),
        "triton": triton.__version__,
        "rule": "the default's numbers, compiled only" if is_amd else "see tuning/derive.py",
        "classes": classes,
        "candidates": []
        if is_amd
        else [{**asdict(candidate), **asdict(figures)} for candidate, figures in rows],
    }


def compile_all(classes: Sequence[dict[str, Any]], arch: str) -> None:
    """Compile what a file's classes launch for one of AMD's architectures, `gfx942`."""
    for one in classes:
        config, form = one["config"], (one["direction"], one["max_programs"] > 0)
        tiles = Candidate("tiles", *form, config["tile_bytes"], config["tile_warps"])
        units = Candidate("units", *form, config["units_per_program"], config["unit_warps"])
        for candidate in (tiles, units):
            compile_for(candidate.variant, GPUTarget("hip", arch, 64))


def text_of(content: dict[str, Any]) -> str:
    """Return a file's text: JSON, with a line for each class and candidate."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n".join(f"  {json.dumps(one)}" for one in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str]) -> int:
    """Write the files of all GPUs that have no measured one; with `--check` only compare them."""
    if list(arguments) not in ([], ["--check"]):
        print(f"derive: got {' '.join(arguments)}, wanted nothing or --check")
        return 2
    num_stale = 0
    for name in GPUS:
        path = CONFIGS / f"{name}.json"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old and json.loads(old)["origin"] == "measured":
            print(f"{name}: measured, left alone")
            continue
        new = text_of(content_of(name))
        if new == old:
            print(f"{name}: current")
            continue
        num_stale += 1
        print(f"{name}: {'stale' if arguments else 'written'}")
        if not arguments:
            path.write_text(new, encoding="utf-8")
    return 1 if arguments and num_stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
