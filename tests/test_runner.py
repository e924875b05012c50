"""The runner sees what its layers read when they read it: late and wrong loads are caught."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compute import Compute
from free_pages import FreePages, Pages
from lanes import draw, overlaps
from local import cut
from runner import Runner, main

from kvferry import CacheLayout
from kvferry.errors import TransferFailed
from kvferry.linker.trace import Trace
from kvferry.linker.waited import Waited
from kvferry.testing import check_telling, make_tensors, write_telling

NUM_PAGES = 12


@pytest.fixture
def layout() -> CacheLayout:
    plain = cut("qwen3-8b-fp8-scales", 4)
    return plain.bind(make_tensors(plain, NUM_PAGES))


@pytest.fixture
def runner(layout: CacheLayout) -> Runner:
    trace = Trace()
    return Runner(layout, trace, Compute(torch.device("cpu"), trace, layer_us=500), max_pages=4)


class Ending:
    """A request's handle that has ended."""

    def __init__(self, error: TransferFailed | None = None) -> None:
        self.error = error

    def result(self) -> None:
        if self.error is not None:
            raise self.error


class Landing:
    """A load whose layers are brought by a function, when they are waited for."""

    def __init__(
        self,
        land: Callable[[int], None],
        *errors: TransferFailed | None,
        early: tuple[int, ...] = (),
    ) -> None:
        self.land = land
        self.transfers = [Ending(error) for error in errors or (None,)]
        self.calls: list[Any] = []
        self.step = SimpleNamespace(targets=[1] * 4)
        counters = SimpleNamespace(reached=lambda step, layer: layer in early)
        self.counter_set = SimpleNamespace(counters=counters)

    def start(self) -> None:
        self.calls.append("start")

    def wait_layer(self, layer: int) -> Waited:
        self.calls.append(layer)
        self.land(layer)
        return Waited(f"layer {layer}", "landed", 3.0)

    def result(self) -> None:
        self.calls.append("result")


def bring(layout: CacheLayout, pages: Pages, layer: int) -> None:
    for space, page_ids in pages.page_ids.items():
        write_telling(layout, space, page_ids, pages.tags, layers=[layer])


def step(runner: Runner, load: Landing, *loaded: Pages, **other: Any) -> Any:
    handle: Any = load
    return runner.step(load=handle, loaded=loaded, **other)


def test_a_load_in_time_is_right(runner: Runner, layout: CacheLayout) -> None:
    pages = runner.new_pages(3)
    load = Landing(lambda layer: bring(layout, pages, layer))
    times = step(runner, load, pages)
    assert load.calls == ["start", 0, 1, 2, 3, "result"]
    assert times.failures == [None]
    assert times.wait_us == 12.0
    assert times.step_us >= 4 * 500


def test_a_layer_that_comes_after_it_was_read_is_caught(
    runner: Runner, layout: CacheLayout
) -> None:
    pages = runner.new_pages(3)
    load = Landing(lambda layer: bring(layout, pages, layer - (layer == 3)))
    with pytest.raises(AssertionError, match="layer 3: "):
        step(runner, load, pages)

    def late(layer: int) -> None:  # layer 1 lands one layer late, all is there in the end
        for each in {0: [0], 1: [], 2: [1, 2], 3: [3]}[layer]:
            bring(layout, others, each)

    others = runner.new_pages(3)
    with pytest.raises(AssertionError, match="layer 1: "):
        step(runner, Landing(late), others)
    check_telling(layout, "full", others.page_ids["full"], others.tags)


def test_pages_that_were_right_before_are_spoilt(runner: Runner, layout: CacheLayout) -> None:
    pages = runner.new_pages(1)
    runner.fill(pages)
    runner.step(read=[pages])
    runner.new_pages(NUM_PAGES - 1)
    runner.give_back(pages)
    elsewhere = runner.places_for(pages)
    assert elsewhere == pages  # no other place is free
    with pytest.raises(AssertionError, match="layer 0: "):
        step(runner, Landing(lambda layer: None), elsewhere)
    runner.fill(elsewhere)
    runner.spoil(elsewhere)
    with pytest.raises(AssertionError, match="layer 0: "):
        runner.step(read=[elsewhere])


