"""Part `waits` of the GPU check: counters, signals, and the three ways to wait for a layer."""

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_part import Check

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.event_wait import EventWait
from kvferry.linker.streams import fence_of_caller
from kvferry.linker.waits import LayerWait, layer_wait

NUM_LAYERS = 61
LIMIT_S = 5.0
VAIN_S = 0.2
HOLD_CYCLES = 2_000_000
"""So long the producer is held, some 1 ms, so that whoever waits is there before the signal."""

SAMPLES = 31
KINDS = (("host", "auto"), ("event", "auto"), ("device", "kernel"), ("device", "memory"))


def run(check: Check) -> None:
    """Check numbers, order and bounds, then time from a signal to whoever waited for it."""
    producer = torch.cuda.Stream(check.device, priority=-1) if check.on_gpu else None
    counters = LayerCounters(NUM_LAYERS, check.device, stream=producer, backend="triton")
    check.step("preload")
    counters.preload()
    _numbers(check, counters)
    done = []
    for kind, via in KINDS:
        if not check.on_gpu and kind != "host":
            continue
        name = kind if via == "auto" else f"{kind}, {via}"
        check.step(name)
        try:
            wait = layer_wait(kind, counters, timeout_s=LIMIT_S, via=via)
        except ArgumentError as refused:
            check.left_out(f"{name}: {refused}")
            continue
        _held_until_signalled(check, counters, wait)
        _latency(check, counters, wait, name)
        wait.close()
        done.append(name)
    check.step("a wait in vain")
    _in_vain(check, counters)
    if not check.on_gpu:
        check.left_out("waits by events and on the device: a CPU has no streams")
    check.summary(f"{NUM_LAYERS} counters right; waits by {'; '.join(done)}; each is bounded")


def _numbers(check: Check, counters: LayerCounters) -> None:
    """Raise counters in parts, over several steps; the device and the host see the same."""
    for number in range(1, 6):
        check.step(f"signals of step {number}")
        step = counters.begin_step([2 + layer % 2 for layer in range(NUM_LAYERS)])
        counters.signal(step, 0, NUM_LAYERS)
        counters.signal(step, 31, NUM_LAYERS)
        counters.signal(step, 0, 31)
        for layer in range(1, NUM_LAYERS, 2):
            counters.signal(step, layer)
        _until_signalled(counters, step)
        wanted = [number * (2 + layer % 2) for layer in range(NUM_LAYERS)]
        got = [counters.count_of(layer) for layer in range(NUM_LAYERS)]
        assert got == wanted == list(step.targets), f"the host sees {got}, wanted {wanted}"
        values = counters._memory.values.tolist()
        assert values == wanted, f"the device has {values}, wanted {wanted}"


def _held_until_signalled(check: Check, counters: LayerCounters, wait: LayerWait) -> None:
    """What was written before a signal is there for whoever waited for it, and not before."""
    payload = torch.zeros(1 << 20, dtype=torch.int32, device=check.device)
    if check.on_gpu:
        torch.cuda.synchronize(check.device)  # the producer's stream knows nothing of the zeros
    for number in range(1, 4):
        step = counters.begin_step()
        seen: list[torch.Tensor] = []
        layer = 7 * number
        waiting = threading.Thread(
            target=_read_behind, args=(check, wait, step, layer, payload, seen)
        )
        waiting.start()
        time.sleep(0.01)
        assert not counters.reached(step, layer)
        _signal(counters, wait, step, partial(payload.fill_, number))
        waiting.join(2 * LIMIT_S)
        assert not waiting.is_alive(), f"layer {layer} was waited for in vain"
        assert seen, f"nobody read what layer {layer} was waited for"
        assert bool((seen[0] == number).all()), f"step {number}: not what the signal came behind"
        assert wait.verdict(step) is None, wait.verdict(step)


