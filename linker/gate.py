"""Who may call the store now: a gate against calls after close, a breaker against an outage."""

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

from kvferry.errors import StoreClosed, StoreError, StoreUnavailable
from kvferry.linker.home import Home

_log = logging.getLogger(__name__)


class Gate:
    """Counts the calls in flight, refuses new ones once closed, lets `close` wait for the rest.

    A context manager: each call runs inside `with gate:`. A thread may enter it more than once.
    In a forked child nobody gets in.

    Attributes:
        home: the process; checked by each call that takes another lock before this one.
    """

    def __init__(self, refusal: Callable[[], StoreError] | None = None) -> None:
        """Make an open gate; `refusal` makes the error of a refused call (else `StoreClosed`)."""
        self._refusal = refusal or (lambda: StoreClosed("the store is closed"))
        self.home = Home("the store")
        # A plain lock: each store call takes two, and a condition's own costs as much again.
        self._lock = threading.Lock()
        self._emptied = threading.Condition(self._lock)
        self._num_inside = 0
        self._closed = False

    def __enter__(self) -> "Gate":
        self.home.check()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise self._refusal()
            self._num_inside += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._closed and self._num_inside == 0:
                self._emptied.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close_if_empty(self) -> bool:
        """Refuse new calls from now on, unless some are in flight; whether it did. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._closed = self._closed or self._num_inside == 0
            return self._closed and self._num_inside == 0
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> int:
        """Refuse new calls from now on, then wait for those in flight.

        Returns:
            How many calls are still in flight after `timeout_s`; 0 means that none is and none
            will be. May be called again, to wait longer.
        """
        self.home.check()
        with self._emptied:
            self._closed = True
            self._emptied.wait_for(lambda: self._num_inside == 0, timeout=timeout_s)
            return self._num_inside


class Breaker:
    """Turns calls away while the store cannot be reached, and finds out when it can be again.

    A call that met the outage reports it with `open`. From then on `check` raises at once, and a
    thread named `kvferry-probe` asks `probe` at growing intervals until it gets an answer. The
    thread does not keep the breaker alive: once nobody else does, it ends.
    """

    def __init__(
        self,
        probe: Callable[[], bool],
        *,
        first_pause_s: float = 0.5,
        longest_pause_s: float = 5.0,
    ) -> None:
        """Make a closed (letting through) breaker.

        Args:
            probe: returns True once the store answers; runs on the probe's thread, must itself
                end in bounded time, and may raise `StoreError` for «no».
            first_pause_s: wait before the first probe; doubled after each that fails.
            longest_pause_s: bound of that wait.
        """
        self._probe = probe
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._lock = threading.Lock()
        self._closed = False
        # No event: a finalizer that runs under its lock, in the thread that waits, would hang.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        weakref.finalize(self, self._wake.put, None).atexit = False
        self._thread: threading.Thread | None = None
        self._reason: str | None = None
        self._since_s = 0.0
        self._num_outages = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are turned away now."""
        return self._reason is not None

    @property
    def num_outages(self) -> int:
        """How often the breaker has opened; what was started under another number is void."""
        return self._num_outages

    def check(self) -> None:
        """Raise `StoreUnavailable` while the breaker is open."""
        reason = self._reason
        if reason is not None:
            age_s = time.monotonic() - self._since_s
            raise StoreUnavailable(f"{reason} ({age_s:.1f} s ago); probing until it answers")

    def open(self, reason: str) -> None:
        """Turn calls away from now on; while open already, do nothing."""
        with self._lock:
            if self._reason is not None or self._closed:
                return
            self._since_s = time.monotonic()
            self._num_outages += 1
            self._reason = reason
            # A thread that saw the store answer may still be on its way out; it will do nothing.
            self._thread = threading.Thread(
                target=_probe_for,
                args=(weakref.ref(self), self._wake, self._first_pause_s, self._longest_pause_s),
                name="kvferry-probe",
                daemon=True,
            )
            self._thread.start()
        _log.warning("%s; calls fail at once until it answers", reason)

    def close(self, timeout_s: float) -> bool:
        """End the probe's thread; True if it has ended within `timeout_s`.

        What `check` says stays as it is. Repeating it waits again.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.put(None)
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _is_still_open(self) -> bool:
        """Ask once, and let calls through if there was an answer."""
        try:
            answered = self._probe()
        except StoreError:
            answered = False
        if answered:
            with self._lock:
                self._reason = None
            _log.info("the store answers again after %.1f s", time.monotonic() - self._since_s)
        return not answered


def _probe_for(
    breaker: "weakref.ref[Breaker]",
    wake: "queue.SimpleQueue[None]",
    pause_s: float,
    longest_s: float,
) -> None:
    """Ask for a breaker until there is an answer, or until it is closed or gone."""
    while True:
        with contextlib.suppress(queue.Empty):
            wake.get(timeout=pause_s)
            return
        asking = breaker()
        if asking is None or not asking._is_still_open():
            return
        del asking
        pause_s = min(2 * pause_s, longest_s)
