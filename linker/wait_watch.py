"""The bound of waits that have none of their own: a thread that lets a stream go after a while."""

import threading
import time

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import LayerCounters, Step

PERIOD_S = 0.01


class WaitWatch:
    """Fails a step whose counter is late, and abandons the counters if that does not help.

    A stream held by the driver waits for ever. After `timeout_s` the step fails, which raises its
    counters in the order of the producer's stream; if that stream does not move either, they are
    raised past it after the same time again. The thread starts with the first wait. Safe from any
    thread.
    """

    def __init__(self, counters: LayerCounters, timeout_s: float) -> None:
        self._counters = counters
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waits: list[tuple[float, Step, int]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, step: Step, layer: int) -> None:
        """Bound a wait that begins now.

        Raises:
            ArgumentError: this was closed.
        """
        with self._changed:
            if self._closed:
                raise ArgumentError(f"{name_of(step, layer)} is waited for after close")
            self._waits.append((time.monotonic(), step, layer))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvferry-wait-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def drop(self, step: Step, layer: int) -> None:
        """Forget waits for a layer, which did not begin after all."""
        with self._changed:
            self._waits = [wait for wait in self._waits if wait[1:] != (step, layer)]

    def close(self) -> None:
        """Let through whoever still waits, and end the thread."""
        with self._changed:
            self._closed = True
            waits, self._waits = self._waits, []
            self._changed.notify()
        for _, step, layer in waits:
            if not self._counters.reached(step, layer):
                self._counters.fail(step, f"{name_of(step, layer)}: the wait was closed")
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waits and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._waits = [
                    wait for wait in self._waits if not self._counters.reached(wait[1], wait[2])
                ]
                oldest = self._waits[0] if self._waits else None
            if oldest is not None:
                self._bound(*oldest)
            time.sleep(PERIOD_S)

    def _bound(self, since: float, step: Step, layer: int) -> None:
        waited_s = time.monotonic() - since
        if waited_s < self._timeout_s:
            return
        found = describe_late(self._counters, step, layer, waited_s)
        if waited_s < 2 * self._timeout_s:
            self._counters.fail(step, found)
        else:
            self._counters.abandon(f"{found}; the producer's stream does not move")


def name_of(step: Step, layer: int) -> str:
    """Say what was waited for."""
    return f"layer {layer} of step {step.number}"


def describe_late(counters: LayerCounters, step: Step, layer: int, waited_s: float) -> str:
    """Say what was waited for in vain, and how far it had come."""
    return (
        f"{name_of(step, layer)}: its counter is {counters.count_of(layer)}, wanted "
        f"{step.targets[layer]}, after {waited_s:.3g} s"
    )
