"""What a sweep chooses from timings, what it leaves out, and the file that comes of them."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton

from kvferry.errors import ArgumentError
from kvferry.launch import LaunchConfig
from kvferry.tuned import CONFIGS, DIRECTIONS, for_device, read_file
from kvferry.tuning import measured
from kvferry.tuning.choose import beside_of, best, chosen, classes_of, faults_of
from kvferry.tuning.derive import Candidate, Figures
from kvferry.tuning.groups import trials_for
from kvferry.tuning.limit import Limit, OutOfTimeError
from kvferry.tuning.plans import (
    BESIDE,
    FULL,
    HINTS,
    SHORT,
    STAGES,
    TILES,
    UNITS,
    Group,
    Plan,
    Trial,
    known_figures,
    pruned,
)
from kvferry.tuning.progress import Progress
from kvferry.tuning.records import Beside, Record, RecordFile, Result
from kvferry.tuning.target import named
from kvferry.tuning.timing import Timing

PLAN = Plan(
    "made up",
    class_bytes=(1 << 20, 1 << 16),
    budgets=(0, 8),
    layouts={TILES: ("deepseek-v3.2 pages", "tiny pages"), UNITS: ("tiny rows",)},
    sizes={TILES: (8192, 16384), UNITS: (512, 1024)},
    num_warps=(4, 8),
    num_rounds=5,
)
KEY = ("pack", 1 << 20, 8)


def trial(kernel: str = TILES, size: int = 8192, num_warps: int = 4, cache: str = "none") -> Trial:
    return Trial(Candidate(kernel, "pack", True, size, num_warps), cache)


def record(shares: dict[Trial, float], group: Group | None = None) -> Record:
    """Of a copy that takes 100 us; a share of 0 is a fault."""
    results = tuple(
        Result(one, timing=timing(100 / share), share_of_copy=share)
        if share
        else Result(one, "3 bytes of the objects are wrong")
        for one, share in shares.items()
    )
    group = group or Group(1 << 20, TILES, "tiny pages", "pack", 8)
    return Record(group, 1_000_000, timing(100.0), results)


def timing(median_us: float) -> Timing:
    return Timing(median_us, 0.9 * median_us, 1.1 * median_us, 5)


# ---- which candidate is the best ----


def test_the_least_time_in_the_mean_over_the_layouts_wins() -> None:
    small, large = trial(), trial(size=16384)
    assert best([record({small: 0.5, large: 0.8})]) == large
    # In times of a copy: 2 and 1.25, then 2.5 and 4: the small one is better in the mean.
    assert best([record({small: 0.5, large: 0.8}), record({small: 0.4, large: 0.25})]) == small


def test_of_equally_good_ones_the_smallest_wins() -> None:
    small, wide, large = trial(), trial(num_warps=8), trial(size=16384)
    hinted = replace(small, cache="stream")
    assert best([record({large: 0.9, wide: 0.896, hinted: 0.896, small: 0.895})]) == small
    assert best([record({large: 0.9, wide: 0.896, small: 0.88})]) == wide
    assert best([record({large: 0.9, wide: 0.88, small: 0.88})]) == large


def test_a_candidate_that_failed_anywhere_is_never_chosen() -> None:
    good, bad = trial(), trial(size=16384)
    assert best([record({good: 0.1, bad: 0.0})]) == good
    assert best([record({good: 0.1, bad: 0.9}), record({good: 0.1, bad: 0.0})]) == good
    assert best([record({bad: 0.0})]) is None
    assert best([record({good: 0.9, bad: 0.0}), record({good: 0.0, bad: 0.9})]) is None


# ---- what is tried, and when ----


def records_of(plan: Plan, hint: str = "stream") -> dict[Group, Record]:
    """A whole sweep's: the second candidate is the best, and the hint better than none."""
    records: dict[Group, Record] = {}
    for group in plan.groups():
        trials = trials_for(plan, group, records, ())
        assert not isinstance(trials, str)
        if group.stage == BESIDE:
            records[group] = Record(group, 1_000_000, beside=Beside(1.0625, timing(3000)))
            continue
        share = 0.5 if group.layout == "tiny pages" else 0.25
        best_one = trials[1] if group.stage != HINTS else Trial(trials[0].candidate, hint)
        records[group] = record(
            {one: share if one == best_one else share / 2 for one in trials}, group
        )
    return records


