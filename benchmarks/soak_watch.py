"""Keeps a soak from hanging unseen: how long each operation runs, and how much memory there is."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from soak_tally import Tally

HANG_S = 90.0
"""Longer than every bound together that one operation may run into."""
STUCK_S = 240.0
"""If not even the watching thread ran for so long, the process is ended from outside Python."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Knows what every caller is doing, and since when.

    Attributes:
        stopping: set when the callers are to end.
        resident: seconds since the start, and the process's resident bytes.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._began = time.monotonic()
        self._running: dict[str, tuple[str, float]] = {}
        self.stopping = threading.Event()
        self.resident: list[tuple[float, int]] = []

    @contextmanager
    def operation(self, form: str) -> Iterator[None]:
        """Watch the body, which the calling thread runs."""
        name = threading.current_thread().name
        self._running[name] = form, time.monotonic()
        try:
            yield
        finally:
            del self._running[name]

    def look(self) -> bool:
        """Note the memory, and say whether an operation hangs; then all stacks are printed."""
        faulthandler.dump_traceback_later(STUCK_S, exit=True, file=sys.stderr)
        now = time.monotonic()
        self.resident.append((now - self._began, resident_bytes()))
        late = {
            name: form
            for name, (form, since) in list(self._running.items())
            if now - since > HANG_S
        }
        if late:
            self._tally.found("hangs", f"longer than {HANG_S:g} s: {late}")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        return bool(late)

    def growth_bytes(self) -> int:
        """Return how much the resident memory grew from a third of the run until its end."""
        if len(self.resident) < 9:
            return 0
        third = len(self.resident) // 3
        early = sorted(size for _, size in self.resident[third : third + max(3, third // 3)])
        late = sorted(size for _, size in self.resident[-max(3, third // 3) :])
        return late[len(late) // 2] - early[len(early) // 2]

    @staticmethod
    def end() -> None:
        """Disarm what would end the process."""
        faulthandler.cancel_dump_traceback_later()


def resident_bytes() -> int:
    """Return the process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """Return the most that the process's resident memory has been."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
