"""The thread is held until the host sees a layer's counter at its target."""

import time

from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.streams import POLL_S
from kvferry.linker.wait_watch import name_of
from kvferry.linker.waited import (
    CAUSE_POLL_S,
    DEFAULT_TIMEOUT_S,
    State,
    Waited,
    checked_s,
    expired,
    least_s,
    since_us,
)  # fmt: skip

LATE_SHARE = 1 / 16
"""How much longer than needed the host may wait for a layer, beside `POLL_S`."""


class HostWait:
    """The thread is held until the host sees the counter at its target. Right everywhere."""

    def __init__(self, counters: LayerCounters, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._counters = counters
        self._timeout_s = checked_s(timeout_s)

    def arm(self, step: Step) -> None:
        """Do nothing: the host knows the targets."""

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the thread until a layer has landed."""
        begin = time.monotonic()
        timeout_s = least_s(self._timeout_s, limit_s)
        while not self._counters.reached(step, layer):
            if step.cause is not None:
                break
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                return expired(self._counters, step, layer, begin)
            # Each look takes the interpreter from the threads that bring the layer.
            poll_s = min(max(POLL_S, waited_s * LATE_SHARE), CAUSE_POLL_S)
            self._counters.pause(step, layer, poll_s)
        # Asked last: a failure raises the counter too, after it has left its cause.
        state: State = "landed" if step.cause is None else "failed"
        return Waited(name_of(step, layer), state, since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed."""
        return step.cause

    def close(self) -> None:
        """Do nothing."""
