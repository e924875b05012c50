"""What a sweep tries: size classes, budgets, layouts, candidates, and which of these are out.

No full cross product. For each direction, size class and budget, tiles come first: every tile size
with every number of warps, without a cache hint. Then the best of them once more beside the same
with each hint. Then the units of the short-run kernel, with the hint that the tiles chose, for a
launch configuration has one. `page_run_bytes`, where the two kernels meet, stays the default's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import triton

from kvferry.launch import CACHE_HINTS, DEFAULT_LAUNCH, LaunchConfig
from kvferry.tuned import CONFIGS, DIRECTIONS
from kvferry.tuning.derive import PAYLOAD_ACCESS_BYTES, Candidate, Figures, is_pruned
from kvferry.tuning.occupancy import WARP_THREADS

TILES, HINTS, UNITS, BESIDE = "tiles", "hints", "units", "beside"
STAGES = (TILES, HINTS, UNITS, BESIDE)
"""Tile sizes and warps; cache hints; units and warps; the chosen moves beside a matmul."""

MIB = 1 << 20
MAX_THREAD_BYTES = 256
"""Of payload that a thread holds at once. With more, the same kernels with checksums spill: they
are launched with the same numbers, and `make inspect` would not let these pass."""

_BYTES = {TILES: 1, UNITS: PAYLOAD_ACCESS_BYTES}


@dataclass(frozen=True)
class Trial:
    """A candidate with a cache hint: one thing that is checked and timed."""

    candidate: Candidate
    cache: str = CACHE_HINTS[0]

    @property
    def name(self) -> str:
        """`tiles 16384 x 4 warps, stream`."""
        one = self.candidate
        hint = "" if self.cache == CACHE_HINTS[0] else f", {self.cache}"
        return f"{one.kernel} {one.size} x {one.num_warps} warps{hint}"

    def config(self, max_programs: int) -> LaunchConfig:
        """Return the launch configuration; what the other kernel takes is the default's."""
        one = self.candidate
        base = replace(DEFAULT_LAUNCH, max_programs=max_programs, cache=self.cache)
        if one.kernel == TILES:
            return replace(base, tile_bytes=one.size, tile_warps=one.num_warps)
        return replace(base, units_per_program=one.size, unit_warps=one.num_warps)


@dataclass(frozen=True)
class Plan:
    """How much a sweep tries.

    Attributes:
        name: `full`, `short` or `cpu`.
        class_bytes: payloads of the size classes, in the order in which they are tuned.
        budgets: SM budgets, in programs; 0 is none, and takes the form without a loop.
        layouts: names of `workload.LAYOUTS` by kernel, `tiles` and `units`.
        sizes: bytes of a tile, or units of a program, by kernel.
        num_warps: of a program.
        num_rounds: samples of each candidate.
        num_warmups: rounds before these.
        num_inputs: rotated: disjoint pages and objects that the samples take in turn.
        least_in_flight: candidates whose machine code keeps less than this share of the best one's
            bytes in flight are out.
    """

    name: str
    class_bytes: tuple[int, ...]
    budgets: tuple[int, ...]
    layouts: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, tuple[int, ...]]
    num_warps: tuple[int, ...]
    num_rounds: int
    num_warmups: int = 2
    num_inputs: int = 2
    least_in_flight: float = 0.0

    def candidates(self, kernel: str, direction: str, max_programs: int) -> list[Candidate]:
        """Return the candidates of one kernel, direction and form."""
        return [
            Candidate(kernel, direction, max_programs > 0, size, num_warps)
            for size, num_warps in product(self.sizes[kernel], self.num_warps)
            if size * _BYTES[kernel] <= MAX_THREAD_BYTES * WARP_THREADS * num_warps
        ]

    def all_candidates(self) -> list[Candidate]:
        """Return those of both kernels, directions and forms that the budgets ask for."""
        forms = sorted({budget > 0 for budget in self.budgets})
        return [
            one
            for kernel, direction, form in product((TILES, UNITS), DIRECTIONS, forms)
            for one in self.candidates(kernel, direction, int(form))
        ]

    def groups(self) -> Iterator["Group"]:
        """Yield what is measured, in order: a size class is finished before the next one begins."""
        for num_bytes, stage in product(self.class_bytes, STAGES):
            if stage == BESIDE and num_bytes != self.class_bytes[0]:
                continue
            layouts = self.layouts[UNITS if stage == UNITS else TILES]
            for layout in layouts[:1] if stage == BESIDE else layouts:
                for direction, budget in product(DIRECTIONS, self.budgets):
                    yield Group(num_bytes, stage, layout, direction, budget)