def test_tiles_come_first_then_hints_then_units_with_the_hint() -> None:
    records = records_of(PLAN)
    for group in PLAN.groups():
        tried = [one.trial for one in records[group].results]
        kernels = {one.candidate.kernel for one in tried}
        hints = {one.cache for one in tried}
        if group.stage == TILES:
            assert (kernels, hints, len(tried)) == ({TILES}, {"none"}, 4)
        elif group.stage == HINTS:
            assert {one.candidate for one in tried} == {
                Candidate(TILES, group.direction, group.max_programs > 0, 8192, 8)
            }
            assert hints == {"none", "stream", "keep_written"}
        elif group.stage == UNITS:
            assert (kernels, hints, len(tried)) == ({UNITS}, {"stream"}, 4)
    out = [one for one in PLAN.candidates(UNITS, "pack", 8) if one.num_warps == 8]
    group = Group(1 << 20, UNITS, "tiny rows", "pack", 8)
    left = trials_for(PLAN, group, records, out)
    assert [one.name for one in left] == [  # type: ignore[union-attr]
        "units 512 x 4 warps, stream", "units 1024 x 4 warps, stream",
    ]  # fmt: skip
    assert trials_for(PLAN, group, records, PLAN.candidates(UNITS, "pack", 8)) == (
        "every candidate is out"
    )
    assert trials_for(PLAN, group, {}, ()) == "hints not timed"


@pytest.mark.parametrize("plan", [FULL, SHORT, PLAN])
def test_a_size_class_is_finished_before_the_next_begins(plan: Plan) -> None:
    groups = list(plan.groups())
    assert len(set(groups)) == len(groups)
    sizes = [group.num_bytes for group in groups]
    assert list(dict.fromkeys(sizes)) == list(plan.class_bytes)
    assert sizes == sorted(sizes, key=plan.class_bytes.index)
    for size in plan.class_bytes:
        stages = [group.stage for group in groups if group.num_bytes == size]
        assert stages == sorted(stages, key=STAGES.index)
    beside = [group for group in groups if group.stage == BESIDE]
    assert {(one.direction, one.max_programs) for one in beside} == set(
        product(DIRECTIONS, plan.budgets)
    )
    assert len(beside) == 2 * len(plan.budgets)  # each once


def test_a_trial_sets_its_own_kernels_numbers() -> None:
    assert trial(size=32768, num_warps=8, cache="stream").config(4) == LaunchConfig(
        tile_bytes=32768, tile_warps=8, max_programs=4, cache="stream"
    )
    assert trial(UNITS, 512, 8).config(0) == LaunchConfig(units_per_program=512, unit_warps=8)


def test_what_spills_or_keeps_little_in_flight_is_out() -> None:
    def figures(spill_bytes: int, program: int, multiprocessor: int) -> Figures:
        return Figures(40, spill_bytes, 8, program, multiprocessor, 14.0)

    for persistent in (False, True):
        best_one, low, narrow, spills, unknown = (
            Candidate(TILES, "pack", persistent, size, 4) for size in (1024, 2048, 4096, 8192, 3)
        )
        known = {
            best_one: figures(0, 32768, 131072), narrow: figures(0, 0, 0),
            spills: figures(24, 32768, 131072),
            low: figures(0, 8192, 131072) if persistent else figures(0, 32768, 32768),
        }  # fmt: skip
        some = [best_one, low, narrow, spills, unknown]
        told = "8 KiB in flight, the best 32" if persistent else "32 KiB in flight, the best 128"
        spilled = {narrow: "loads no payload by 16 bytes", spills: "each thread spills 24 bytes"}
        assert pruned(some, known, 0.0) == pruned(some, known, 0.25) == spilled
        assert pruned(some, known, 0.3) == {low: told, **spilled}


