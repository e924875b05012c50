"""Transfers that the scheduler's thread queues and a thread of their own begins.

Before a transfer can be begun its page ids must have reached the host, for which the scheduler's
thread must not wait.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from kvferry.errors import KVFerryError, TransferFailed
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.worker import Worker

log = logging.getLogger(__name__)


class Handle(Protocol):
    """A transfer in flight."""

    def give_up(self, reason: str, cause: str) -> bool:
        """End it badly; once this returns, it touches no pages."""


HandleT = TypeVar("HandleT", bound=Handle)


class Job(Generic[HandleT]):
    """A transfer from when it is queued. Safe from any thread.

    Attributes:
        behind: points in streams that it touches its pages after.
        handle: of the transfer; None before it was begun, or if there was nothing to do.
        error: why it was given up or could not be begun.
    """

    def __init__(self, behind: Sequence[Fence]) -> None:
        self.behind = behind
        self.handle: HandleT | None = None
        self.error: TransferFailed | None = None
        self._begun = threading.Event()
        self._beginning = threading.Lock()

    def begin(self, begin: Callable[[], HandleT | None]) -> None:
        """Begin the transfer, unless it was given up."""
        with self._beginning:
            if self.error is None:
                self.handle = begin()
        self._begun.set()

    def wait_begun(self, timeout_s: float) -> None:
        """Wait until it was begun or given up; after `timeout_s` it is given up."""
        if not self._begun.wait(timeout_s):
            self.give_up(f"transfer not begun within {timeout_s:g} s", "deadline")

    @property
    def is_begun(self) -> bool:
        """Whether it was begun or given up."""
        return self._begun.is_set()

    def fail(self, error: TransferFailed) -> bool:
        """End it badly; False if it had ended already."""
        return self.give_up(str(error), error.cause)

    def give_up(self, reason: str, cause: str, limit_s: float | None = None) -> bool:
        """End it badly; once this returns, it touches no pages. False if it had ended already.

        A `limit_s` is for those that hold threads; a handle has its own.
        """
        if self.error is None:
            self.error = TransferFailed(reason, cause=cause)
        with self._beginning:
            self._begun.set()
        return self.handle is None or self.handle.give_up(reason, cause)


JobT = TypeVar("JobT", bound=Job)  # type: ignore[type-arg]


class Opener(Generic[JobT]):
    """The thread that begins jobs, in order, on a stream of its own."""

    def __init__(self, name: str, device: torch.device, begin: Callable[[JobT], None]) -> None:
        """Start the thread; `begin` begins a job, on the thread's stream."""
        self._lane = Lane(device)
        self._begin = begin
        self._worker: Worker[JobT] = Worker(name, self._carry_out, self._lane.adopt_device)

    def put(self, job: JobT) -> None:
        """Queue a job; it fails if the thread was closed."""
        try:
            self._worker.put(job)
        except TransferFailed as error:
            job.fail(error)

    def close(self, timeout_s: float) -> None:
        """End the thread, once the jobs that it has are begun."""
        self._worker.close()
        if not self._worker.join(timeout_s):
            log.error("%s still at work %g s after close", self._worker.name, timeout_s)

    def leave(self) -> None:
        """End the thread likewise, for whoever was dropped; does not wait."""
        self._worker.leave()

    def _carry_out(self, job: JobT) -> None:
        try:
            with self._after(job.behind):
                self._begin(job)
        except TransferFailed as error:
            job.fail(error)
        except KVFerryError as error:
            job.fail(TransferFailed(f"transfer not begun: {error}"))

    @contextlib.contextmanager
    def _after(self, fences: Sequence[Fence]) -> Iterator[None]:
        """Make the thread's stream current, held behind the fences."""
        stream = self._lane.stream
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            for fence in fences:
                fence.after_this(stream)
            yield
