"""Three ways to wait for a layer: what they promise, what is refused, and every wait's end."""

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError, KVFerryError
from kvferry.kernels import counters as counters_module
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.stream_memory import WAIT_FLUSH, StreamMemory
from kvferry.linker.streams import Fence
from kvferry.linker.waits import (
    DeviceWait,
    EventWait,
    HostWait,
    LayerWait,
    layer_wait,
    refusal,
)

CPU = torch.device("cpu")
LONG_S = 30.0
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_counters_gpu"
)


class Driver:
    """A driver that notes what streams are held for."""

    def __init__(self, reason: str | None = None, error: str | None = None) -> None:
        self.reason = reason
        self.error = error
        self.held: list[tuple[int, int, int]] = []

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        if self.error is not None:
            raise KVFerryError(self.error)
        self.held.append((stream, address, value))


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, "queue.Queue[Any]"]:
    results: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(action()))
    thread.start()
    return thread, results


# ---- host ----


def test_the_host_waits_until_the_last_signal() -> None:
    counters = LayerCounters(3, CPU)
    wait = HostWait(counters, LONG_S)
    step = counters.begin_step(2)
    wait.arm(step)
    thread, results = in_thread(lambda: wait.wait(step, 1))
    counters.signal(step, 0, 3)
    with pytest.raises(queue.Empty):
        results.get(timeout=0.05)
    counters.signal(step, 1)
    waited = results.get(timeout=LONG_S)
    thread.join(LONG_S)
    assert (waited.what, waited.state) == ("layer 1 of step 1", "landed")
    assert waited.waited_us >= 40_000
    assert wait.verdict(step) is None
    wait.close()


def test_a_late_layer_fails_its_step_and_says_how_far_it_came() -> None:
    counters = LayerCounters(3, CPU)
    wait = HostWait(counters, 0.03)
    step = counters.begin_step(4)
    counters.signal(step, 2, num_signals=3)
    waited = wait.wait(step, 2)
    assert waited.state == "expired"
    assert waited.what.startswith("layer 2 of step 1: its counter is 3, wanted 4, after 0.")
    assert wait.verdict(step) == waited.what
    # The others are let through at once, and the next step is not.
    assert [wait.wait(step, layer).state for layer in range(3)] == ["failed"] * 3
    following = counters.begin_step()
    assert wait.wait(following, 0).state == "expired"


@pytest.mark.parametrize("end", ["signal", "fail", "abandon"])
def test_on_a_cpu_who_waits_is_woken(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "CPU_POLL_S", LONG_S)
    counters = LayerCounters(2, CPU)
    step = counters.begin_step()
    wait = HostWait(counters, 2 * LONG_S)
    thread, waits = in_thread(lambda: wait.wait(step, 1))
    time.sleep(0.05)
    assert waits.empty()
    if end == "signal":
        counters.signal(step, 0)
        counters.signal(step, 1)
    elif end == "fail":
        counters.fail(step, "lost")
    else:
        counters.abandon("lost")
    assert waits.get(timeout=LONG_S / 2).state == ("landed" if end == "signal" else "failed")
    thread.join()


def test_a_failure_wakes_the_host() -> None:
    counters = LayerCounters(1, CPU)
    wait = HostWait(counters, LONG_S)
    step = counters.begin_step()
    thread, results = in_thread(lambda: wait.wait(step, 0))
    counters.fail(step, "the store is gone")
    assert results.get(timeout=LONG_S).state == "failed"
    thread.join(LONG_S)
    assert wait.verdict(step) == "the store is gone"


