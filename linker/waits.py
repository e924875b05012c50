"""Three ways to wait for a layer, behind one interface: by the host, by events, on the device.

No wait hangs and none raises into a running forward pass: one that ends in vain fails its step,
which lets all others of the step through, and `verdict` tells afterwards.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvferry.errors import ArgumentError, KVFerryError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.stream_memory import StreamMemory, StreamOperations
from kvferry.linker.streams import POLL_S, Fence
from kvferry.linker.wait_watch import WaitWatch, describe_late, name_of

KINDS = ("host", "event", "device")
DEFAULT_TIMEOUT_S = 10.0
CAUSE_POLL_S = 1e-3
"""How often a thread that waits for an event looks whether the step has failed."""

LATE_SHARE = 1 / 16
"""How much longer than needed the host may wait for a layer, beside `POLL_S`."""

State = Literal["landed", "enqueued", "failed", "expired"]


@dataclass(frozen=True)
class Waited:
    """What came of one wait.

    Attributes:
        what: what was waited for; with `state` "expired", also how far it had come.
        state: "landed": all signals of the layer were seen. "enqueued": the current stream will be
            held, and the thread goes on. "failed": the step has failed, before or meanwhile.
            "expired": the time was up, and so the step failed.
        waited_us: how long the thread was held.
    """

    what: str
    state: State
    waited_us: float


class LayerWait(Protocol):
    """Holds whoever needs a layer until all its signals of a step are given."""

    def arm(self, step: Step) -> None:
        """Prepare the stream that is current, and that will wait, for a step's waits.

        Needed before a captured graph is replayed; else the first wait does it.
        """

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the thread or the current stream until a layer has landed; never raises for that.

        Args:
            step: which.
            layer: which.
            limit_s: wait no longer than that, where it is less than the wait's own bound.
        """

    def verdict(self, step: Step) -> str | None:
        """Return why a step's bytes cannot be used, None if they can so far; does not wait."""

    def close(self) -> None:
        """Let through whoever is held, and end what was started."""


