"""Measures one group: checks each candidate's bytes, then times all that are right, in turn."""

from collections.abc import Mapping, Sequence

import torch
from triton.errors import TritonError

from kvferry.tuning.beside import NotCoveredError, matmul_beside
from kvferry.tuning.plans import Group, Trial
from kvferry.tuning.records import Record, Result
from kvferry.tuning.timing import Call, Timing, median_ratio, time_together, timing_of
from kvferry.tuning.workload import Workload

_COPY = "copy"


def measure(
    group: Group,
    trials: Sequence[Trial],
    workload: Workload,
    device: torch.device,
    *,
    num_rounds: int,
    num_warmups: int,
) -> Record:
    """Return what came of a group's trials: shares of a copy's rate, medians, faults.

    Args:
        group: which.
        trials: at least one.
        workload: of the group's layout and size.
        device: where it is.
        num_rounds: samples of each.
        num_warmups: rounds before them.
    """
    faults: dict[Trial, str] = {}
    calls: dict[str, Sequence[Call]] = {_COPY: workload.copies()}
    for trial in trials:
        config = trial.config(group.max_programs)
        try:
            fault = workload.fault_of(group.direction, config)
        except TritonError as error:  # it does not compile, or wants more than the GPU has
            fault = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if fault:
            faults[trial] = fault
        else:
            calls[trial.name] = workload.calls(group.direction, config)
    samples: Mapping[str, list[float]] = {}
    copy: Timing | None = None
    if len(calls) > 1:
        samples = time_together(calls, device, num_rounds=num_rounds, num_warmups=num_warmups)
        copy = timing_of(samples[_COPY])
    results = tuple(
        Result(trial, faults[trial])
        if trial in faults
        else Result(
            trial,
            timing=timing_of(samples[trial.name]),
            share_of_copy=median_ratio(samples[_COPY], samples[trial.name]),
        )
        for trial in trials
    )
    return Record(group, workload.num_bytes, copy, results)


def measure_beside(
    group: Group, trial: Trial, move_us: float, workload: Workload, device: torch.device,
    *, num_rounds: int,
) -> Record:  # fmt: skip
    """Return what a chosen move, that takes `move_us` alone, costs a matmul beside it."""
    if device.type == "cpu":
        return Record(group, why_not="not measured on a CPU")
    moves = workload.calls(group.direction, trial.config(group.max_programs))
    try:
        beside = matmul_beside(moves, move_us, device, num_rounds=num_rounds)
    except NotCoveredError as error:
        return Record(group, workload.num_bytes, why_not=str(error))
    return Record(group, workload.num_bytes, beside=beside)
