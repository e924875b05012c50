"""Layer counters and the waits on the device, on a real GPU: compiled kernels, captured graphs."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvferry.kernels.counters import LayerCounters
from kvferry.linker.device_wait import DeviceWait
from kvferry.linker.event_wait import EventWait
from kvferry.linker.host_wait import HostWait
from kvferry.linker.streams import fence_of_caller
from kvferry.linker.waits import LayerWait, layer_wait

LIMIT_S = 10.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none"),
]


@pytest.fixture
def counters(device: torch.device) -> LayerCounters:
    made = LayerCounters(70, device, stream=torch.cuda.Stream(device, priority=-1))
    made.preload()
    return made


@pytest.fixture(params=["kernel", "memory"])
def wait(request: pytest.FixtureRequest, counters: LayerCounters) -> Iterator[LayerWait]:
    made = layer_wait("device", counters, timeout_s=LIMIT_S, via=request.param)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_signals_reach_the_mirror(counters: LayerCounters) -> None:
    for number in range(1, 20):
        step = counters.begin_step(2)
        counters.signal(step, 0, 70)
        counters.signal(step, 31, 70)
        counters.signal(step, 0, 31)
        assert until(lambda step=step: all(counters.reached(step, i) for i in range(70)))
        assert [counters.count_of(layer) for layer in (0, 31, 69)] == [2 * number] * 3


def test_a_held_stream_goes_on_after_the_signal(
    counters: LayerCounters, wait: LayerWait, device: torch.device
) -> None:
    forward = torch.cuda.Stream(device)
    for _ in range(5):
        step = counters.begin_step()
        with torch.cuda.stream(forward):
            wait.arm(step)
            assert wait.wait(step, 33).state == "enqueued"
            behind = fence_of_caller(device)
        time.sleep(0.02)
        assert not behind.is_passed()
        counters.signal(step, 0, 33)
        time.sleep(0.02)
        assert not behind.is_passed()
        counters.signal(step, 33, 70)
        assert behind.wait(LIMIT_S)
        assert wait.verdict(step) is None


def test_a_failure_lets_a_held_stream_go(
    counters: LayerCounters, wait: LayerWait, device: torch.device
) -> None:
    forward = torch.cuda.Stream(device)
    step = counters.begin_step()
    with torch.cuda.stream(forward):
        wait.wait(step, 5)
        behind = fence_of_caller(device)
    counters.fail(step, "gone")
    assert behind.wait(LIMIT_S)
    assert wait.verdict(step) == "gone"


@pytest.mark.parametrize("via", ["kernel", "memory"])
def test_a_wait_in_vain_is_bounded(counters: LayerCounters, device: torch.device, via: str) -> None:
    short = layer_wait("device", counters, timeout_s=0.1, via=via)
    forward = torch.cuda.Stream(device)
    step = counters.begin_step()
    with torch.cuda.stream(forward):
        for layer in range(70):
            short.wait(step, layer)
        behind = fence_of_caller(device)
    assert behind.wait(3.0)
    assert short.verdict(step) is not None
    short.close()


def test_a_captured_wait_takes_each_steps_target(
    counters: LayerCounters, device: torch.device
) -> None:
    wait = DeviceWait(counters, LIMIT_S)
    forward, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    number = torch.zeros(1, device=device)
    step = counters.begin_step()
    counters.signal(step, 0, 70)
    with torch.cuda.graph(graph, stream=forward):
        wait.wait(step, 3)
        number.add_(1)
    for _ in range(4):
        step = counters.begin_step()
        with torch.cuda.stream(forward):
            wait.arm(step)
            graph.replay()
            behind = fence_of_caller(device)
        time.sleep(0.02)
        assert not behind.is_passed()
        counters.signal(step, 0, 70)
        assert behind.wait(LIMIT_S)
        assert wait.verdict(step) is None
    assert number.item() == 4


def test_host_and_event(counters: LayerCounters, device: torch.device) -> None:
    host, event = HostWait(counters, LIMIT_S), EventWait(counters, LIMIT_S)
    step = counters.begin_step()
    counters.signal(step, 0, 70)
    with torch.cuda.stream(counters.stream):
        event.enqueued(step, 0, 70, fence_of_caller(device))
    assert host.wait(step, 69).state == "landed"
    assert event.wait(step, 69).state == "enqueued"
