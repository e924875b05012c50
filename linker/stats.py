"""Counters of one linker: how much it moved, how long that took, and what failed why."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from kvferry.arguments import mapping, string
from kvferry.causes import CAUSES, cause_of
from kvferry.errors import TransferFailed
from kvferry.linker.home import Home
from kvferry.linker.transfer import Timings, Transfer, TransferResult

KINDS = ("save", "load")
STAGES = tuple(field.name.removesuffix("_us") for field in fields(Timings))
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histogram of total durations; one more bucket takes what is longer."""

_OUTCOMES = ("done", "failed")

Sample = tuple[str, Mapping[str, str], float]
"""One line of the text format: suffix of the metric's name, labels, value."""


class Stats:
    """What a linker's transfers came to since it was made. Safe from any thread.

    Nothing is ever reset: rates are the difference of two snapshots. Objects and bytes are those of
    transfers that ended well; the seconds are of all of them.
    """

    def __init__(self) -> None:
        self._home = Home("the linker")
        self._lock = threading.Lock()
        self._transfers = {kind: dict.fromkeys(_OUTCOMES, 0) for kind in KINDS}
        self._objects = dict.fromkeys(KINDS, 0)
        self._bytes = dict.fromkeys(KINDS, 0)
        self._existing = dict.fromkeys(KINDS, 0)
        self._direct = dict.fromkeys(KINDS, 0)
        self._failures: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self._seconds = {kind: dict.fromkeys(STAGES, 0.0) for kind in KINDS}
        self._durations = {kind: [0] * (len(BUCKETS_S) + 1) for kind in KINDS}

    def ended(self, transfer: Transfer, outcome: TransferResult | TransferFailed) -> None:
        """Count a transfer's end; once per transfer.

        A failed transfer is one failure, by its `cause`. A save that ended well may have failed
        objects: each is one failure too.
        """
        kind, timings = transfer.kind, transfer.timings
        total_s = (timings.total_us or transfer.age_us) * 1e-6
        with self._lock:
            if isinstance(outcome, TransferFailed):
                self._transfers[kind]["failed"] += 1
                self._failures[kind][outcome.cause] += 1
            else:
                self._transfers[kind]["done"] += 1
                self._objects[kind] += outcome.num_objects
                self._bytes[kind] += outcome.num_bytes
                self._existing[kind] += outcome.num_existing
                self._direct[kind] += outcome.num_direct
                self._failures[kind].update(map(cause_of, outcome.failures.values()))
            seconds = self._seconds[kind]
            for stage in STAGES:
                seconds[stage] += getattr(timings, f"{stage}_us") * 1e-6
            seconds["total"] += total_s - timings.total_us * 1e-6
            self._durations[kind][bisect_left(BUCKETS_S, total_s)] += 1

    def snapshot(self) -> dict[str, Any]:
        """Return all counters of one moment, as a copy of plain dicts; each by kind first.

        `transfers` by outcome (`done`, `failed`), `objects`, `bytes`, `existing` (objects that a
        save did not write again), `direct` (those that it did not pack), `failures` by cause,
        `seconds` by stage of `Timings`, and `durations`: for each of `BUCKETS_S`, and what is
        longer, how many took up to that long.
        """
        self._home.check()
        with self._lock:
            return {
                "transfers": {kind: dict(self._transfers[kind]) for kind in KINDS},
                "objects": dict(self._objects),
                "bytes": dict(self._bytes),
                "existing": dict(self._existing),
                "direct": dict(self._direct),
                "failures": {kind: dict(self._failures[kind]) for kind in KINDS},
                "seconds": {kind: dict(self._seconds[kind]) for kind in KINDS},
                "durations": {kind: list(self._durations[kind]) for kind in KINDS},
            }

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the counters in Prometheus' text format (version 0.0.4).

        Args:
            labels: added to every line, for example `{"rank": "3"}`.
        """
        fixed = dict(mapping("labels", labels or {}, "names and values of labels"))
        for name, value in fixed.items():
            string("labels: a name", name)
            string(f"labels: {name}", value, least=0)
        now = self.snapshot()
        lines: list[str] = []
        for name, kind_of_metric, text, samples in (
            ("kvferry_transfers_total", "counter", "Transfers that ended.", _by(now, "transfers")),
            ("kvferry_objects_total", "counter", "Page objects that moved.", _by(now, "objects")),
            ("kvferry_bytes_total", "counter", "Their bytes.", _by(now, "bytes")),
            ("kvferry_existing_objects_total", "counter",
             "Objects that a save found in the store.", _by(now, "existing")),
            ("kvferry_direct_objects_total", "counter",
             "Objects that went straight from the pools.", _by(now, "direct")),
            ("kvferry_failures_total", "counter",
             "Failed transfers, and failed objects of saves.", _by(now, "failures")),
            ("kvferry_stage_seconds_total", "counter",
             "Time of transfers in a stage.", _by(now, "seconds")),
            ("kvferry_transfer_duration_seconds", "histogram",
             "From the call of a transfer to its end.", _histogram(now)),
        ):  # fmt: skip
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind_of_metric}"]
            lines += [
                f"{name}{suffix}{_braces({**fixed, **own})} {value!r}"
                for suffix, own, value in samples
            ]
        return "\n".join(lines) + "\n"


def _by(now: Mapping[str, Any], what: str) -> Iterator[Sample]:
    """Give the samples of a counter: by kind, and by its second label if it has one."""
    second = {"transfers": "outcome", "failures": "cause", "seconds": "stage"}.get(what)
    for kind in KINDS:
        counts = now[what][kind]
        if second is None:
            yield "", {"kind": kind}, counts
            continue
        if what == "failures":  # a counter that is not there yet has no rate
            counts = {**dict.fromkeys(CAUSES, 0), **counts}
        for word, value in counts.items():
            if word != "total":  # the histogram's sum
                yield "", {"kind": kind, second: word}, value


def _histogram(now: Mapping[str, Any]) -> Iterator[Sample]:
    for kind in KINDS:
        below = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), now["durations"][kind],
                                strict=True):  # fmt: skip
            below += count
            yield "_bucket", {"kind": kind, "le": bound}, below
        yield "_sum", {"kind": kind}, now["seconds"][kind]["total"]
        yield "_count", {"kind": kind}, below


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