def test_figures_of_another_triton_are_not_taken(tmp_path: Path) -> None:
    figures, name = known_figures("sm_90", "NVIDIA_H200")
    plain = json.loads((CONFIGS / "default.json").read_text())
    if plain["triton"] == triton.__version__:
        assert name.startswith("NVIDIA_H")
        assert len(figures) == 48
    plain["architecture"] = "sm_90"
    for version, number in (("0.1", 0), (triton.__version__, 48)):
        plain["triton"] = version
        (tmp_path / "a.json").write_text(json.dumps(plain))
        assert len(known_figures("sm_90", "b", tmp_path)[0]) == number
        assert not known_figures("sm_80", "b", tmp_path)[0]


# ---- the file ----

ABOUT = {"triton": "3.6.0", "torch": "2.13", "driver": "580", "commit": "abc", "sources": "1f"}
TARGET = named("NVIDIA_H200")


def test_the_loader_picks_what_was_measured(tmp_path: Path) -> None:
    content = measured.content_of(PLAN, TARGET, ABOUT, records_of(PLAN))
    assert content is not None
    path = tmp_path / "NVIDIA_H200.json"
    measured.write(content, path)
    tuned = read_file(path)
    assert (tuned.gpu, tuned.origin) == ("NVIDIA H200", "measured")
    for direction, size, budget in product(DIRECTIONS, PLAN.class_bytes, PLAN.budgets):
        assert tuned.choose(direction, size, budget) == LaunchConfig(
            tile_bytes=8192, tile_warps=8, units_per_program=512, unit_warps=8,
            max_programs=budget, cache="stream",
        )  # fmt: skip
    default = (CONFIGS / "default.json").read_text()
    (tmp_path / "default.json").write_text(default)
    assert for_device("NVIDIA H200", tmp_path).origin == "measured"
    # Of the layouts with long runs the slower one speaks for the class: 1 MB in 400 us.
    for one in content["classes"]:
        assert (one["gb_per_s"], one["share_of_copy"], one["spread"]) == (2.5, 0.25, 0.2)
        assert one["layouts"]["tiny pages"]["gb_per_s"] == 5.0
        assert set(one["layouts"]) == {"deepseek-v3.2 pages", "tiny pages", "tiny rows"}
    assert [one["matmul_slowdown"] for one in content["beside_matmul"]] == [1.0625] * 4
    assert content["left_out"] == content["failed"] == []


