"""Timelines: their arithmetic against a count of cells, their file, their bounds."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.linker.streams import DeviceClock, Fence, Lane
from kvferry.linker.trace import Trace, union

CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]
PAIRS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda each: (each[0], sum(each))),
    max_size=12,
)


def cells(pairs: Pairs) -> set[int]:
    return {cell for begin, end in pairs for cell in range(begin, end)}


def trace_of(**lanes: Pairs) -> Trace:
    trace = Trace()
    for lane, pairs in lanes.items():
        for number, (begin, end) in enumerate(pairs):
            trace.add(lane, str(number), begin, end)
    return trace


@given(PAIRS, PAIRS)
def test_busy_and_overlap_are_the_cells_covered(one: Pairs, other: Pairs) -> None:
    trace = trace_of(wire=one, compute=other)
    assert trace.busy_us("wire") == pytest.approx(len(cells(one)) * 1e6)
    assert trace.busy_us("compute") == pytest.approx(len(cells(other)) * 1e6)
    common = len(cells(one) & cells(other)) * 1e6
    assert trace.overlap_us("wire", "compute") == pytest.approx(common)
    assert trace.overlap_us("compute", "wire") == pytest.approx(common)


@given(PAIRS)
def test_a_union_is_ascending_and_touches_nowhere(pairs: Pairs) -> None:
    edges = [edge for pair in union(pairs) for edge in pair]
    assert edges == sorted(edges)
    inner = edges[1:-1]
    assert all(end < begin for end, begin in zip(inner[::2], inner[1::2], strict=True))


@given(PAIRS)
def test_rows_hold_everything_once_and_nothing_overlaps_in_one(pairs: Pairs) -> None:
    rows = trace_of(wire=pairs).rows("wire")
    assert sorted(each.name for row in rows for each in row) == sorted(map(str, range(len(pairs))))
    for row in rows:
        assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(row))
    covering = [sum(begin <= cell < end for begin, end in pairs) for cell in range(60)]
    assert len(rows) >= max(covering)
    if all(begin < end for begin, end in pairs):
        assert len(rows) == max(covering)


def test_a_lane_that_is_not_there_is_idle() -> None:
    trace = trace_of(wire=[(0, 3)])
    assert trace.busy_us("pack") == 0
    assert trace.overlap_us("pack", "wire") == 0
    assert trace.lanes() == ["wire"]


def test_known_lanes_come_in_their_order_and_others_below() -> None:
    trace = trace_of(other=[(0, 1)], unpack=[(1, 2)], wire=[(2, 3)], compute=[(5, 6)])
    assert trace.lanes() == ["compute", "wire", "unpack", "other"]


def test_the_file_has_a_named_thread_for_each_row_and_nothing_overlaps(tmp_path: Path) -> None:
    trace = Trace()
    begin_s = time.perf_counter()
    for number in range(3):  # the second begins before the first has ended
        trace.add("wire", f"layers {number}", begin_s + number, begin_s + number + 1.5, bytes=7)
    trace.add("compute", "layer 0", begin_s, begin_s + 0.25, place=Path("x"))
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "wire", "wire (2)"]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(names, key=order.__getitem__) == list(names)
    threads: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            threads[names[event["tid"]]].append(event)
    assert [e["name"] for e in threads["wire"]] == ["layers 0", "layers 2"]
    assert [e["name"] for e in threads["wire (2)"]] == ["layers 1"]
    first, last = threads["wire"]
    assert first["dur"] == pytest.approx(1.5e6)
    assert last["ts"] - first["ts"] == pytest.approx(2e6)
    assert 0 <= first["ts"] < 1e6  # from the trace's beginning, not the machine's
    assert first["args"] == {"bytes": 7}
    assert threads["compute"][0]["args"] == {"place": "x"}


def test_what_exceeds_the_bound_is_counted_not_kept(tmp_path: Path) -> None:
    trace = Trace(max_intervals=3)
    fence = Fence(host_s=(0.0, 1.0))
    trace.add_fence("pack", "0", fence)
    for number in range(3):
        trace.add("wire", str(number), number, number + 1)
    trace.add_fence("pack", "1", fence)
    assert len(trace.intervals()) == 3
    trace.add("wire", "late", 0, 1)
    assert trace.num_dropped == 3
    trace.write(tmp_path / "trace.json")
    left_out = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert left_out == {"num_dropped": 3, "num_pending": 0}
    trace.clear()
    assert (trace.intervals(), trace.num_dropped) == ([], 0)
    trace.add("wire", "again", 0, 1)
    assert len(trace.intervals()) == 1
    with pytest.raises(ArgumentError, match="max_intervals is 0"):
        Trace(max_intervals=0)


def test_threads_lose_nothing() -> None:
    trace = Trace(max_intervals=1500)

    def record(name: str) -> None:
        for number in range(400):
            trace.add("wire", f"{name}-{number}", number, number + 1)
            if number % 50 == 0:
                trace.busy_us("wire")

    threads = [threading.Thread(target=record, args=(str(each),)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({each.name for each in trace.intervals()}) == 1500
    assert trace.num_dropped == 100


def test_work_of_a_cpu_has_the_times_of_its_call() -> None:
    trace = Trace(CPU)
    lane = Lane(CPU)
    assert lane.stream is None
    begin_s = time.perf_counter()
    with lane.work(Fence()) as fences:
        time.sleep(0.002)
    end_s = time.perf_counter()
    trace.add_fence("pack", "layers 0..3", fences[-1], bytes=5)
    (interval,) = trace.intervals("pack")
    assert begin_s <= interval.begin_s <= interval.end_s - 0.002 <= end_s - 0.002
    assert interval.arguments == {"bytes": 5}
    assert fences[-1].device_us == pytest.approx(trace.busy_us("pack"))


def test_a_fence_without_a_start_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'layers 0' has no start"):
        Trace().add_fence("pack", "layers 0", Fence())
    event: Any = Event(1.0)
    with pytest.raises(ArgumentError, match="has no start"):
        Trace().add_fence("pack", "layers 0", Fence(event))


class Event:
    """An event of a device, at a time that it alone knows."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: "Event") -> float:
        return other.ms - self.ms


def test_work_of_a_stream_is_known_once_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    monkeypatch.setattr(trace._clock, "_zero", Event(100.0))
    monkeypatch.setattr(trace._clock, "_zero_s", 7.0)
    start: Any = Event(102.0)
    end: Any = Event(105.0)
    trace.add_fence("unpack", "layer 0", Fence(end, start))
    assert trace.num_pending == 1
    assert trace.intervals() == []
    end.passed = True
    (interval,) = trace.intervals()
    assert (interval.begin_s, interval.end_s) == pytest.approx((7.002, 7.005))
    assert trace.num_pending == 0
    assert len(trace.intervals()) == 1


def test_a_cpus_clock_knows_no_events() -> None:
    event: Any = Event(1.0)
    with pytest.raises(ArgumentError, match="clock is a CPU's"):
        DeviceClock(CPU).host_s(event)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_of_a_gpu_lies_between_the_hosts_times() -> None:
    device = torch.device("cuda", 0)
    trace, lane = Trace(device), Lane(device)
    values = torch.ones(1 << 24, device=device)
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    with lane.work(Fence()) as fences:
        for _ in range(50):
            values.mul_(1.0)
    assert fences[-1].wait(30)
    end_s = time.perf_counter()
    trace.add_fence("pack", "all", fences[-1])
    (interval,) = trace.intervals()
    slack_s = 200e-6
    assert begin_s - slack_s <= interval.begin_s < interval.end_s <= end_s + slack_s
