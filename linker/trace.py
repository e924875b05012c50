"""A timeline of what ran when, lane by lane: overlap in numbers, and a file for Perfetto."""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvferry.arguments import MAX_SECONDS, device_of, number, of_type, string, whole_number
from kvferry.errors import ArgumentError
from kvferry.linker.streams import DeviceClock, Fence

LANES = ("compute", "wait", "check", "pack", "seal", "wire", "unpack")
"""Order of the lanes from above; others follow as they first appear."""

MAX_INTERVALS = 100_000


@dataclass(frozen=True)
class Interval:
    """Something that took time.

    Attributes:
        lane: what kind of work it was.
        name: which work, such as `layers 0..3`.
        begin_s, end_s: by `time.perf_counter()`.
        arguments: what else is known of it, such as its bytes.
    """

    lane: str
    name: str
    begin_s: float
    end_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


class Trace:
    """Records intervals from any thread, up to a number of them.

    Work on a stream is recorded by its fence and gets its times when they are asked for, so that
    recording never waits for the device.
    """

    def __init__(
        self, device: torch.device | str | None = None, max_intervals: int = MAX_INTERVALS
    ) -> None:
        """Begin to record.

        Args:
            device: of the streams whose fences are recorded; a CPU by default.
            max_intervals: how many are kept; later ones are only counted.
        """
        max_intervals = whole_number("max_intervals", max_intervals, 1)
        self._device = device_of("device", "cpu" if device is None else device)
        self._max_intervals = max_intervals
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything and begin anew; on a GPU this waits for one event of an idle stream."""
        clock = DeviceClock(self._device)
        with self._lock:
            self._clock = clock
            self._begin_s = time.perf_counter()
            self._intervals: list[Interval] = []
            self._fences: list[tuple[str, str, Fence, dict[str, Any]]] = []
            self._num_dropped = 0

    def add(self, lane: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        """Record work of the host.

        Args:
            lane: what kind of work it was.
            name: which work.
            begin_s: when it began, by `time.perf_counter()`.
            end_s: when it ended.
            arguments: what else is known of it.
        """
        for argument, value in (("lane", lane), ("name", name)):
            string(argument, value)
        for argument, time_s in (("begin_s", begin_s), ("end_s", end_s)):
            number(argument, time_s, least=-MAX_SECONDS)
        with self._lock:
            if self._has_room():
                self._intervals.append(Interval(lane, name, begin_s, end_s, arguments))

    def add_fence(self, lane: str, name: str, fence: Fence, **arguments: Any) -> None:
        """Record work of a stream, whether it is done or not; see `add`.

        Raises:
            ArgumentError: the fence does not know where its work began.
        """
        string("lane", lane)
        string("name", name)
        if not of_type("fence", fence, Fence).has_start:
            raise ArgumentError(f"the fence of {lane} {name!r} has no start, wanted one that does")
        with self._lock:
            if self._has_room():
                self._fences.append((lane, name, fence, arguments))

    @property
    def num_dropped(self) -> int:
        """How many intervals were not kept."""
        return self._num_dropped

    @property
    def num_pending(self) -> int:
        """How many fences are not passed yet; their intervals are left out so far."""
        self._resolve()
        return len(self._fences)

    def intervals(self, lane: str | None = None) -> list[Interval]:
        """Return what is known by now, of one lane or of all, in the order of beginning."""
        self._resolve()
        with self._lock:
            found = [each for each in self._intervals if lane in (None, each.lane)]
        return sorted(found, key=lambda each: (each.begin_s, each.end_s))

    def lanes(self) -> list[str]:
        """Return the lanes that hold something, from above."""
        found = dict.fromkeys(each.lane for each in self.intervals())
        return [*(lane for lane in LANES if lane in found), *(x for x in found if x not in LANES)]

    def rows(self, lane: str) -> list[list[Interval]]:
        """Return a lane's intervals in as few rows as it takes for none to overlap in its row."""
        rows: list[list[Interval]] = []
        for interval in self.intervals(lane):
            free = next((row for row in rows if row[-1].end_s <= interval.begin_s), None)
            if free is None:
                rows.append([interval])
            else:
                free.append(interval)
        return rows

    def busy_us(self, lane: str) -> float:
        """Return how long anything of a lane ran, in microseconds."""
        return sum(end - begin for begin, end in self._union(lane)) * 1e6

    def overlap_us(self, lane_a: str, lane_b: str) -> float:
        """Return how long two lanes ran at the same time, in microseconds."""
        return common_s(self._union(lane_a), self._union(lane_b)) * 1e6

    def write(self, path: Path | str) -> None:
        """Write a file that Perfetto and chrome://tracing open: a thread for each row of a lane."""
        with self._lock:
            begin_s = self._begin_s
        events: list[dict[str, Any]] = []
        thread_id = 0
        for lane in self.lanes():
            for index, row in enumerate(self.rows(lane)):
                thread_id += 1
                place = {"pid": 1, "tid": thread_id}
                name = lane if index == 0 else f"{lane} ({index + 1})"
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
                events.append(
                    {"ph": "M", "name": "thread_sort_index", **place,
                     "args": {"sort_index": thread_id}}
                )  # fmt: skip
                events += (
                    {
                        "ph": "X",
                        "name": each.name,
                        "cat": lane,
                        **place,
                        "ts": (each.begin_s - begin_s) * 1e6,
                        "dur": (each.end_s - each.begin_s) * 1e6,
                        "args": each.arguments,
                    }
                    for each in row
                )
        left_out = {"num_dropped": self.num_dropped, "num_pending": self.num_pending}
        written = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": left_out}
        Path(path).write_text(json.dumps(written, default=str) + "\n", encoding="utf-8")

    def _has_room(self) -> bool:
        """Whether one more is kept; if not, counts it. Holds the lock."""
        if len(self._intervals) + len(self._fences) < self._max_intervals:
            return True
        self._num_dropped += 1
        return False

    def _resolve(self) -> None:
        """Give the fences that are passed their times."""
        with self._lock:
            pending = []
            for lane, name, fence, arguments in self._fences:
                times_s = fence.times_s(self._clock)
                if times_s is None:
                    pending.append((lane, name, fence, arguments))
                else:
                    self._intervals.append(Interval(lane, name, *times_s, arguments))
            self._fences = pending

    def _union(self, lane: str) -> list[tuple[float, float]]:
        return union((each.begin_s, each.end_s) for each in self.intervals(lane))


def union(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return ascending ranges that touch nowhere and cover what the given ones cover."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(pairs):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def common_s(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return how much two unions have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return total
