"""A time in which no caller asks the store for anything, so that a fault in it goes unnoticed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTLE_S = 10.0
"""How long callers may take to come to rest: longer than most operations. Else it is put off."""
LONGEST_S = 30.0
"""No caller is held longer, whatever becomes of the fault."""
SENT_S = 0.3
"""After this, what a held save had to send is sent, and no store call of it is in flight."""


class Quiet:
    """Brings all callers to rest, those with a save in hand too. Safe from any thread."""

    def __init__(self, num_callers: int) -> None:
        self._num_callers = num_callers
        self._changed = threading.Condition()
        self._wanted = False
        self._num_held = 0

    @property
    def wanted(self) -> bool:
        """Whether callers are to come to rest."""
        return self._wanted

    def hold(self) -> None:
        """Rest until the quiet is over; for a caller, between two calls of a linker."""
        time.sleep(SENT_S)
        with self._changed:
            self._num_held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._wanted, LONGEST_S)
            self._num_held -= 1

    @contextmanager
    def begin(self) -> Iterator[bool]:
        """Bring the callers to rest for the body; hand it whether all are."""
        with self._changed:
            self._wanted = True
            at_rest = self._changed.wait_for(lambda: self._num_held == self._num_callers, SETTLE_S)
        try:
            yield at_rest
        finally:
            with self._changed:
                self._wanted = False
                self._changed.notify_all()
