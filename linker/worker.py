"""A named thread that carries out transfers in the order they came, and outlives their failures."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvferry.errors import TransferFailed

log = logging.getLogger(__name__)

_IDLE_POLL_S = 1.0
"""An idle thread looks up this often; everything else wakes it at once."""


class Threads(Protocol):
    """Whoever counts threads."""

    def begin(self) -> None:
        """Count one more."""

    def end(self) -> None:
        """Count one less; called by it, at its end."""


class Job(Protocol):
    """What a worker carries out."""

    def fail(self, error: TransferFailed) -> bool:
        """End badly, for its worker; False if it had ended already."""

    def give_up(self, reason: str, cause: str, limit_s: float | None = None) -> bool:
        """End badly, from outside the worker, within a time; False if it had ended already."""


JobT = TypeVar("JobT", bound=Job)


class Worker(Generic[JobT]):
    """One thread and its queue. Safe from any thread.

    Whatever ends the thread fails the job that it was at, and another thread takes its place. A job
    stays at the head of the queue until it has ended, so that none is lost in between.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[JobT], None],
        begin: Callable[[], None],
        threads: Threads | None = None,
    ) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            carry_out: does a job and ends it, also badly.
            begin: called first in the thread.
            threads: told of the thread's begin and end, and of others' that take its place.
        """
        self.name = name
        self._carry_out = carry_out
        self._begin = begin
        self._threads = threads
        self._jobs: deque[JobT] = deque()
        self._is_at_work = False  # on the first of them
        self._closed = False
        self._changed = threading.Condition()
        self._thread = self._started()

    @property
    def num_waiting(self) -> int:
        """Jobs that are not begun yet."""
        return len(self._jobs) - self._is_at_work

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller's thread is this one."""
        return self._thread is threading.current_thread()

    def put(self, job: JobT) -> None:
        """Enqueue a job.

        Raises:
            TransferFailed: the worker is closed.
        """
        with self._changed:
            if self._closed:
                raise TransferFailed(f"{self.name}: the linker is closed", cause="closed")
            self._jobs.append(job)
            if not self._thread.is_alive():  # it died where not even its last words came through
                self._is_at_work = False
                self._thread = self._started()
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more jobs; the thread ends after those that it has. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def leave(self) -> None:
        """As `close`, but by whoever may hold any lock: an idle thread may notice it 1 s later."""
        self._closed = True
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, after `close`; whether it ended in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            thread = self._thread
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
            if thread is self._thread:  # else another has taken its place
                return True

    def fail_all(
        self,
        reason: str,
        *,
        chosen: Callable[[JobT], bool] = lambda _: True,
        limit_s: float | None = None,
    ) -> None:
        """Fail the job that the thread is at, and those that are not begun yet.

        Args:
            reason: for people.
            chosen: which of them; all by default.
            limit_s: how long to wait for what is at their pages; see `Transfer.give_up`.
        """
        with self._changed:
            failed = [job for job in self._jobs if chosen(job)]
            begun = self._jobs[0] if self._is_at_work else None
            for job in failed:
                if job is not begun:
                    self._jobs.remove(job)
        for job in failed:
            job.give_up(reason, "closed", limit_s)

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        if self._threads is not None:
            self._threads.begin()
        try:
            thread.start()
        except BaseException:  # no memory for a thread, say
            if self._threads is not None:
                self._threads.end()
            raise
        return thread

    def _run(self) -> None:
        begun = ended = False
        try:
            self._begin()
            begun = True
            while (job := self._next()) is not None:
                self._carry_out(job)
                self._done()
                del job  # a thread that waits keeps nobody's tensors alive
            ended = True
        # Not even an exit that somebody throws into this thread may leave a transfer without end.
        except BaseException as error:
            log.exception("thread %s ended, wanted it to go on", self.name)
            if self._is_at_work:
                job = self._jobs[0]
                self._done()
                job.fail(TransferFailed(f"{self.name} ended: {error!r}", cause="thread"))
            if not begun:
                self.fail_all(f"{self.name} could not begin: {error!r}")
        finally:
            try:
                if begun and not ended:
                    with self._changed:
                        self._thread = self._started()
            finally:
                if self._threads is not None:
                    self._threads.end()

    def _next(self) -> JobT | None:
        """Wait for a job and begin it; None once there will be none any more."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait(_IDLE_POLL_S)
            self._is_at_work = True
            return self._jobs[0]

    def _done(self) -> None:
        with self._changed:
            self._is_at_work = False
            self._jobs.popleft()
