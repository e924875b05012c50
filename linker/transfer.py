"""One save or load in flight: its handle, its deadline, its result."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from kvferry.arguments import seconds, seconds_or_none
from kvferry.errors import TransferFailed
from kvferry.linker.home import Home
from kvferry.linker.plan import SpacePlan
from kvferry.linker.streams import Fence

TOUCH_LIMIT_S = 60.0
"""How long an expiring transfer waits for a running pack or unpack to end."""


@dataclass
class Timings:
    """Where a transfer's time went, in microseconds.

    Attributes:
        plan_us: checking and planning, in the caller's thread.
        queue_us: from there until the worker began.
        staging_us: waiting for a span.
        pack_us, unpack_us: the kernels' own time (a CPU: the torch reference's).
        wire_us: in the store's calls, with their checks; of all threads, where several make them.
        seal_us: writing trailers (a save), or verifying checksums and trailers (a load).
        lookup_us: asking which objects exist already (a save).
        model_us: waiting for the model to write its layers (a layer-wise save).
        total_us: from the call until the result.
    """

    plan_us: float = 0.0
    queue_us: float = 0.0
    staging_us: float = 0.0
    pack_us: float = 0.0
    unpack_us: float = 0.0
    wire_us: float = 0.0
    seal_us: float = 0.0
    lookup_us: float = 0.0
    model_us: float = 0.0
    total_us: float = 0.0

    def take(self, other: "Timings") -> None:
        """Add what another has: that of a batch that the transfer was part of."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class TransferResult:
    """What a transfer did.

    Attributes:
        num_objects: page objects that moved.
        num_bytes: their bytes.
        num_existing: objects that a save found in the store and did not write again.
        num_direct: objects that went straight from the pools; see `direct`.
        failures: object key to reason, for objects that a save could not store. Empty for a load:
            one that misses an object fails as a whole.
        timings: where the time went.
    """

    num_objects: int
    num_bytes: int
    num_existing: int
    failures: dict[str, str]
    timings: Timings
    num_direct: int = 0


@dataclass
class Progress:
    """A transfer's growing result; only its worker writes it."""

    num_objects: int = 0
    num_bytes: int = 0
    num_existing: int = 0
    num_direct: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def result(self, timings: Timings) -> TransferResult:
        """Return what stands now."""
        return TransferResult(
            self.num_objects,
            self.num_bytes,
            self.num_existing,
            dict(self.failures),
            timings,
            self.num_direct,
        )