@dataclass(frozen=True)
class Group:
    """Trials that are timed in the same rounds, beside a copy of as many bytes.

    Attributes:
        num_bytes: the size class.
        stage: one of `STAGES`.
        layout: a name of `workload.LAYOUTS`.
        direction: `pack` or `unpack`.
        max_programs: the budget.
    """

    num_bytes: int
    stage: str
    layout: str
    direction: str
    max_programs: int

    @property
    def class_key(self) -> tuple[str, int, int]:
        """Direction, size class and budget: what an entry of a file is for."""
        return self.direction, self.num_bytes, self.max_programs


FULL = Plan(
    "full",
    class_bytes=(64 * MIB, 8 * MIB, MIB, 512 * MIB),
    budgets=(0, 4, 8, 16, 32, 64),
    layouts={
        TILES: ("deepseek-v3.2 pages", "llama-3.1-8b pages"),
        UNITS: ("llama-3.1-8b token rows", "llama-3.1-8b head slices"),
    },
    sizes={TILES: (8192, 16384, 32768, 65536), UNITS: (512, 1024, 2048, 4096)},
    num_warps=(4, 8),
    num_rounds=21,
    least_in_flight=0.25,
)
SHORT = replace(
    FULL,
    name="short",
    class_bytes=(64 * MIB, 8 * MIB),
    budgets=(0, 4, 16),
    layouts={TILES: FULL.layouts[TILES][:1], UNITS: FULL.layouts[UNITS][:1]},
    sizes={TILES: (8192, 16384, 32768), UNITS: (512, 1024, 2048)},
    num_rounds=9,
    least_in_flight=0.5,
)
CPU = Plan(
    "cpu",
    class_bytes=(16384, 4096),
    budgets=(0, 2),
    layouts={TILES: ("tiny pages",), UNITS: ("tiny rows",)},
    sizes={TILES: (4096, 8192), UNITS: (256, 512)},
    num_warps=(4,),
    num_rounds=3,
    num_warmups=1,
)


def told_budget(max_programs: int) -> str:
    """Return `no budget`, or `16 programs`."""
    return f"{max_programs} programs" if max_programs else "no budget"


def told_bytes(num_bytes: int) -> str:
    """Return `64 MiB`, or `8 KiB`."""
    unit, name = (MIB, "MiB") if num_bytes >= MIB else (1024, "KiB")
    return f"{num_bytes / unit:g} {name}"


def known_figures(
    arch: str, stem: str, folder: Path = CONFIGS
) -> tuple[dict[Candidate, Figures], str]:
    """Return the figures that a derived file holds for an architecture, and the file's name.

    Empty, and no name, if there is no such file by this version of Triton.

    Args:
        arch: such as `sm_90`.
        stem: the file that is looked at first.
        folder: where files are.
    """
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.stem != stem, path.name)):
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = plain.get("candidates")
        if rows and (plain["architecture"], plain["triton"]) == (arch, triton.__version__):
            names = Candidate.__dataclass_fields__
            return {
                Candidate(**{name: row[name] for name in names}): Figures(
                    **{name: row[name] for name in Figures.__dataclass_fields__}
                )
                for row in rows
            }, path.name
    return {}, ""


def pruned(
    candidates: Sequence[Candidate], figures: Mapping[Candidate, Figures], least_in_flight: float
) -> dict[Candidate, str]:
    """Return which of a kernel's candidates, of one direction and form, are out, and why.

    A candidate without figures stays.
    """
    known = {one: figures[one] for one in candidates if one in figures}
    best = max((_in_flight(one, found) for one, found in known.items()), default=0)
    out = {}
    for one, found in known.items():
        in_flight = _in_flight(one, found)
        if is_pruned(found):
            out[one] = (
                f"each thread spills {found.spill_bytes} bytes"
                if found.spill_bytes
                else "loads no payload by 16 bytes"
            )
        elif in_flight < least_in_flight * best:
            out[one] = f"{in_flight / 1024:g} KiB in flight, the best {best / 1024:g}"
    return out


def _in_flight(candidate: Candidate, figures: Figures) -> int:
    """Bytes in flight of what is scarce: a program under a budget, else a multiprocessor."""
    return figures.program_bytes_in_flight if candidate.persistent else figures.bytes_in_flight
