"""Goes through a plan's groups in order, and measures each of which there is no record yet."""

from collections.abc import Collection, Mapping

import torch

from kvferry.launch import CACHE_HINTS
from kvferry.tuning.choose import chosen
from kvferry.tuning.derive import Candidate
from kvferry.tuning.measure import measure, measure_beside
from kvferry.tuning.plans import (
    BESIDE,
    HINTS,
    TILES,
    Group,
    Plan,
    Trial,
    told_budget,
    told_bytes,
)
from kvferry.tuning.progress import Progress
from kvferry.tuning.records import Record, RecordFile
from kvferry.tuning.workload import LAYOUTS, Workload


def trials_for(
    plan: Plan, group: Group, records: Mapping[Group, Record], out: Collection[Candidate]
) -> list[Trial] | str:
    """Return what a group tries, by what was chosen before it; or why nothing, as text."""
    if group.stage == TILES:
        hint = CACHE_HINTS[0]
    else:
        earlier = TILES if group.stage == HINTS else HINTS
        before = chosen(plan, records, earlier, group.class_key)
        if isinstance(before, str):
            return before
        if group.stage == BESIDE:
            return [before]
        if group.stage == HINTS:
            return [Trial(before.candidate, hint) for hint in CACHE_HINTS]
        hint = before.cache
    some = plan.candidates(group.stage, group.direction, group.max_programs)
    return [Trial(one, hint) for one in some if one not in out] or "every candidate is out"


def measure_all(
    plan: Plan, device: torch.device, file: RecordFile, out: Collection[Candidate]
) -> None:
    """Measure what is missing, and add it to the file of records, group by group.

    Args:
        plan: what to measure.
        device: where.
        file: of records; those that it has are not measured again.
        out: candidates that are not tried.
    """
    missing = [group for group in plan.groups() if group not in file.records]
    progress = Progress(len(missing))
    workload: Workload | None = None
    of: tuple[str, int] | None = None
    try:
        for group in missing:
            progress.show(_told(group))
            trials = trials_for(plan, group, file.records, out)
            if isinstance(trials, str):
                file.add(Record(group, why_not=trials))
                progress.step(_told(group))
                continue
            try:
                if workload is None or of != (group.layout, group.num_bytes):
                    workload = None  # its memory goes before the next one's comes
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                    workload = Workload(
                        LAYOUTS[group.layout], group.num_bytes, plan.num_inputs, device
                    )
                    of = (group.layout, group.num_bytes)
                record = _measure(plan, group, trials, workload, device, file.records)
            except torch.OutOfMemoryError as error:
                workload = None
                record = Record(group, why_not=str(error).splitlines()[0][:200])
            file.add(record)
            progress.step(_told(group))
    finally:
        progress.end()


def _measure(
    plan: Plan,
    group: Group,
    trials: list[Trial],
    workload: Workload,
    device: torch.device,
    records: Mapping[Group, Record],
) -> Record:
    if group.stage != BESIDE:
        return measure(
            group, trials, workload, device,
            num_rounds=plan.num_rounds, num_warmups=plan.num_warmups,
        )  # fmt: skip
    (trial,) = trials
    alone = records[
        Group(group.num_bytes, HINTS, group.layout, group.direction, group.max_programs)
    ]
    timing = next(one.timing for one in alone.results if one.trial == trial)
    assert timing is not None
    return measure_beside(
        group, trial, timing.median_us, workload, device, num_rounds=plan.num_rounds
    )


def _told(group: Group) -> str:
    return (
        f"{group.direction} {told_bytes(group.num_bytes)}, {told_budget(group.max_programs)}, "
        f"{group.stage}: {group.layout}"
    )
