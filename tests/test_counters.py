"""Layer counters: signals, targets, waits by kernels, failures, and the kernels' machine code."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import signal_code
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import ABANDONED, LayerCounters
from kvferry.kernels.handles import Launch
from kvferry.kernels.signals import signal_launch, signal_reference, wait_launch, wait_reference

CPU = torch.device("cpu")
LONG_US = 20_000_000
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_counters_gpu"
)
BACKENDS = ["reference", pytest.param("triton", marks=INTERPRETED)]
MOVES = ["reference", pytest.param("launch", marks=INTERPRETED)]
pytestmark = pytest.mark.interpreter


def counts(counters: LayerCounters) -> list[int]:
    return [counters.count_of(layer) for layer in range(counters.num_layers)]


# ---- signals ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_targets_grow_over_many_steps(backend: str, scope: str) -> None:
    rng = random.Random(1)
    counters = LayerCounters(5, CPU, scope=scope, backend=backend)
    totals = [0] * 5
    for number in range(1, 13, 2):
        num_signals = [rng.randint(1, 3) for _ in range(5)]
        step = counters.begin_step(num_signals)
        assert step.number == number
        assert step.targets == tuple(a + b for a, b in zip(totals, num_signals, strict=True))
        order = [layer for layer, count in enumerate(num_signals) for _ in range(count)]
        rng.shuffle(order)
        for place, layer in enumerate(order):
            assert counters.reached(step, layer) is (layer not in order[place:])
            assert counters.signal(step, layer)
            totals[layer] += 1
            assert counts(counters) == totals
        assert step.cause is None
        following = counters.begin_step(1)
        assert not counters.signal(step, 0), "a signal of the step before counted for the next"
        counters.signal(following, 0, 5)
        totals = [total + 1 for total in totals]
        assert counts(counters) == totals


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", [(0, 70), (31, 33), (32, 64), (69, 70)])
def test_a_range_of_layers_is_signalled_at_once(backend: str, ends: tuple[int, int]) -> None:
    counters = LayerCounters(70, CPU, backend=backend)
    step = counters.begin_step(4)
    counters.signal(step, *ends, num_signals=3)
    assert counts(counters) == [3 * (ends[0] <= layer < ends[1]) for layer in range(70)]


@pytest.mark.parametrize("move", MOVES)
def test_raising_lowers_nothing_and_fills_the_mirror(move: str) -> None:
    values = torch.tensor([5, -1, 7, 1 << 40, 9])
    mirror, limits = torch.full((5,), -9), torch.tensor([4, 6, 7, 1 << 41, 99])
    arguments = (values, mirror, limits, 0, 4, 0)
    if move == "launch":
        signal_launch(*arguments, scope="sys").start(CPU)
    else:
        signal_reference(*arguments, scope="sys")
    assert values.tolist() == [5, 6, 7, 1 << 41, 9]
    assert mirror.tolist() == [5, 6, 7, 1 << 41, -9]
    arguments = (values, mirror, None, 1, 3, 2)
    if move == "launch":
        signal_launch(*arguments, scope="gpu").start(CPU)
    else:
        signal_reference(*arguments, scope="gpu")
    assert values.tolist() == [5, 8, 9, 1 << 41, 9]
    assert mirror.tolist() == [5, 8, 9, 1 << 41, -9]


@INTERPRETED
def test_kernels_of_others_are_accounted_for() -> None:
    counters = LayerCounters(3, CPU, backend="triton")
    payload = torch.zeros(1024, dtype=torch.int64)
    step = counters.begin_step([2, 1, 1])
    for _ in range(2):
        with counters.count_signals(step, 0, 1, 1) as wanted:
            assert wanted
            Launch(
                signal_code._store_and_signal_kernel,
                (1, 1),
                (payload.data_ptr(), counters.address_of(0), 0),
                (True,),
                4,
            ).start(CPU)
    counters.publish()
    assert counters.reached(step, 0)
    assert payload.tolist() == list(range(1024))
    with (
        pytest.raises(ArgumentError, match="layer 0 has had 2 of 2 signals of step 1, and 1 more"),
        counters.count_signals(step, 0, 1, 1),
    ):
        pass
    counters.fail(step, "gone")
    with counters.count_signals(step, 1, 2, 1) as wanted:
        assert not wanted


# ---- failures ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_step_lets_everyone_through_and_the_next_waits(backend: str) -> None:
    counters = LayerCounters(4, CPU, backend=backend)
    first = counters.begin_step([3, 1, 1, 2])
    counters.signal(first, 1)
    counters.signal(first, 0, num_signals=2)
    assert counters.fail(first, "the store is gone")
    assert counts(counters) == [3, 1, 1, 2]
    assert all(counters.reached(first, layer) for layer in range(4))
    assert not counters.fail(first, "another cause")
    assert not counters.signal(first, 0)
    second = counters.begin_step(1)
    assert not counters.signal(first, 0)
    assert not any(counters.reached(second, layer) for layer in range(4))
    assert counters.signal(second, 0, 4)
    assert counts(counters) == [4, 2, 2, 3]
    assert (first.cause, second.cause) == ("the store is gone", None)
    assert counters.fail(second, "too late to raise anything")
    assert counts(counters) == [4, 2, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_abandoned_counters_hold_nobody_ever_again(backend: str) -> None:
    counters = LayerCounters(2, CPU, backend=backend)
    step = counters.begin_step(1)
    counters.abandon("the stream does not move")
    counters.abandon("again")
    assert counts(counters) == [ABANDONED] * 2
    assert counters.reached(step, 1)
    assert step.cause == "the stream does not move"
    assert not counters.signal(step, 0)
    with pytest.raises(ArgumentError, match="were abandoned, wanted new ones"):
        counters.begin_step()


OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), st.lists(st.integers(1, 3), min_size=3, max_size=3)),
    st.tuples(st.just("signal"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("signal"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("late"), st.integers(0, 2)),
    st.tuples(st.just("rest")),
    st.tuples(st.just("fail")),
)


@given(st.lists(OPERATIONS, max_size=40))
def test_a_layer_is_reached_by_its_signals_or_a_failure_alone(
    operations: list[tuple[Any, ...]],
) -> None:
    """What cannot be done yet is refused and changes nothing; the model is a list of numbers."""
    counters = LayerCounters(3, CPU)
    steps = [counters.begin_step(1)]
    wanted, given_now, base, failed = [1] * 3, [0] * 3, [0] * 3, False
    for name, *arguments in operations:
        if name == "begin" and (failed or given_now == wanted):
            base = [a + b for a, b in zip(base, wanted, strict=True)]
            wanted, given_now, failed = list(arguments[0]), [0] * 3, False
            steps.append(counters.begin_step(wanted))
        elif name == "begin":
            with pytest.raises(ArgumentError, match="is not over"):
                counters.begin_step(arguments[0])
        elif name == "fail":
            assert counters.fail(steps[-1], "drawn") is not failed
            failed = True
        elif name == "rest":
            for layer in range(3):
                if not failed and (missing := wanted[layer] - given_now[layer]):
                    assert counters.signal(steps[-1], layer, num_signals=missing)
                    given_now[layer] = wanted[layer]
        elif name == "late":
            for earlier in steps[:-1]:
                assert not counters.signal(earlier, arguments[0])
        elif failed:
            assert not counters.signal(steps[-1], arguments[0], num_signals=arguments[1])
        elif given_now[arguments[0]] + arguments[1] > wanted[arguments[0]]:
            with pytest.raises(ArgumentError, match="more came"):
                counters.signal(steps[-1], arguments[0], num_signals=arguments[1])
        else:
            assert counters.signal(steps[-1], arguments[0], num_signals=arguments[1])
            given_now[arguments[0]] += arguments[1]
        for layer in range(3):
            had = wanted[layer] if failed else given_now[layer]
            assert counters.count_of(layer) == base[layer] + had
            assert counters.reached(steps[-1], layer) is (had == wanted[layer])
            assert all(counters.reached(earlier, layer) for earlier in steps[:-1])


# ---- waits by the kernel ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_lasts_until_the_host_has_signalled(backend: str) -> None:
    """The counters are raised by the host: a second interpreted kernel could not run meanwhile."""
    counters = LayerCounters(3, CPU)
    for number in range(1, 4):
        step = counters.begin_step(2)
        counters.arm(step)
        given_at: list[float] = []

        def signal(step: Any = step, given_at: list[float] = given_at) -> None:
            time.sleep(0.02)
            counters.signal(step, 0, 3)
            time.sleep(0.02)
            given_at.append(time.monotonic())
            counters.signal(step, 2)

        producer = threading.Thread(target=signal)
        producer.start()
        start_wait(counters, 2, LONG_US, backend)
        assert given_at, f"step {number} was let through early"
        assert given_at[0] <= time.monotonic()
        producer.join(10)
        counters.signal(step, 0, 2)
        assert counters.expired(step) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_in_vain_ends_and_tells(backend: str) -> None:
    counters = LayerCounters(4, CPU)
    first = counters.begin_step([1, 1, 3, 1])
    counters.arm(first)
    counters.signal(first, 0)
    start_wait(counters, 0, 0, backend)
    assert counters.expired(first) == []
    start_wait(counters, 2, 20_000, backend)
    assert counters.expired(first) == [2]
    # The step's other waits look only once, whatever their limit: a minute is some 10 s of polls.
    begin = time.monotonic()
    start_wait(counters, 1, 60_000_000, backend)
    start_wait(counters, 0, 60_000_000, backend)
    assert time.monotonic() - begin < 5
    assert counters.expired(first) == [1, 2]
    counters.fail(first, "in vain")
    second = counters.begin_step(1)
    counters.arm(second)
    assert counters.expired(second) == []
    counters.signal(second, 0, 3)
    start_wait(counters, 2, LONG_US, backend)
    assert counters.expired(second) == []
    start_wait(counters, 3, 5_000, backend)
    assert counters.expired(second) == [3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_beyond_the_target_is_enough(backend: str) -> None:
    counters = LayerCounters(1, CPU)
    first = counters.begin_step()
    counters.signal(first, 0)
    second = counters.begin_step(5)
    counters.signal(second, 0, num_signals=5)
    counters.arm(first)
    start_wait(counters, 0, 0, backend)
    begin = time.monotonic()
    start_wait(counters, 0, 60_000_000, backend)
    assert time.monotonic() - begin < 5
    assert counters.expired(first) == counters.expired(second) == []


@INTERPRETED
def test_one_launch_serves_step_after_step() -> None:
    """As in a captured graph: the launch is the same, its target lies in memory."""
    counters = LayerCounters(2, CPU)
    launch = counters.wait_launch(1, 0)
    for _ in range(3):
        step = counters.begin_step()
        counters.arm(step)
        counters.signal(step, 0)
        launch.start(CPU)
        assert counters.expired(step) == [1]
        counters.signal(step, 1)
        step = counters.begin_step()
        counters.arm(step)
        counters.signal(step, 0, 2)
        launch.start(CPU)
        assert counters.expired(step) == []


@pytest.mark.parametrize("move", MOVES)
def test_where_a_wait_in_vain_is_written(move: str) -> None:
    values, targets = torch.tensor([3, 4, 5]), torch.tensor([3, 5, 5, 8])
    expired, mirror = torch.full((4,), -1), torch.full((4,), -1)
    for layer in range(3):
        if move == "launch":
            wait_launch(values, targets, expired, mirror, layer, 2).start(CPU)
        else:
            wait_reference(values, targets, expired, mirror, layer, 2)
    assert expired.tolist() == mirror.tolist() == [-1, 5, -1, 8]
    assert values.tolist() == [3, 4, 5]


@INTERPRETED
def test_preloading_changes_no_counter() -> None:
    counters = LayerCounters(3, CPU, backend="triton")
    assert not counters.preloaded
    counters.preload()
    assert counters.preloaded
    assert counts(counters) == [0, 0, 0]
    step = counters.begin_step()
    assert counters.expired(step) == []
    assert not any(counters.reached(step, layer) for layer in range(3))


def start_wait(counters: LayerCounters, layer: int, timeout_us: int, backend: str) -> None:
    if backend == "triton":
        counters.wait_launch(layer, timeout_us).start(CPU)
    else:
        counters.wait_on_stream(layer, timeout_us)


# ---- arguments ----


def test_wrong_arguments_are_refused() -> None:
    for wrong, words in (
        ({"num_layers": 0}, "num_layers is 0, wanted 1 .."),
        ({"scope": "cta"}, "scope is 'cta', wanted one of"),
        ({"backend": "torch"}, "backend is 'torch', wanted"),
        ({"device": torch.device("meta")}, "device is meta, wanted a CPU or CUDA device"),
    ):
        arguments: dict[str, Any] = {"num_layers": 2, "device": CPU, **wrong}
        with pytest.raises(ArgumentError, match=words):
            LayerCounters(**arguments)
    counters = LayerCounters(2, CPU)
    with pytest.raises(ArgumentError, match="num_signals has 1 numbers, wanted 2"):
        counters.begin_step([1])
    with pytest.raises(ArgumentError, match="num_signals of layer 1 is 0, wanted 1 "):
        counters.begin_step([1, 0])
    step = counters.begin_step([1, 2])
    for first, end in ((-1, 1), (1, 1), (1, 3), (2, None)):
        with pytest.raises(ArgumentError, match=r"wanted a range within 0 \.\. 1"):
            counters.signal(step, first, end)
    with pytest.raises(ArgumentError, match="num_signals is 0, wanted 1 "):
        counters.signal(step, 0, num_signals=0)
    with pytest.raises(ArgumentError, match="layer 0 has had 0 of 1 signals of step 1, and 2 more"):
        counters.signal(step, 0, 2, num_signals=2)
    assert counts(counters) == [0, 0]
    counters.signal(step, 0)
    with pytest.raises(ArgumentError, match="step 1 is not over: layer 1 has had 0 of 2 signals"):
        counters.begin_step()
    with pytest.raises(ArgumentError, match="preload came in step 1, wanted it before"):
        counters.preload()
    with pytest.raises(ArgumentError, match="timeout_us is -1, wanted 0 "):
        counters.wait_on_stream(0, -1)
    for ask in (counters.count_of, lambda layer: counters.reached(step, layer)):
        with pytest.raises(ArgumentError, match=r"layers are -1 \.\. -1, wanted a range"):
            ask(-1)


# ---- machine code ----


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("signal_code.py"))
    done = subprocess.run(
        [sys.executable, script, "90", "100", "gfx942"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def sequence(row: dict[str, Any], *starts: str) -> list[str]:
    return [name for name in row["code"] if name.startswith(starts)]


def test_every_kernel_compiles_for_every_target(rows: list[dict[str, Any]]) -> None:
    names = [{r["name"] for r in rows if r["target"] == t} for t in ("90", "100", "gfx942")]
    assert names[0] == names[1] == names[2]
    assert len(names[0]) == 7


def test_a_signal_is_a_barrier_then_a_fence_then_the_number(rows: list[dict[str, Any]]) -> None:
    signals = [row for row in rows if "code" in row and row["name"] != "wait"]
    assert len(signals) == 12
    for row in signals:
        scope = row["name"].rpartition("_")[2].upper()
        code = sequence(row, "BAR", "MEMBAR", "RED", "ATOM", "STG", "ST.")
        (place,) = (i for i, name in enumerate(code) if name.startswith(("RED", "ATOM")))
        assert code[place].endswith(f"STRONG.{scope}"), code
        assert code[place - 1] == f"MEMBAR.ALL.{scope}", code
        assert code[place - 2].startswith("BAR.SYNC"), code
        if row["name"].startswith("fused"):
            # Every store is before the barrier, whichever thread it is of.
            assert sum(name.startswith("STG") for name in code[: place - 2]) >= 8, code
            assert not any(name.startswith("ST") for name in code[place:]), code
        else:
            assert code[place + 1 :] == ["MEMBAR.ALL.SYS", "STG.E.64.STRONG.SYS"], code


def test_a_wait_polls_by_acquiring_loads(rows: list[dict[str, Any]]) -> None:
    for row in (row for row in rows if "code" in row and row["name"] == "wait"):
        polls = sequence(row, "LDG.E.64.STRONG.SYS", "CCTL.IVALL")
        assert polls == ["LDG.E.64.STRONG.SYS", "CCTL.IVALL"] * 2, row["code"]
        assert not sequence(row, "ATOM", "RED"), row["code"]
        assert len(sequence(row, "CS2R")) >= 2, row["code"]  # the clock, before and in the loop
        told = sequence(row, "MEMBAR", "STG.E.64.STRONG")
        assert told == ["MEMBAR.ALL.SYS", "STG.E.64.STRONG.SYS"] * 2, row["code"]


def test_neither_spills(rows: list[dict[str, Any]]) -> None:
    for row in (row for row in rows if "code" in row):
        assert row["spills"] == row["spill_bytes"] == 0, row
        assert row["registers"] <= 32, row
