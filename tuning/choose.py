"""Chooses launch numbers from what a sweep has measured, and makes a file's entries of them.

Of the candidates whose bytes were right on every layout, the best takes the least time in the mean
over the layouts, in times of a copy of as many bytes. What comes within 1 % of it counts as equally
good: then the smallest program wins, then the fewest warps, then the hint that asks for less.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from kvferry.launch import CACHE_HINTS, DEFAULT_LAUNCH
from kvferry.tuned import DIRECTIONS
from kvferry.tuning.plans import (
    BESIDE,
    HINTS,
    TILES,
    UNITS,
    Group,
    Plan,
    Trial,
    told_budget,
    told_bytes,
)
from kvferry.tuning.records import Record, Result

EQUALLY_GOOD = 1.01


def best(records: Sequence[Record]) -> Trial | None:
    """Return the best trial of records that are alike but for their layout; None if all failed."""
    costs: dict[Trial, list[float]] = defaultdict(list)
    for record in records:
        for result in record.results:
            if not result.fault:
                costs[result.trial].append(1 / result.share_of_copy)
    means = {trial: fmean(found) for trial, found in costs.items() if len(found) == len(records)}
    if not means:
        return None
    bound = min(means.values()) * EQUALLY_GOOD
    return min((trial for trial, mean in means.items() if mean <= bound), key=_rank)


def _rank(trial: Trial) -> tuple[int, int, int]:
    one = trial.candidate
    return one.payload_bytes, one.num_warps, CACHE_HINTS.index(trial.cache)


def chosen(
    plan: Plan, records: Mapping[Group, Record], stage: str, key: tuple[str, int, int]
) -> Trial | str:
    """Return the best trial of a stage of one class; or why there is none yet, as text.

    Args:
        plan: what was planned.
        records: what was measured.
        stage: `tiles`, `hints` or `units`.
        key: direction, size class and budget.
    """
    layouts = plan.layouts[UNITS if stage == UNITS else TILES]
    direction, num_bytes, budget = key
    groups = [Group(num_bytes, stage, layout, direction, budget) for layout in layouts]
    found = [records[group] for group in groups if group in records]
    why_not = [record.why_not for record in found if record.why_not]
    if why_not:
        return why_not[0]
    if len(found) < len(groups):
        return f"{stage} not timed"
    return best(found) or f"every candidate for {stage} failed"


def classes_of(
    plan: Plan, records: Mapping[Group, Record]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a file's classes, and for each class that is left out, which and why."""
    classes, left_out = [], []
    for direction, num_bytes, budget in product(DIRECTIONS, sorted(plan.class_bytes), plan.budgets):
        key = (direction, num_bytes, budget)
        trials: dict[str, Trial] = {}
        for stage in (HINTS, UNITS):
            trial = chosen(plan, records, stage, key)
            if isinstance(trial, str):
                left_out.append(
                    f"{direction}, {told_bytes(num_bytes)}, {told_budget(budget)}: {trial}"
                )
                break
            trials[stage] = trial
        else:
            classes.append(_class(plan, records, key, trials[HINTS], trials[UNITS]))
    return classes, left_out


def _class(
    plan: Plan,
    records: Mapping[Group, Record],
    key: tuple[str, int, int],
    tiles: Trial,
    units: Trial,
) -> dict[str, Any]:
    direction, num_bytes, budget = key
    layouts = {}
    for stage, trial in ((HINTS, tiles), (UNITS, units)):
        for layout in plan.layouts[UNITS if stage == UNITS else TILES]:
            record = records[Group(num_bytes, stage, layout, direction, budget)]
            result = next(one for one in record.results if one.trial == trial)
            layouts[layout] = _figures(record.num_bytes, result)
    slowest = min(plan.layouts[TILES], key=lambda layout: layouts[layout]["share_of_copy"])
    return {
        "direction": direction,
        "num_bytes": num_bytes,
        "max_programs": budget,
        "config": {
            "tile_bytes": tiles.candidate.size,
            "tile_warps": tiles.candidate.num_warps,
            "units_per_program": units.candidate.size,
            "unit_warps": units.candidate.num_warps,
            "page_run_bytes": DEFAULT_LAUNCH.page_run_bytes,
            "cache": tiles.cache,
        },
        **layouts[slowest],
        "layouts": layouts,
    }


def _figures(num_bytes: int, result: Result) -> dict[str, float]:
    assert result.timing is not None
    return {
        # Six digits: an interpreter's rate is small, and must not become 0.
        "gb_per_s": float(f"{num_bytes / result.timing.median_us / 1e3:.6g}"),
        "share_of_copy": float(f"{result.share_of_copy:.6g}"),
        "spread": round(result.timing.spread, 4),
    }


def beside_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return a file's entries on what moves cost a matmul that runs beside them."""
    return [
        {
            "direction": record.group.direction,
            "num_bytes": record.group.num_bytes,
            "max_programs": record.group.max_programs,
            "layout": record.group.layout,
            "matmul_slowdown": record.beside and round(record.beside.slowdown, 4),
            "matmul_us": record.beside and round(record.beside.matmul.median_us, 1),
            **({"why_not": record.why_not} if record.why_not else {}),
        }
        for record in records
        if record.group.stage == BESIDE
    ]


def faults_of(records: Iterable[Record]) -> list[str]:
    """Return a line for each trial whose bytes were wrong, or that did not run."""
    return [
        f"{record.group.direction} {result.trial.name}, {told_budget(record.group.max_programs)}, "
        f"{record.group.layout}, {told_bytes(record.group.num_bytes)}: {result.fault}"
        for record in records
        for result in record.results
        if result.fault
    ]
