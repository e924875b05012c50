"""What a sweep would do, told without a GPU: what is out and why, and how much is timed."""

from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from kvferry.launch import CACHE_HINTS
from kvferry.tuned import DIRECTIONS
from kvferry.tuning.derive import Candidate, Figures
from kvferry.tuning.inspect import table
from kvferry.tuning.plans import HINTS, TILES, UNITS, Plan, told_budget, told_bytes
from kvferry.tuning.workload import LAYOUTS


def preview(
    plan: Plan, figures: Mapping[Candidate, Figures], out: Mapping[Candidate, str], path: Path
) -> str:
    """Return the text of a dry run.

    Args:
        plan: what would be tried.
        figures: of its candidates; empty where machine code is not read.
        out: which are out, and why.
        path: of the file that would be written.
    """
    sizes = ", ".join(told_bytes(num_bytes) for num_bytes in sorted(plan.class_bytes))
    parts = [
        "\n".join(
            f"{kernel}: {name}: {LAYOUTS[name].what}"
            for kernel in (TILES, UNITS)
            for name in plan.layouts[kernel]
        ),
        table(_candidates(plan, figures, out)) if figures else "",
        f"in each size class ({sizes}):\n{table(_classes(plan, out))}",
        _totals(plan, out),
        f"the file would be {path}",
    ]
    return "\n\n".join(part for part in parts if part)


def _candidates(
    plan: Plan, figures: Mapping[Candidate, Figures], out: Mapping[Candidate, str]
) -> list[dict[str, str]]:
    """Return a row for each candidate of a direction and form."""
    rows = []
    for one in plan.all_candidates():
        found = figures[one]
        size = f"{one.size} {'B' if one.kernel == TILES else 'units'} x {one.num_warps}"
        in_flight = found.program_bytes_in_flight if one.persistent else found.bytes_in_flight
        rows.append(
            {
                "candidate": f"{one.direction} {one.kernel}{' persistent' * one.persistent}",
                "size x warps": size,
                "registers": str(found.registers),
                "spill B": str(found.spill_bytes),
                "in flight KiB": f"{in_flight / 1024:g}",
                "per 16 B": f"{found.instructions_per_16_bytes:.1f}",
                "": f"out: {out[one]}" if one in out else "timed",
            }
        )
    width = max(len(row[""]) for row in rows)
    return [{**row, "": row[""].ljust(width)} for row in rows]


def trials_per_group(plan: Plan, out: Mapping[Candidate, str]) -> Counter[tuple[str, str, int]]:
    """Return how many trials a group has, by stage, direction and budget."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for direction, budget in product(DIRECTIONS, plan.budgets):
        for stage in (TILES, UNITS):
            some = plan.candidates(stage, direction, budget)
            counts[stage, direction, budget] = sum(one not in out for one in some)
        counts[HINTS, direction, budget] = len(CACHE_HINTS)
    return counts


def _classes(plan: Plan, out: Mapping[Candidate, str]) -> list[dict[str, str]]:
    counts = trials_per_group(plan, out)
    rows = []
    for direction, budget in product(DIRECTIONS, plan.budgets):
        row = {"class": f"{direction}, {told_budget(budget)}"}
        moves = 0
        for stage in (TILES, HINTS, UNITS):
            num_layouts = len(plan.layouts[UNITS if stage == UNITS else TILES])
            num_trials = counts[stage, direction, budget]
            row[stage] = f"{num_trials} x {num_layouts} layouts"
            moves += num_trials * num_layouts
        row["checks"] = str(moves)
        row["timed moves"] = f"{moves * plan.num_rounds:,}"
        rows.append(row)
    return rows


def _totals(plan: Plan, out: Mapping[Candidate, str]) -> str:
    counts = trials_per_group(plan, out)
    num_moves = num_copies = num_beside = 0
    for group in plan.groups():
        found = counts[group.stage, group.direction, group.max_programs]
        num_moves += found * plan.num_rounds
        num_copies += plan.num_rounds if found else 0
        num_beside += not found
    return (
        f"in all {num_moves:,} timed moves, each one launch, and {num_copies:,} copies of as many "
        f"bytes beside them, {plan.num_rounds} rounds;\n{num_beside} of the chosen moves run "
        "beside a matmul. How long that takes: «not measured»."
    )