def test_a_failed_request_is_not_compared_but_the_others_are(
    runner: Runner, layout: CacheLayout
) -> None:
    failed, good = runner.new_pages(1), runner.new_pages(2)
    error = TransferFailed("gone")
    load = Landing(lambda layer: bring(layout, good, layer), error, None)
    assert step(runner, load, failed, good).failures == [error, None]
    load = Landing(lambda layer: bring(layout, failed, layer), error, None)
    runner.spoil(good)
    with pytest.raises(AssertionError, match="bytes differ"):
        step(runner, load, failed, good)


def test_layers_are_told_of_once_they_are_written(runner: Runner, layout: CacheLayout) -> None:
    read, written = runner.new_pages(2), runner.new_pages(3)
    runner.fill(read)
    told: list[int] = []
    page_ids = written.page_ids["full"]

    class Saving:
        def layer_written(self, layer: int) -> None:
            told.append(layer)
            check_telling(layout, "full", page_ids, written.tags, layers=range(layer + 1))
            for later in range(layer + 1, 4):
                with pytest.raises(AssertionError):
                    check_telling(layout, "full", page_ids, written.tags, layers=[later])

    save: Any = Saving()
    runner.step(read=[read], written=written, save=save)
    assert told == [0, 1, 2, 3]
    runner.step(read=[read])


class Clock:
    """Time that passes by sleeping alone, and then by some more than asked."""

    def __init__(self) -> None:
        self.now_s = 128.0
        self.late_s = 0.5

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, wanted_s: float) -> None:
        assert wanted_s > 0
        self.now_s += wanted_s + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("compute.time", made)
    return made


def yes() -> bool:
    return True


def test_reading_is_part_of_the_compute_time(clock: Clock) -> None:
    trace = Trace()
    compute = Compute(torch.device("cpu"), trace, layer_us=20e6)
    for layer, reading_s in enumerate((8, 25)):  # the second one takes longer than the layer should
        compute.begin_step()
        with compute.layer(layer, yes):
            clock.now_s += reading_s
    assert [each.name for each in trace.intervals("compute")] == ["layer 0", "layer 1"]
    durations = [each.end_s - each.begin_s for each in trace.intervals("compute")]
    assert durations == [20.5, 25]


def two_layers(clock: Clock, compute: Compute, there: Callable[[], bool]) -> float:
    """How long two layers take, the host coming to the second one 6 seconds late."""
    compute.begin_step()
    begin_s = clock.now_s
    with compute.layer(0, there):
        clock.now_s += 1
    clock.now_s += 6.0
    with compute.layer(1, yes):
        pass
    return clock.now_s - begin_s


def test_a_late_host_is_made_up_for_where_the_next_layer_was_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compute.ASK_S", 2.0)
    compute = Compute(torch.device("cpu"), Trace(), layer_us=20e6)
    assert two_layers(clock, compute, yes) == 40.5
    begin_s = clock.now_s
    assert two_layers(clock, compute, lambda: clock.now_s >= begin_s + 18.5) == 40.5
    begin_s = clock.now_s  # comes while the host is asleep for the last time
    assert two_layers(clock, compute, lambda: clock.now_s >= begin_s + 18.75) == 47.0
    monkeypatch.setattr("compute.ASK_S", 0.25)  # asked as long after the end: nobody knows
    begin_s = clock.now_s
    assert two_layers(clock, compute, lambda: clock.now_s >= begin_s + 18.5) == 46.75
    assert two_layers(clock, compute, yes) == 40.5


def test_a_step_begins_when_it_is_called(clock: Clock) -> None:
    compute = Compute(torch.device("cpu"), Trace(), layer_us=20e6)
    assert two_layers(clock, compute, yes) == 40.5
    clock.now_s += 100
    assert two_layers(clock, compute, yes) == 40.5