def without_frames(error: BaseException) -> None:
    """Take the tracebacks off an error and off those that it came from.

    The handle of a transfer keeps its error, and the frames that a traceback keeps hold the handle
    and tensors: a ring, which lives on where garbage collection is frozen, as SGLang does.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


class Ended(Exception):
    """The transfer is over (cancelled or expired): its worker must not touch pages any more.

    Not an error: the worker's way out.
    """


class Transfer:
    """Handle of a save or load. Made by `Linker`; safe from any thread.

    Whoever waits enforces the deadline: past it, `done` and `result` fail the transfer, and its
    pages are not touched again.

    Attributes:
        kind: `save` or `load`.
        plans: what it moves.
        caller: the point in the caller's stream that pages may be touched after.
        tail: how many tokens of the last key's page a load wants, and what becomes of the others
            (`zero` or `keep`); None if it wants the whole page.
        deadline: `time.monotonic()` after which it has failed.
        on_end: who is told how it ended, once, in the thread that ended it.
    """

    deadline: float

    def __init__(
        self,
        kind: str,
        plans: tuple[SpacePlan, ...],
        caller: Fence,
        timeout_s: float,
        plan_us: float,
        tail: tuple[int, str] | None = None,
    ) -> None:
        self.kind = kind
        self.plans = plans
        self.caller = caller
        self.tail = tail
        self.timeout_s = timeout_s
        self.timings = Timings(plan_us=plan_us)
        self.on_end: list[Callable[[Transfer, TransferResult | TransferFailed], None]] = []
        self.restart_clock()
        self.progress = Progress()
        self._home = Home("the transfer")
        self._changed = threading.Condition()
        self._touching = threading.Lock()
        self._is_given_up = False  # who gives up waits for `_touching`, its worker must not go on
        self._last_touch = Fence()
        self._result: TransferResult | None = None
        self._error: TransferFailed | None = None
        self._packed = False

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._result else "in flight"
        pages = {plan.space: len(plan.keys) for plan in self.plans}
        return f"<Transfer {self.kind} of {pages} pages, {state}>"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())

    def done(self) -> bool:
        """Whether there is a result or a failure. Never waits, unless the deadline just passed."""
        self._home.check()
        if not self.is_over and self.left_s == 0:
            self.give_up(f"{self.kind} not done within {self.timeout_s:g} s", "deadline")
        return self.is_over

    def result(self, timeout_s: float | None = None) -> TransferResult:
        """Wait for the end and return what was done.

        After a load's result, its pages hold the loaded bytes for work on any stream. After a
        failed load the pages that it was given are undefined, and must not be used.

        Args:
            timeout_s: how long to wait; until the transfer's own deadline by default.

        Raises:
            TransferFailed: the load missed an object, or the transfer was cancelled, ran past its
                deadline, or could not work at all. `causes` says which object and why.
            TimeoutError: `timeout_s` passed and the transfer is still in flight.
        """
        timeout_s = seconds_or_none("timeout_s", timeout_s)
        if not self._wait(lambda: self.is_over, timeout_s):
            raise TimeoutError(f"{self.kind} still in flight after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, good or bad; whether it came within `timeout_s`."""
        return self._wait(lambda: self.is_over, seconds("timeout_s", timeout_s))

    def wait_packed(self, timeout_s: float | None = None) -> bool:
        """Wait until a save has read its pages for good, so that they may be written again.

        Returns:
            Whether it has, within `timeout_s` (the deadline by default). True also once the
            transfer has ended, in whatever way: an ended transfer touches no pages.
        """
        timeout_s = seconds_or_none("timeout_s", timeout_s)
        return self._wait(lambda: self._packed or self.is_over, timeout_s)

    def cancel(self) -> bool:
        """Give the transfer up. Once this returns, its pages are not touched any more.

        Objects that were stored stay stored.

        Returns:
            False if it had ended already.
        """
        return self.give_up(f"{self.kind} was cancelled", "cancelled")

    def _wait(self, is_true: Callable[[], bool], timeout_s: float | None) -> bool:
        self._home.check()
        wait_s = self.left_s if timeout_s is None else min(timeout_s, self.left_s)
        with self._changed:
            self._changed.wait_for(is_true, wait_s)
        return is_true() or self.done()

    # What follows is for the worker.

    @property
    def age_us(self) -> float:
        """Time since it was enqueued, in microseconds."""
        return (time.monotonic() - self._began) * 1e6

    @property
    def is_over(self) -> bool:
        """Whether it has a result or a failure by now; unlike `done`, it does not see to that."""
        return self._result is not None or self._error is not None

    @property
    def is_wanted(self) -> bool:
        """Whether it may come to a good end; not from when it is being given up, before its end."""
        return not (self._is_given_up or self.is_over)

    @contextmanager
    def touching_pages(self) -> Iterator[list[Fence]]:
        """Guard a body that launches work on the pages, and puts the fence after it in the list.

        Raises:
            Ended: the transfer is over.
        """
        with self._touching:
            if not self.is_wanted:
                raise Ended
            fences: list[Fence] = []
            yield fences
            if fences:
                self._last_touch = fences[-1]

    def restart_clock(self) -> None:
        """Begin the time that the transfer has, for one that is prepared before it starts."""
        self._began = time.monotonic()
        self.deadline = self._began + self.timeout_s

    def check_going(self) -> None:
        """Fail the transfer if its deadline has passed.

        Raises:
            Ended: the transfer is over.
        """
        if self.done():
            raise Ended

    def mark_packed(self) -> None:
        """Say that the pages have been read."""
        with self._changed:
            self._packed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """End well, with the progress made; not if it was given up: pages may lack bytes then."""
        with self._changed:
            if not self.is_wanted:
                return
            self.timings.total_us = self.age_us
            self._result = self.progress.result(self.timings)
            self._changed.notify_all()
        for told in self.on_end:
            told(self, self._result)

    def fail(self, error: TransferFailed) -> bool:
        """End badly; False if it had ended already."""
        with self._changed:
            if self.is_over:
                return False
            self.timings.total_us = self.age_us
            self._error = error
            self._changed.notify_all()
        for told in self.on_end:
            told(self, error)
        return True

    def give_up(self, reason: str, cause: str, limit_s: float | None = None) -> bool:
        """Fail it from outside its worker; False if it had ended already.

        Whatever the worker has launched on the pages ends first; it launches nothing after.

        Args:
            reason: for people.
            cause: a word of `kvferry.causes.CAUSES`.
            limit_s: how long to wait for what was launched; `TOUCH_LIMIT_S` by default.
        """
        self._home.check()
        self._is_given_up = True
        limit_s = TOUCH_LIMIT_S if limit_s is None else limit_s
        is_through = self._touching.acquire(timeout=limit_s)
        if is_through:
            try:
                is_through = self._last_touch.wait(limit_s)
            finally:
                self._touching.release()
        if not is_through:
            reason = f"{reason}, and its pages are still being touched"
        return self.fail(TransferFailed(reason, cause=cause))
