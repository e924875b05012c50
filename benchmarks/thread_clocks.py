"""Processor time of this process's Python threads, thread by thread."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Spent:
    """What the threads but the calling one have spent within a `clocked` body.

    Attributes:
        ms: processor time in milliseconds, by thread: its ident, and its name.
    """

    ms: dict[tuple[int, str], float] = field(default_factory=dict)

    def less(self, seconds: Mapping[int, float]) -> float:
        """Return the milliseconds of all threads together, less `seconds` by thread ident."""
        return sum(ms - seconds.get(ident, 0.0) * 1e3 for (ident, _), ms in self.ms.items())


@contextmanager
def clocked() -> Iterator[Spent]:
    """Measure a body by the threads' own clocks: waiting counts nothing, nor do other processes.

    Threads that end within the body are not counted; ones that begin there are.
    """
    before = _seconds()
    spent = Spent()
    yield spent
    for thread, seconds in _seconds().items():
        taken = seconds - before.get(thread, 0.0)
        if taken > 0:
            spent.ms[thread] = taken * 1e3


def _seconds() -> dict[tuple[int, str], float]:
    caller = threading.current_thread()
    return {
        (thread.ident, thread.name): time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread is not caller
    }