def test_a_step_lasts_from_its_begin_to_the_verdict(
    runner: Runner, layout: CacheLayout, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.time", clock)
    clock.late_s = 0.0
    pages = runner.new_pages(1)

    def land(layer: int) -> None:
        bring(layout, pages, layer)
        clock.now_s += {0: 2.0, 2: 1.0}.get(layer, 0.0)

    times = step(runner, Landing(land), pages)
    assert times.first_us == pytest.approx(2.0e6)
    assert times.step_us == pytest.approx(3.0e6 + 4 * 500)


def test_what_was_read_is_compared_after_the_step(runner: Runner) -> None:
    pages = runner.new_pages(4)
    runner.fill(pages)
    runner.step(read=[pages])
    computed = runner._trace.intervals("compute")
    assert [each.name for each in computed] == [f"layer {layer}" for layer in range(4)]
    (check,) = runner._trace.intervals("check")
    assert check.begin_s >= computed[-1].end_s


def test_a_layer_follows_only_if_it_was_there_in_time(
    runner: Runner, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    real = runner.compute.layer

    def noting(layer: int, next_is_there: Callable[[], bool]) -> Any:
        asked.append(next_is_there())
        return real(layer, next_is_there)

    monkeypatch.setattr(runner.compute, "layer", noting)
    pages = runner.new_pages(1)
    load = Landing(lambda layer: bring(layout, pages, layer), early=(0, 2))
    step(runner, load, pages)
    assert asked == [False, True, False, False]
    asked.clear()
    runner.step(read=[pages])
    assert asked == [True] * 4


def test_more_pages_than_there_is_room_for_are_refused(runner: Runner) -> None:
    pages = runner.new_pages(5)
    with pytest.raises(ValueError, match="5 pages, wanted at most 4"):
        runner.step(read=[pages])
    with pytest.raises(ValueError, match="5 pages, wanted at most 4"):
        runner.step(written=pages)


def test_pages_are_handed_out_once() -> None:
    free = FreePages(6)
    taken = free.take(6)
    assert sorted(taken) == list(range(6))
    assert taken != list(range(6))
    with pytest.raises(MemoryError, match="1 pages wanted, 0 are free"):
        free.take(1)
    free.give(taken[:2])
    assert len(free) == 2
    for page_ids in ([taken[0]], [6], [-1], [taken[2], taken[2]]):
        with pytest.raises(ValueError, match=f"page {page_ids[-1]} is not in use"):
            free.give(page_ids)
    assert len(free) == 2  # refused whole
    assert sorted(free.take(2)) == sorted(taken[:2])


def test_a_trace_is_drawn_and_its_overlap_told(tmp_path: Path) -> None:
    trace = Trace()
    for layer in range(4):
        trace.add("compute", f"layer {layer}", layer * 0.010, (layer + 1) * 0.010)
    trace.add("wire", "layers 0..1", -0.010, 0.010)
    trace.add("wire", "layers 2..3", 0.005, 0.020)
    rows = {row["lane"]: row for row in overlaps(trace)}
    assert rows["wire"]["intervals"] == 2
    assert rows["wire"]["busy ms"] == pytest.approx(30)
    assert rows["wire"]["beside compute ms"] == pytest.approx(20)
    assert rows["wire"]["share"] == "67%"
    draw(trace, tmp_path / "lanes.png", "a test")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.mooncake
def test_the_program_saves_loads_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    status = main(
        ["--layers", "5", "--pages", "3", "--compute-us", "1000", "--staging-mb", "8", "--save",
         "--out", str(tmp_path / "out")]
    )  # fmt: skip
    assert time.monotonic() - begin < 60
    said = capsys.readouterr().out
    assert status == 0, said
    assert "3 stored" in said
    assert "every byte right" in said
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    lanes = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"compute", "wait", "pack", "wire", "unpack"} <= lanes
    assert (tmp_path / "out" / "lanes.png").read_bytes().startswith(b"\x89PNG")