def _read_behind(
    check: Check,
    wait: LayerWait,
    step: Step,
    layer: int,
    payload: torch.Tensor,
    seen: list[torch.Tensor],
) -> None:
    """Wait for a layer on a stream of one's own, then read what was written."""
    if not check.on_gpu:
        wait.wait(step, layer)
        seen.append(payload.clone())
        return
    with torch.cuda.stream(torch.cuda.Stream(check.device)):
        wait.arm(step)
        wait.wait(step, layer)
        copied = payload.clone()
        assert fence_of_caller(check.device).wait(2 * LIMIT_S), "the stream is still held"
        seen.append(copied)


def _signal(
    counters: LayerCounters, wait: LayerWait, step: Step, before: Callable[[], object]
) -> None:
    """Do something on the producer's stream, then signal every layer behind it."""
    with torch.cuda.stream(counters.stream):
        before()
        counters.signal(step, 0, NUM_LAYERS)
        if isinstance(wait, EventWait):
            wait.enqueued(step, 0, NUM_LAYERS, fence_of_caller(counters.device))


def _latency(check: Check, counters: LayerCounters, wait: LayerWait, name: str) -> None:
    """Time from just before a signal to the stream, or thread, that waited for it."""
    samples = []
    forward = torch.cuda.Stream(check.device) if check.on_gpu else None
    for _ in range(SAMPLES if check.on_gpu else 1):
        step = counters.begin_step()
        if forward is not None and name != "host":
            samples.append(_stream_latency_us(counters, wait, step, forward))
        else:
            samples.append(_thread_latency_us(counters, wait, step))
        _until_signalled(counters, step)
    check.row(
        wait=name, **{"signal to released, us": statistics.median(samples)},
        lowest=min(samples), highest=max(samples),
    )  # fmt: skip


def _stream_latency_us(
    counters: LayerCounters, wait: LayerWait, step: Step, forward: torch.cuda.Stream
) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def hold() -> None:
        torch.cuda._sleep(HOLD_CYCLES)
        start.record()

    with torch.cuda.stream(forward):
        wait.arm(step)
    _signal(counters, wait, step, hold)
    with torch.cuda.stream(forward):
        wait.wait(step, 30)
        end.record()
    _until(end.query)
    return float(start.elapsed_time(end)) * 1e3


def _thread_latency_us(counters: LayerCounters, wait: LayerWait, step: Step) -> float:
    released: list[float] = []

    def hold() -> None:
        wait.wait(step, 30)
        released.append(time.perf_counter())

    waiting = threading.Thread(target=hold)
    waiting.start()
    time.sleep(1e-3)
    begin = time.perf_counter()
    counters.signal(step, 0, NUM_LAYERS)
    waiting.join(2 * LIMIT_S)
    return (released[0] - begin) * 1e6


def _in_vain(check: Check, counters: LayerCounters) -> None:
    """A wait whose signal never comes ends by its own bound, and the step tells."""
    kinds = KINDS if check.on_gpu else KINDS[:1]
    for kind, via in kinds:
        try:
            wait = layer_wait(kind, counters, timeout_s=VAIN_S, via=via)
        except ArgumentError:
            continue  # left out before, with the reason
        step = counters.begin_step()
        begin = time.monotonic()
        if check.on_gpu:
            with torch.cuda.stream(torch.cuda.Stream(check.device)):
                wait.wait(step, 3)
                assert fence_of_caller(check.device).wait(LIMIT_S), f"{kind}, {via}: still held"
        else:
            wait.wait(step, 3)
        _until(partial(_has_verdict, wait, step))
        waited_s = time.monotonic() - begin
        wait.close()
        if step.cause is None:
            raise AssertionError(f"{kind}, {via}: nobody says that the wait was in vain")
        assert waited_s >= VAIN_S / 2, f"{kind}, {via}: gave up after {waited_s:.3f} s"
        counters.fail(step, "in vain")


def _has_verdict(wait: LayerWait, step: Step) -> bool:
    return wait.verdict(step) is not None


def _until_signalled(counters: LayerCounters, step: Step) -> None:
    """Wait until the host sees every signal of a step."""
    _until(lambda: all(counters.reached(step, layer) for layer in range(NUM_LAYERS)))


def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, not for ever.

    Raises:
        AssertionError: it did not come about.
    """
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing came within {LIMIT_S:.0f} s")
        time.sleep(1e-4)