SIGNALS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(
    st.lists(SIGNALS, min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.integers(-1, 3),
)
def test_no_interleaving_hangs_or_lets_anyone_through_early(
    plans: list[list[int]], seed: int, failing: int
) -> None:
    """Two producers signal each step in random order, two waiters wait for its layers in turn."""
    num_layers = max(map(len, plans))
    plans = [[*plan, *[1] * (num_layers - len(plan))] for plan in plans]
    counters = LayerCounters(num_layers, CPU)
    given_signals: dict[tuple[int, int], int] = {}
    guard = threading.Lock()
    feeds: list[queue.Queue[Step | None]] = [queue.Queue(), queue.Queue()]
    faults: list[str] = []

    def produce(step: Step, order: list[int], fails: bool) -> None:
        for place, layer in enumerate(order):
            if fails and place == len(order) // 2:
                counters.fail(step, "planned")
            with guard:
                given_signals[step.number, layer] = given_signals.get((step.number, layer), 0) + 1
            counters.signal(step, layer)

    def await_all(feed: "queue.Queue[Step | None]", wait: LayerWait, layers: list[int]) -> None:
        while (step := feed.get(timeout=LONG_S)) is not None:
            for layer in layers:
                waited = wait.wait(step, layer)
                with guard:
                    had = given_signals.get((step.number, layer), 0)
                if waited.state == "landed" and had < step.num_signals[layer]:
                    faults.append(f"{waited.what} after {had} of {step.num_signals[layer]}")
                if waited.state == "expired" or (waited.state == "failed" and step.cause is None):
                    faults.append(f"{waited.what}: {waited.state}")

    rng = random.Random(seed)
    forward = list(range(num_layers))
    waiters = [
        threading.Thread(target=await_all, args=(feed, HostWait(counters, LONG_S), layers))
        for feed, layers in zip(feeds, (forward, forward[::-1]), strict=True)
    ]
    for waiter in waiters:
        waiter.start()
    for number, plan in enumerate(plans):
        step = counters.begin_step(plan)
        for feed in feeds:
            feed.put(step)
        order = [layer for layer, count in enumerate(plan) for _ in range(count)]
        rng.shuffle(order)
        cut = rng.randint(0, len(order))
        producers = [
            threading.Thread(target=produce, args=(step, part, number == failing))
            for part in (order[:cut], order[cut:])
        ]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join(LONG_S)
    for feed in feeds:
        feed.put(None)
    for waiter in waiters:
        waiter.join(LONG_S)
    assert not any(waiter.is_alive() for waiter in waiters)
    assert faults == []


# ---- event ----


class Marked(Fence):
    """A fence that is told apart from others."""


def test_an_event_wait_lasts_until_the_work_is_enqueued() -> None:
    counters = LayerCounters(3, CPU)
    wait = EventWait(counters, LONG_S)
    step = counters.begin_step()
    wait.arm(step)
    wait.enqueued(step, 0, 1, Marked())
    assert wait.wait(step, 0).state == "enqueued"
    thread, results = in_thread(lambda: wait.wait(step, 2))
    with pytest.raises(queue.Empty):
        results.get(timeout=0.05)
    wait.enqueued(step, 1, 3, Marked())
    waited = results.get(timeout=LONG_S)
    assert (waited.what, waited.state) == ("layer 2 of step 1", "enqueued")
    thread.join(LONG_S)
    counters.signal(step, 0, 3)
    following = counters.begin_step()
    thread, results = in_thread(lambda: wait.wait(following, 2))
    wait.enqueued(step, 2, 3, Marked())  # late: of the step before
    with pytest.raises(queue.Empty):
        results.get(timeout=0.05)
    counters.fail(following, "gone")
    assert results.get(timeout=LONG_S).state == "failed"
    thread.join(LONG_S)
    assert wait.verdict(following) == "gone"
    wait.close()


def test_an_event_wait_is_bounded() -> None:
    counters = LayerCounters(2, CPU)
    wait = EventWait(counters, 0.03)
    step = counters.begin_step()
    waited = wait.wait(step, 1)
    assert waited.state == "expired"
    assert waited.what.startswith("layer 1 of step 1: its counter is 0, wanted 1, after 0.")
    assert wait.verdict(step) == waited.what
    with pytest.raises(ArgumentError, match=r"layers are 1 \.\. 2, wanted a range within 0 \.\. 1"):
        wait.enqueued(step, 1, 3, Fence())


def test_a_stream_waits_for_the_fence_of_the_latest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = LayerCounters(1, CPU)
    wait = EventWait(counters, 2.0)
    held: list[tuple[str, Any]] = []

    class Noting(Fence):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def after_this(self, stream: Any) -> None:
            held.append((self.name, stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    counters.device = torch.device("cuda", 0)
    first = counters.begin_step()
    wait.enqueued(first, 0, 1, Noting("first"))
    wait.wait(first, 0)
    counters.signal(first, 0)
    second = counters.begin_step()
    wait.enqueued(second, 0, 1, Noting("second"))
    wait.enqueued(first, 0, 1, Noting("late"))
    wait.wait(second, 0)
    wait.wait(first, 0)  # behind the later fence, which is behind the earlier
    assert [name for name, _ in held] == ["first", "second", "second"]
    assert held[0][1] == ("stream of", torch.device("cuda", 0))


# ---- device ----


@INTERPRETED
@pytest.mark.interpreter
def test_the_wait_kernel_holds_and_its_expiry_becomes_the_verdict() -> None:
    counters = LayerCounters(3, CPU, backend="triton")
    wait = DeviceWait(counters, 0.02)
    first = counters.begin_step()
    counters.signal(first, 0, 3)
    assert wait.wait(first, 2).state == "enqueued"
    assert wait.verdict(first) is None
    second = counters.begin_step()
    assert wait.wait(second, 1).state == "enqueued"
    found = "step 2: layers [1] were waited for in vain on the device, 0.02 s"
    assert wait.verdict(second) == second.cause == found
    assert counters.reached(second, 0)
    assert wait.wait(second, 0).state == "failed"
    wait.close()


def test_the_driver_is_given_address_and_target() -> None:
    counters = LayerCounters(3, CPU)
    driver = Driver()
    wait = DeviceWait(counters, LONG_S, driver)
    first = counters.begin_step(5)
    waited = wait.wait(first, 2)
    assert (waited.what, waited.state) == ("layer 2 of step 1", "enqueued")
    counters.signal(first, 0, 3, num_signals=5)
    second = counters.begin_step(2)
    wait.wait(second, 0)
    addresses = [counters.address_of(layer) for layer in range(3)]
    assert addresses == [addresses[0], addresses[0] + 8, addresses[0] + 16]
    assert driver.held == [(0, addresses[2], 5), (0, addresses[0], 7)]
    assert wait.verdict(first) is None
    wait.close()
    assert second.cause == "layer 0 of step 2: the wait was closed"
    assert counters.reached(second, 0)
    assert wait.verdict(first) is None
    with pytest.raises(ArgumentError, match="layer 0 of step 3 is waited for after close"):
        wait.wait(counters.begin_step(), 0)


def test_a_stream_that_the_driver_holds_is_let_go_in_the_end() -> None:
    counters = LayerCounters(2, CPU)
    wait = DeviceWait(counters, 0.03, Driver())
    first = counters.begin_step()
    counters.signal(first, 0, 2)
    wait.wait(first, 0)
    time.sleep(0.1)
    assert first.cause is None
    second = counters.begin_step()
    wait.wait(second, 1)
    assert until(lambda: counters.reached(second, 1))
    assert second.cause is not None
    assert second.cause.startswith("layer 1 of step 2: its counter is 1, wanted 2, after 0.")
    third = counters.begin_step()
    assert not counters.reached(third, 1)
    wait.close()


class StuckCounters(LayerCounters):
    """Counters whose producer's stream does not move: what fails is not raised."""

    def fail(self, step: Step, cause: str) -> bool:
        first = step.cause is None
        step.cause = step.cause or cause
        return first


def test_a_producer_that_does_not_move_is_passed_by() -> None:
    counters = StuckCounters(2, CPU)
    wait = DeviceWait(counters, 0.03, Driver())
    step = counters.begin_step()
    wait.wait(step, 1)
    assert until(lambda: counters.reached(step, 1))
    assert step.cause is not None
    assert step.cause.startswith("layer 1 of step 1: its counter is 0, wanted 1")
    with pytest.raises(ArgumentError, match="abandoned"):
        counters.begin_step()
    wait.close()


@INTERPRETED
@pytest.mark.interpreter
def test_kernels_take_over_from_a_driver_that_refuses() -> None:
    counters = LayerCounters(1, CPU, backend="triton")
    wait = DeviceWait(counters, 0.005, Driver(error="cuStreamWaitValue64 returned 801, wanted 0"))
    step = counters.begin_step()
    assert wait.wait(step, 0).state == "enqueued"
    assert wait.refused == "cuStreamWaitValue64 returned 801, wanted 0"
    assert wait.verdict(step) is not None
    wait.close()


# ---- the driver by ctypes ----


class Library:
    """libcuda's functions, as far as they are called."""

    def __init__(self, attributes: dict[int, int], failing: str = "", status: int = 0) -> None:
        self.attributes, self.failing, self.status = attributes, failing, status
        self.waits: list[tuple[int | None, int, int, int]] = []

    def _result(self, name: str) -> int:
        return self.status if name == self.failing else 0

    def cuInit(self, flags: int) -> int:
        return self._result("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return self._result("cuDeviceGet")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        assert device.value == 3
        value._obj.value = self.attributes.get(attribute, 0)
        return self._result("cuDeviceGetAttribute")

    def cuStreamWaitValue64_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        self.waits.append((stream.value, address.value, value.value, flags.value))
        return self._result("cuStreamWaitValue64")


@pytest.mark.parametrize(("flush", "flags"), [(0, 0), (1, WAIT_FLUSH)])
def test_what_the_driver_is_called_with(flush: int, flags: int) -> None:
    library = Library({98: flush, 122: 1})
    memory = StreamMemory(3, library)
    assert memory.reason is None
    memory.wait_at_least(77, 1 << 45, 1 << 40)
    assert library.waits == [(77, 1 << 45, 1 << 40, flags)]


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (Library({98: 1}), "device 3 reports no 64-bit stream memory operations"),
        (Library({122: 1}, "cuDeviceGetAttribute", 1), "device 3 reports no 64-bit"),
        (Library({122: 1}, "cuInit", 100), "cuInit returned 100, wanted 0"),
        (Library({122: 1}, "cuDeviceGet", 101), "cuDeviceGet returned 101, wanted 0"),
        (object(), "the driver cannot be used: .*cuStreamWaitValue64_v2"),
    ],
)
def test_why_the_driver_cannot_be_used(library: Any, words: str) -> None:
    reason = StreamMemory(3, library).reason
    with pytest.raises(ArgumentError, match=words):
        raise ArgumentError(reason)


def test_a_refused_operation_is_told() -> None:
    memory = StreamMemory(3, Library({122: 1}, "cuStreamWaitValue64", 801))
    with pytest.raises(KVFerryError, match="cuStreamWaitValue64 returned 801, wanted 0"):
        memory.wait_at_least(0, 8, 1)


# ---- which wait is right where ----


@pytest.mark.parametrize(
    ("kind", "device_type", "preloaded", "via", "connections", "driver", "words"),
    [
        ("host", "cpu", False, "auto", "1", None, None),
        ("host", "cuda", False, "auto", "1", None, None),
        ("event", "cuda", False, "auto", "1", None, None),
        ("event", "cpu", False, "auto", None, None, "on a cpu device, which has no streams"),
        ("device", "cpu", True, "auto", None, Driver(), "on a cpu device, which has no streams"),
        ("device", "cuda", True, "auto", "1", Driver(), "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
        ("device", "cuda", True, "kernel", " 1 ", None, "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
        ("device", "cuda", False, "auto", "8", Driver(), "the kernels are not loaded"),
        ("device", "cuda", True, "memory", None, Driver("no 64 bits"), "'memory', but no 64 bits"),
        ("device", "cuda", True, "memory", None, None, "'memory', but there is no driver"),
        ("device", "cuda", True, "auto", None, Driver("no 64 bits"), None),
        ("device", "cuda", True, "kernel", "2", Driver("no 64 bits"), None),
        ("device", "cuda", True, "memory", "32", Driver(), None),
    ],
)
def test_what_is_refused(
    kind: str, device_type: str, preloaded: bool, via: str, connections: str | None,
    driver: Driver | None, words: str | None,
) -> None:  # fmt: skip
    environment = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    reason = refusal(kind, device_type, preloaded, via, environment, driver)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_a_wait_is_made_or_refused_by_name() -> None:
    counters = LayerCounters(2, CPU)
    assert isinstance(layer_wait("host", counters), HostWait)
    for arguments, words in (
        ({"kind": "flag"}, "kind is 'flag', wanted one of"),
        ({"kind": "host", "via": "poll"}, "via is 'poll', wanted 'auto', 'memory' or 'kernel'"),
        ({"kind": "event"}, "kind is 'event': the counters are on a cpu device"),
        ({"kind": "device"}, "kind is 'device': the counters are on a cpu device"),
        ({"kind": "host", "timeout_s": 0}, "timeout_s is 0, wanted more than 0"),
        ({"kind": "host", "timeout_s": float("inf")}, "timeout_s is inf, wanted more than 0"),
    ):
        with pytest.raises(ArgumentError, match=words):
            layer_wait(counters=counters, **arguments)


@pytest.mark.parametrize(
    ("via", "driver", "by_driver"),
    [
        ("auto", Driver(), True),
        ("memory", Driver(), True),
        ("kernel", Driver(), False),
        ("auto", Driver("no 64 bits"), False),
    ],
)
def test_the_driver_waits_where_it_can(via: str, driver: Driver, by_driver: bool) -> None:
    counters = LayerCounters(1, CPU)
    counters.preload()
    counters.device = torch.device("cuda", 0)  # as if: nothing is launched
    wait = layer_wait("device", counters, via=via, environment={}, operations=driver)
    assert isinstance(wait, DeviceWait)
    assert (wait._operations is driver) is by_driver
    counters.device = CPU
    if by_driver:
        step = counters.begin_step()
        wait.wait(step, 0)
        assert len(driver.held) == 1
        counters.signal(step, 0)
    wait.close()


def test_a_producer_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = LayerCounters(1, CPU)
    wait = DeviceWait(counters, LONG_S, Driver())
    step = counters.begin_step()
    counters.device, counters.stream = torch.device("cuda", 0), "lane"  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "lane")
    with pytest.raises(ArgumentError, match="the current stream is the producer's, wanted another"):
        wait.wait(step, 0)