class HostWait:
    """The thread is held until the host sees the counter at its target. Right everywhere."""

    def __init__(self, counters: LayerCounters, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._counters = counters
        self._timeout_s = _checked(timeout_s)

    def arm(self, step: Step) -> None:
        """Do nothing: the host knows the targets."""

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the thread until a layer has landed."""
        begin = time.monotonic()
        timeout_s = _least(self._timeout_s, limit_s)
        while not self._counters.reached(step, layer):
            if step.cause is not None:
                break
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                return _expired(self._counters, step, layer, begin)
            # Each look takes the interpreter from the threads that bring the layer.
            poll_s = min(max(POLL_S, waited_s * LATE_SHARE), CAUSE_POLL_S)
            self._counters.pause(step, layer, poll_s)
        # Asked last: a failure raises the counter too, after it has left its cause.
        state: State = "landed" if step.cause is None else "failed"
        return Waited(name_of(step, layer), state, _since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed."""
        return step.cause

    def close(self) -> None:
        """Do nothing."""


class EventWait:
    """The thread is held until a layer's unpack is enqueued, the current stream until it is done.

    The producer calls `enqueued` for every layer, also for those that own nothing.
    """

    def __init__(self, counters: LayerCounters, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._counters = counters
        self._timeout_s = _checked(timeout_s)
        self._changed = threading.Condition()
        self._fences: list[tuple[int, Fence]] = [(0, Fence())] * counters.num_layers

    def enqueued(self, step: Step, first_layer: int, end_layer: int, fence: Fence) -> None:
        """Say that the producer's stream has been given all that a range of layers needs.

        Args:
            step: which.
            first_layer: first of the range.
            end_layer: behind its last.
            fence: a point on the producer's stream behind the work.

        Raises:
            ArgumentError: the range is wrong.
        """
        if not 0 <= first_layer < end_layer <= len(self._fences):
            raise ArgumentError(
                f"layers are {first_layer} .. {end_layer - 1}, wanted a range within "
                f"0 .. {len(self._fences) - 1}"
            )
        with self._changed:
            for layer in range(first_layer, end_layer):
                # A later step's fence lies behind an earlier one's, on the same stream.
                if step.number > self._fences[layer][0]:
                    self._fences[layer] = (step.number, fence)
            self._changed.notify_all()

    def arm(self, step: Step) -> None:
        """Do nothing: fences come from the producer."""

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the thread until a layer's work is enqueued, then the current stream."""
        begin = time.monotonic()
        timeout_s = _least(self._timeout_s, limit_s)
        with self._changed:
            while self._fences[layer][0] < step.number and step.cause is None:
                left_s = begin + timeout_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, CAUSE_POLL_S))
            number, fence = self._fences[layer]
        if step.cause is not None:
            return Waited(name_of(step, layer), "failed", _since_us(begin))
        if number < step.number:
            return _expired(self._counters, step, layer, begin)
        if self._counters.device.type == "cuda":
            fence.after_this(torch.cuda.current_stream(self._counters.device))
        return Waited(name_of(step, layer), "enqueued", _since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed."""
        return step.cause

    def close(self) -> None:
        """Do nothing."""


class DeviceWait:
    """The current stream is held until the counter in the device's memory is at its target.

    By the driver's stream memory operation if one is handed in, else by a kernel of one warp.
    A stream that is being captured always takes the kernel: it reads its target when it runs, while
    the driver's operation would keep the number that it was captured with.

    Attributes:
        refused: why the driver refused, whereupon kernels took over; None if it did not.
    """

    def __init__(
        self,
        counters: LayerCounters,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operations: StreamOperations | None = None,
    ) -> None:
        self._counters = counters
        self._timeout_s = _checked(timeout_s)
        self._operations = operations
        self._watch = WaitWatch(counters, timeout_s)
        self._armed: Step | None = None
        self.refused: str | None = None

    def arm(self, step: Step) -> None:
        """Write the step's targets where the wait kernels read them, in the stream's order."""
        self._counters.arm(step)
        self._armed = step

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the current stream; the thread goes on. The driver's operation has its own bound.

        Raises:
            ArgumentError: the current stream is the producer's, which would wait for itself, or
                this was closed.
        """
        begin = time.monotonic()
        on_gpu = self._counters.device.type == "cuda"
        stream = torch.cuda.current_stream(self._counters.device) if on_gpu else None
        if stream is not None and stream == self._counters.stream:
            raise ArgumentError("the current stream is the producer's, wanted another to be held")
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        if step.cause is not None and not capturing:
            return Waited(name_of(step, layer), "failed", _since_us(begin))
        held = not capturing and self._hold_by_driver(stream, step, layer)
        if not held:
            if self._armed is not step and not capturing:
                self.arm(step)
            timeout_s = _least(self._timeout_s, limit_s)
            self._counters.wait_on_stream(layer, round(timeout_s * 1e6))
        return Waited(name_of(step, layer), "enqueued", _since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed, or which layers its wait kernels gave up."""
        layers = self._counters.expired(step)
        if layers and step.cause is None:
            self._counters.fail(
                step,
                f"step {step.number}: layers {layers} were waited for in vain on the device, "
                f"{self._timeout_s:.3g} s",
            )
        return step.cause

    def _hold_by_driver(self, stream: torch.cuda.Stream | None, step: Step, layer: int) -> bool:
        """Whether the driver holds the stream; if it refuses once, it is not asked again."""
        if self._operations is None:
            return False
        self._watch.add(step, layer)  # before, so that no stream is held without a bound
        try:
            self._operations.wait_at_least(
                0 if stream is None else stream.cuda_stream,
                self._counters.address_of(layer),
                step.targets[layer],
            )
        except KVFerryError as error:
            self._operations, self.refused = None, str(error)
            return False
        return True

    def close(self) -> None:
        """Let through whoever the driver still holds, and end the thread that bounds it."""
        self._watch.close()


def layer_wait(
    kind: str,
    counters: LayerCounters,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    via: str = "auto",
    environment: Mapping[str, str] = os.environ,
    operations: StreamOperations | None = None,
) -> LayerWait:
    """Return a wait of some kind, if it can be right here.

    Args:
        kind: "host", "event" or "device".
        counters: what is waited for.
        timeout_s: how long at most; then the step fails.
        via: how "device" waits: "memory" by the driver's operation, "kernel", or "auto", by the
            first that there is.
        environment: where CUDA_DEVICE_MAX_CONNECTIONS is looked up.
        operations: the driver; by default that of the counters' device.

    Raises:
        ArgumentError: an argument is wrong, or `refusal` has a reason.
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}, wanted one of {list(KINDS)}")
    if via not in ("auto", "memory", "kernel"):
        raise ArgumentError(f"via is {via!r}, wanted 'auto', 'memory' or 'kernel'")
    device = counters.device
    if kind == "device" and via != "kernel" and device.type == "cuda" and operations is None:
        operations = StreamMemory(device.index or 0)
    reason = refusal(kind, device.type, counters.preloaded, via, environment, operations)
    if reason is not None:
        raise ArgumentError(f"kind is {kind!r}: {reason}")
    if kind == "host":
        return HostWait(counters, timeout_s)
    if kind == "event":
        return EventWait(counters, timeout_s)
    usable = via != "kernel" and operations is not None and operations.reason is None
    return DeviceWait(counters, timeout_s, operations if usable else None)


def refusal(
    kind: str,
    device_type: str,
    preloaded: bool,
    via: str,
    environment: Mapping[str, str],
    operations: StreamOperations | None,
) -> str | None:
    """Return why a kind of wait would be wrong here, None if it would not; see `layer_wait`."""
    if kind == "host":
        return None
    if device_type != "cuda":
        return f"the counters are on a {device_type} device, which has no streams; wanted 'host'"
    if kind == "event":
        return None
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    if connections == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: a held stream would hold its producer too; wanted "
            "at least 2, or 'event'"
        )
    if not preloaded:
        return "the kernels are not loaded, wanted `LayerCounters.preload()` before"
    if via == "memory" and (operations is None or operations.reason is not None):
        return f"via is 'memory', but {operations.reason if operations else 'there is no driver'}"
    return None


def _checked(timeout_s: float) -> float:
    if not 0 < timeout_s < float("inf"):
        raise ArgumentError(f"timeout_s is {timeout_s}, wanted more than 0 and not for ever")
    return timeout_s


def _least(timeout_s: float, limit_s: float | None) -> float:
    return timeout_s if limit_s is None else min(timeout_s, max(0.0, limit_s))


def _expired(counters: LayerCounters, step: Step, layer: int, begin: float) -> Waited:
    """Fail a step whose layer is late, so that nobody else waits as long."""
    found = describe_late(counters, step, layer, time.monotonic() - begin)
    counters.fail(step, found)
    return Waited(found, "expired", _since_us(begin))


def _since_us(begin: float) -> float:
    return (time.monotonic() - begin) * 1e6
