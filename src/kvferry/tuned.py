"""Tuned launches: reads what was derived or measured for a GPU, and picks numbers for a move.

A file `tuning/configs/NAME.json` holds one GPU's numbers, `NAME` being the GPU's name with
underscores; `default.json` serves every other GPU, and CPUs. Schema 1, an object with

    schema          1
    gpu             name of the GPU
    device_names    beginnings of the names that torch reports, whole words; none in the default
    origin          "derived" (from machine code, without a GPU) or "measured" (on the GPU)
    architecture    what the kernels were compiled for, such as "sm_90"
    triton          version of the compiler
    torch, driver, date, commit     of the measurement; only in a measured file
    classes         list of entries, at least one for each direction:
        direction       "pack" or "unpack"
        num_bytes       payload of the moves of this size class, in bytes
        max_programs    budget, 0 for none; the entries of a class are its budget curve
        config          tile_bytes, tile_warps, units_per_program, unit_warps, page_run_bytes;
                        cache, one of `launch.CACHE_HINTS`, "none" where it is missing
        gb_per_s        payload, 1e9 bytes a second; only in a measured file
        share_of_copy   of the rate of `copy_` of as many bytes; only in a measured file
        spread          of the time, (90th - 10th percentile) / median; may be missing

No two entries have direction, num_bytes and max_programs in common. Further keys are notes, such as
the figures of each layout that was measured, or of each candidate, and not read here.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvferry.errors import ArgumentError
from kvferry.launch import CACHE_HINTS, LaunchConfig

SCHEMA = 1
CONFIGS = Path(__file__).parent / "tuning" / "configs"
DEFAULT_NAME = "default"
DIRECTIONS = ("pack", "unpack")
ORIGINS = ("derived", "measured")
_NUMBERS = ("tile_bytes", "tile_warps", "units_per_program", "unit_warps", "page_run_bytes")
CONFIG_KEYS = (*_NUMBERS, "cache")
_OF_A_MEASUREMENT = ("torch", "driver", "date", "commit")
_FIGURES = ("gb_per_s", "share_of_copy")


@dataclass(frozen=True)
class TunedClass:
    """Numbers for moves of about one size, in one direction, under one budget.

    Attributes:
        direction: `pack` or `unpack`.
        num_bytes: payload of the moves.
        config: how to launch them; `max_programs` is the budget.
    """

    direction: str
    num_bytes: int
    config: LaunchConfig


@dataclass(frozen=True)
class TunedLaunches:
    """One file's numbers, checked. Safe from any thread.

    Attributes:
        gpu: name of the GPU.
        device_names: beginnings of the names that torch reports for it.
        origin: `derived` or `measured`.
        classes: at least one for each direction.
    """

    gpu: str
    device_names: tuple[str, ...]
    origin: str
    classes: tuple[TunedClass, ...]
    _ladders: dict[tuple[str, int], tuple[list[int], list[LaunchConfig]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def choose(self, direction: str, num_bytes: int, max_programs: int = 0) -> LaunchConfig:
        """Return the numbers of the nearest class, with the budget that is asked for.

        First the size class is nearest, by ratio, and of two as near the smaller; then the budget,
        in the same way. No budget is as far from every budget as can be, and nearest the largest.

        Args:
            direction: `pack` or `unpack`.
            num_bytes: payload of the move.
            max_programs: the budget, which the result has exactly; 0 for none.
        """
        ladder = self._ladders.get((direction, max_programs))
        if ladder is None:
            ladder = self._ladders[direction, max_programs] = self._ladder(direction, max_programs)
        edges, configs = ladder
        # The edge between sizes a and b is where n / a == b / n: compared in whole numbers.
        return configs[bisect_left(edges, num_bytes * num_bytes)]

    def _ladder(self, direction: str, max_programs: int) -> tuple[list[int], list[LaunchConfig]]:
        """Return the edges between size classes, squared, and a config for each class."""
        if direction not in DIRECTIONS:
            raise ArgumentError(f"direction is {direction!r}, wanted one of {DIRECTIONS}")
        rows = [row for row in self.classes if row.direction == direction]
        sizes = sorted({row.num_bytes for row in rows})
        configs = []
        for size in sizes:
            budgets = {row.config.max_programs: row.config for row in rows if row.num_bytes == size}
            nearest = nearest_budget(max_programs, budgets)
            configs.append(replace(budgets[nearest], max_programs=max_programs))
        return [a * b for a, b in pairwise(sizes)], configs


def nearest_budget(max_programs: int, budgets: Mapping[int, Any]) -> int:
    """Return the budget of `budgets` that is nearest by ratio; 0, no bound, counts as boundless."""
    if max_programs in budgets:
        return max_programs
    bounded = sorted(budget for budget in budgets if budget)
    if not bounded:
        return 0
    if not max_programs:
        return bounded[-1]
    edges = [a * b for a, b in pairwise(bounded)]
    return bounded[bisect_left(edges, max_programs * max_programs)]


def for_device(device_name: str, folder: Path = CONFIGS) -> TunedLaunches:
    """Return the numbers for a device.

    Args:
        device_name: as torch reports it: `NVIDIA H100 80GB HBM3`, `AMD Instinct MI300X`. The file
            with the longest beginning of it serves, else the default.
        folder: where the files are.

    Raises:
        ArgumentError: a file is not as it should be; names it.
    """
    launches = read_folder(folder)
    found = [
        (len(name), stem)
        for stem, tuned in launches.items()
        for name in tuned.device_names
        if begins(device_name, name)
    ]
    return launches[max(found)[1] if found else DEFAULT_NAME]


@cache
def for_torch_device(device: torch.device) -> TunedLaunches:
    """Return the numbers for a device of this process; asks its name once."""
    if device.type != "cuda":
        return for_device(device.type)
    return for_device(torch.cuda.get_device_name(device))


@cache
def read_folder(folder: Path) -> dict[str, TunedLaunches]:
    """Return all files of a folder, by name without `.json`.

    Raises:
        ArgumentError: a file is not as it should be, or there is no default; names it.
    """
    launches = {path.stem: read_file(path) for path in sorted(folder.glob("*.json"))}
    if DEFAULT_NAME not in launches:
        raise ArgumentError(f"{folder} has {sorted(launches)}, wanted {DEFAULT_NAME}.json too")
    return launches


def read_file(path: Path) -> TunedLaunches:
    """Read one file.

    Raises:
        ArgumentError: it is not as it should be; names file, entry, what came and what was wanted.
    """
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from error


def parse(plain: Any, source: str) -> TunedLaunches:
    """Check what a file holds.

    Args:
        plain: its content, as `json.loads` returns it.
        source: the file's name, for messages.

    Raises:
        ArgumentError: it is not as it should be; names file, entry, what came and what was wanted.
    """
    top = _Reader(plain, source)
    if top.integer("schema", 1) != SCHEMA:
        raise top.wrong("schema", str(SCHEMA))
    for key in ("gpu", "architecture", "triton"):
        top.text(key)
    origin = top.one_of("origin", ORIGINS)
    is_measured = origin == "measured"
    for key in _OF_A_MEASUREMENT if is_measured else ():
        top.text(key)
    names = top.items("device_names")
    if not all(isinstance(name, str) and name for name in names):
        raise top.wrong("device_names", "a list of texts")
    classes: dict[tuple[str, int, int], TunedClass] = {}
    for number, one in enumerate(top.items("classes")):
        entry = _Reader(one, f"{source}: classes[{number}]")
        found = _class(entry, is_measured)
        which = (found.direction, found.num_bytes, found.config.max_programs)
        if which in classes:
            raise ArgumentError(
                f"{entry.where} has direction, num_bytes and max_programs {which}, wanted each once"
            )
        classes[which] = found
    for direction in DIRECTIONS:
        if not any(row.direction == direction for row in classes.values()):
            raise top.wrong("classes", f"an entry with direction {direction!r}")
    return TunedLaunches(top.text("gpu"), tuple(names), origin, tuple(classes.values()))


def _class(entry: "_Reader", is_measured: bool) -> TunedClass:
    direction = entry.one_of("direction", DIRECTIONS)
    num_bytes = entry.integer("num_bytes", 1)
    max_programs = entry.integer("max_programs", 0)
    for key in _FIGURES if is_measured else ():
        entry.number(key)
    if is_measured and "spread" in entry.plain:
        entry.number("spread", 0)
    for key in (*_FIGURES, "spread") if not is_measured else ():
        if entry.plain.get(key) is not None:
            raise entry.wrong(key, "no such figure: nothing was measured")
    config = _Reader(entry.get("config"), f"{entry.where}.config")
    unknown = sorted(set(config.plain) - set(CONFIG_KEYS))
    if unknown:
        raise ArgumentError(f"{config.where} has {unknown}, wanted {CONFIG_KEYS} alone")
    numbers: dict[str, Any] = {key: config.integer(key, 1) for key in _NUMBERS}
    cache = config.one_of("cache", CACHE_HINTS) if "cache" in config.plain else CACHE_HINTS[0]
    try:
        found = LaunchConfig(**numbers, max_programs=max_programs, cache=cache)
    except ArgumentError as error:
        raise ArgumentError(f"{config.where}: {error}") from error
    return TunedClass(direction, num_bytes, found)


class _Reader:
    """An object of a file, and where it stands."""

    def __init__(self, plain: Any, where: str) -> None:
        if not isinstance(plain, dict):
            raise ArgumentError(f"{where} is {plain!r:.80}, wanted an object")
        self.plain: dict[str, Any] = plain
        self.where = where

    def get(self, key: str) -> Any:
        if key not in self.plain:
            raise ArgumentError(f"{self.where} has {sorted(self.plain)}, wanted {key} too")
        return self.plain[key]

    def wrong(self, key: str, wanted: str) -> ArgumentError:
        return ArgumentError(f"{self.where}: {key} is {self.plain[key]!r:.80}, wanted {wanted}")

    def integer(self, key: str, least: int) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, least: float | None = None) -> float:
        """Return a number of at least `least`; without, a positive one."""
        value = self.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > 0 if least is None else value >= least):
            wanted = "a positive number" if least is None else f"a number of at least {least:g}"
            raise self.wrong(key, wanted)
        return float(value)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def one_of(self, key: str, wanted: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in wanted:
            raise self.wrong(key, f"one of {wanted}")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value


def begins(device_name: str, beginning: str) -> bool:
    """Return whether a name begins so, in whole words: `NVIDIA A100-SXM4` with `NVIDIA A100`."""
    rest = device_name[len(beginning) :]
    return device_name.startswith(beginning) and not rest[:1].isalnum()
