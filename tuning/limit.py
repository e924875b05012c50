"""Ends a long piece of work when its time is up, wherever it is."""

import signal
import time
from types import FrameType, TracebackType


class OutOfTimeError(BaseException):
    """Raised in the main thread, inside a `Limit`, when its time is up.

    No `Exception`: Triton's compiler and interpreter turn each of those into an error of their own,
    which would be taken for a fault of the kernel.
    """


class Limit:
    """A `with` statement whose body is left when time is up, as if it had ended.

    For the main thread. Python raises between two of its own steps: a call into a library is
    finished first.

    Attributes:
        is_up: whether the body was left, or has to be.
    """

    def __init__(self, seconds: float | None) -> None:
        """Set the limit; it runs from here on. None is no limit."""
        self._end_s = None if seconds is None else time.monotonic() + seconds
        self._was_raised = self._is_inside = False

    @property
    def is_up(self) -> bool:
        """Whether time is up."""
        return self._was_raised or (self._end_s is not None and time.monotonic() >= self._end_s)

    def __enter__(self) -> "Limit":
        self._is_inside = True
        if self._end_s is not None:
            self._old = signal.signal(signal.SIGALRM, self._raise)
            # Again each second: what is raised inside a destructor is lost.
            left_s = max(self._end_s - time.monotonic(), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, 1.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._is_inside = False
        if self._end_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._old)
        self._was_raised = self._was_raised or kind is OutOfTimeError
        return kind is OutOfTimeError

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside:
            raise OutOfTimeError("time is up")
