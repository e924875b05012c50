"""The thread is held until a layer's unpack is enqueued, the stream until it is done."""

import threading
import time

import torch

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.streams import Fence
from kvferry.linker.wait_watch import name_of
from kvferry.linker.waited import (
    CAUSE_POLL_S,
    DEFAULT_TIMEOUT_S,
    Waited,
    checked_s,
    expired,
    least_s,
    since_us,
)  # fmt: skip


class EventWait:
    """The thread is held until a layer's unpack is enqueued, the current stream until it is done.

    The producer calls `enqueued` for every layer, also for those that own nothing.
    """

    def __init__(self, counters: LayerCounters, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._counters = counters
        self._timeout_s = checked_s(timeout_s)
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
        timeout_s = least_s(self._timeout_s, limit_s)
        with self._changed:
            while self._fences[layer][0] < step.number and step.cause is None:
                left_s = begin + timeout_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, CAUSE_POLL_S))
            number, fence = self._fences[layer]
        if step.cause is not None:
            return Waited(name_of(step, layer), "failed", since_us(begin))
        if number < step.number:
            return expired(self._counters, step, layer, begin)
        if self._counters.device.type == "cuda":
            fence.after_this(torch.cuda.current_stream(self._counters.device))
        return Waited(name_of(step, layer), "enqueued", since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed."""
        return step.cause

    def close(self) -> None:
        """Do nothing."""