def test_a_file_that_the_loader_refuses_is_not_written(tmp_path: Path) -> None:
    content = measured.content_of(PLAN, TARGET, {**ABOUT, "driver": ""}, records_of(PLAN))
    assert content is not None
    with pytest.raises(ArgumentError, match="driver is ''"):
        measured.write(content, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_a_class_that_is_not_complete_is_left_out_and_named() -> None:
    records = records_of(PLAN)
    del records[Group(1 << 20, UNITS, "tiny rows", "pack", 8)]
    del records[Group(1 << 16, HINTS, "tiny pages", "unpack", 0)]
    no_memory = Group(1 << 16, HINTS, "tiny pages", "unpack", 8)
    records[no_memory] = Record(no_memory, why_not="out of memory")
    all_bad = Group(1 << 20, UNITS, "tiny rows", "unpack", 0)
    trials = [one.trial for one in records[all_bad].results]
    records[all_bad] = record(dict.fromkeys(trials, 0.0), all_bad)
    classes, left_out = classes_of(PLAN, records)
    assert left_out == [
        "pack, 1 MiB, 8 programs: units not timed",
        "unpack, 64 KiB, no budget: hints not timed",
        "unpack, 64 KiB, 8 programs: out of memory",
        "unpack, 1 MiB, no budget: every candidate for units failed",
    ]
    keys = {(one["direction"], one["num_bytes"], one["max_programs"]) for one in classes}
    assert len(classes) == len(keys) == 4
    assert KEY not in keys
    assert chosen(PLAN, records, UNITS, KEY) == "units not timed"
    assert len(faults_of(records.values())) == 4
    assert faults_of(records.values())[0] == (
        "unpack units 512 x 4 warps, stream, no budget, tiny rows, 1 MiB: 3 bytes of the objects "
        "are wrong"
    )


def test_without_a_class_of_each_direction_there_is_no_content() -> None:
    records = {group: one for group, one in records_of(PLAN).items() if group.direction == "pack"}
    assert classes_of(PLAN, records)[0]
    assert measured.content_of(PLAN, TARGET, ABOUT, records) is None


def test_what_was_not_measured_beside_a_matmul_says_why() -> None:
    group = Group(1 << 20, BESIDE, "tiny pages", "pack", 4)
    (one,) = beside_of([Record(group, why_not="not measured on a CPU")])
    assert one["matmul_slowdown"] is None
    assert one["why_not"] == "not measured on a CPU"


def test_the_picture_is_drawn_or_missed_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = measured.content_of(PLAN, TARGET, ABOUT, records_of(PLAN))
    assert content is not None
    path = tmp_path / "a.png"
    pytest.importorskip("matplotlib")
    assert measured.draw(content, TARGET, path) == f"wrote {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    monkeypatch.setitem(__import__("sys").modules, "kvferry.tuning.curve", None)
    monkeypatch.delattr("kvferry.tuning.curve", raising=False)
    assert measured.draw(content, TARGET, path).startswith("no picture: ")
    assert not path.exists()


# ---- going on later ----


def test_records_survive_and_a_line_that_was_cut_off_goes(tmp_path: Path) -> None:
    path, about = tmp_path / "a.jsonl", {"gpu": "NVIDIA H200", "plan": "made up"}
    records = records_of(PLAN)
    faulty = Group(1 << 16, TILES, "tiny pages", "pack", 4)
    records[faulty] = record({trial(): 0.0}, faulty)
    file = RecordFile(path, about, resume=True)  # there is nothing yet
    for one in records.values():
        file.add(one)
    assert RecordFile(path, about, resume=True).records == records
    path.write_text(path.read_text()[:-40])
    left = RecordFile(path, about, resume=True)
    assert list(left.records) == list(records)[:-1]
    left.add(records[faulty])
    assert RecordFile(path, about, resume=True).records == records
    assert RecordFile(path, about, resume=False).records == {}
    assert RecordFile(path, about, resume=True).records == {}


def test_records_of_another_machine_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    RecordFile(path, {"gpu": "A", "plan": "full"}, resume=False)
    before = path.read_text()
    with pytest.raises(ArgumentError, match=r"a.jsonl is of gpu 'A', wanted gpu 'B'; begin anew"):
        RecordFile(path, {"gpu": "B", "plan": "full"}, resume=True)
    assert path.read_text() == before


# ---- limits ----


def test_a_limit_leaves_its_body_wherever_it_is() -> None:
    begin_s = time.monotonic()
    done = []
    with Limit(0.2) as limit:
        assert not limit.is_up
        while True:
            try:  # what Triton's compiler does
                time.sleep(0.01)
            except Exception:
                done.append("swallowed")
                raise
    assert limit.is_up
    assert not done
    assert time.monotonic() - begin_s < 5


def test_an_end_that_was_lost_comes_again() -> None:
    lost = []
    with Limit(0.1):
        for _ in range(500):
            try:
                time.sleep(0.01)
            except OutOfTimeError:
                if lost:
                    raise
                lost.append(1)
        pytest.fail("nobody ended this")
    assert lost


def test_without_need_a_limit_does_nothing() -> None:
    for seconds in (None, 60.0):
        with Limit(seconds) as limit:
            pass
        assert not limit.is_up
    with pytest.raises(ValueError, match="own"), Limit(60.0):
        raise ValueError("own")


# ---- the bar ----


class Screen:
    """A stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self.isatty: Callable[[], bool] = lambda: is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: list[float] = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    screen: Any = Screen(True)
    bar = Progress(4, screen)
    clock[0] += 90
    bar.step("units")
    assert "[#######......................." in screen.text
    assert "1/4, 4:30 left  units" in screen.text
    bar.end()
    assert screen.text.endswith("\r\x1b[K")
    silent: Any = Screen(False)
    bar = Progress(4, silent)
    bar.step("tiles")
    assert silent.text == ""
    clock[0] += 31
    bar.step("units")
    bar.step("units")
    assert silent.text == "2/4, 0:31 left  units\n"
