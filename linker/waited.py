"""What came of one wait for a layer, and the bounds that all kinds of waits keep."""

import time
from dataclasses import dataclass
from typing import Literal

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.wait_watch import describe_late

DEFAULT_TIMEOUT_S = 10.0
CAUSE_POLL_S = 1e-3
"""How often a thread that waits for an event looks whether the step has failed."""

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


def checked_s(timeout_s: float) -> float:
    """Return a bound, or refuse one that is none."""
    if not 0 < timeout_s < float("inf"):
        raise ArgumentError(f"timeout_s is {timeout_s}, wanted more than 0 and not for ever")
    return timeout_s


def least_s(timeout_s: float, limit_s: float | None) -> float:
    """Return the shorter of a wait's own bound and its caller's."""
    return timeout_s if limit_s is None else min(timeout_s, max(0.0, limit_s))


def expired(counters: LayerCounters, step: Step, layer: int, begin: float) -> Waited:
    """Fail a step whose layer is late, so that nobody else waits as long."""
    found = describe_late(counters, step, layer, time.monotonic() - begin)
    counters.fail(step, found)
    return Waited(found, "expired", since_us(begin))


def since_us(begin: float) -> float:
    """Return the microseconds that have passed."""
    return (time.monotonic() - begin) * 1e6
