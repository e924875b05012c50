"""Who may call the store now: a gate against calls after close, a breaker against an outage."""

import logging
import threading
import time
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
    thread named `kvferry-probe` asks `probe` at growing intervals until it gets an answer.
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
        self._stop = threading.Event()
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
            if self._reason is not None or self._stop.is_set():
                return
            self._since_s = time.monotonic()
            self._num_outages += 1
            self._reason = reason
            # A thread that saw the store answer may still be on its way out; it will do nothing.
            self._thread = threading.Thread(target=self._run, name="kvferry-probe", daemon=True)
            self._thread.start()
        _log.warning("%s; calls fail at once until it answers", reason)

    def close(self, timeout_s: float) -> bool:
        """End the probe's thread; True if it has ended within `timeout_s`.

        What `check` says stays as it is. Repeating it waits again.
        """
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._stop.wait(pause_s):
            try:
                answered = self._probe()
            except StoreError:
                answered = False
            if answered:
                with self._lock:
                    self._reason = None
                _log.info("the store answers again after %.1f s", time.monotonic() - self._since_s)
                return
            pause_s = min(2 * pause_s, self._longest_pause_s)
