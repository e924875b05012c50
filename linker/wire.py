"""Threads that sit in store calls for one direction, so that kernels are launched meanwhile."""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.errors import TransferFailed
from kvferry.linker.home import Home

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_IDLE_POLL_S = 1.0
"""An idle thread looks up this often; everything else wakes it at once."""


class Wire:
    """A few threads for store calls. Every call has the store's own bound, so they end.

    More than two gain nothing over TCP: one client moves no more bytes with four. Whatever ends a
    thread fails the call that it was at, and another takes its place; no call is left without end.
    """

    def __init__(self, name: str, num_threads: int, begin: Callable[[], None]) -> None:
        """Make the threads with the first call; `begin` is called first in each."""
        self._home = Home(f"the threads {name}")
        self._name = name
        self._begin = begin
        # No condition: an exit thrown into its code, which is Python, would leave it locked.
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # a token for each call
        self._threads: list[threading.Thread | None] = [None] * num_threads
        self._closed = False

    @property
    def num_threads(self) -> int:
        """How many store calls can be under way at once."""
        return len(self._threads)

    def call(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """Have something done by a thread.

        Returns:
            Ends with what `work` returns or raises, or `TransferFailed` if its thread ended.

        Raises:
            TransferFailed: the wire is closed.
        """
        self._home.check()
        call = _Call(work)
        with self._lock:
            if self._closed:
                raise TransferFailed(f"{self._name}: the linker is closed", cause="closed")
            self._waiting.append(call)
            for number, thread in enumerate(self._threads):
                if thread is None or not thread.is_alive():
                    self._start(number)
        self._wake.put(None)
        return call.future

    def close(self) -> None:
        """Take no more calls; the threads end after those that they have. Does not wait."""
        self._home.check()
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._wake.put(None)

    def _start(self, number: int) -> None:
        thread = threading.Thread(
            target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True
        )
        thread.start()
        self._threads[number] = thread

    def _run(self, number: int) -> None:
        taken: list[_Call] = []  # the call at hand, and for a moment its predecessor
        begun = ended = False
        try:
            self._begin()
            begun = True
            self._wake.put(None)  # whom this thread replaces may have died with one in hand
            while self._take(taken):
                taken[-1].carry_out()
                taken.clear()
            ended = True
        # An exit that somebody throws into this thread may come between any two of its steps.
        except BaseException as error:
            log.exception("thread %s-%d ended, wanted it to go on", self._name, number)
            with self._lock:
                if not begun:
                    taken += self._waiting
                    self._waiting.clear()
            for call in taken:
                call.fail(error)
        finally:
            if begun and not ended:
                with self._lock:
                    self._start(number)

    def _take(self, taken: "list[_Call]") -> bool:
        """Move the next call from the queue to the list; False once there will be none any more."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=_IDLE_POLL_S)
            with self._lock:
                if self._waiting:
                    taken.append(self._waiting[0])  # first, so that it is always in one of them
                    self._waiting.popleft()
                    return True
                if self._closed:
                    return False


class _Call:
    """Something to do, and what comes of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def carry_out(self) -> None:
        """Do it, unless it was cancelled or has failed."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except Exception as error:  # noqa: BLE001  the caller's, who gets it from the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End it badly, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(
                TransferFailed(f"the thread of a store call ended: {error!r}", cause="thread")
            )
