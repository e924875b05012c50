"""How many ranges a session call may take: an owner that hangs must not hold it for long."""

import threading
from collections.abc import Sequence

from kvferry.linker import codes
from kvferry.linker.store import FETCHED, ObjectResult, Outcome, all_are

RANGES_PER_CALL = 8
"""Calls of 64 ranges move no more bytes a second over TCP, within 20 %."""

SLOW_S = 1.0
"""A call that failed and took longer has waited for an owner that does not answer."""

DRAIN_S = 60.0
"""How long the bytes of such a call may still land: Mooncake gives a transfer 30 to 60 s."""

UNTRIED = ObjectResult(Outcome.FAILED, codes.code_name(codes.TRANSFER_FAIL))
"""A range that was given up because the calls before it were lost."""


class Patience:
    """What the last session calls of a client say about the next. Safe from any thread.

    Mooncake carries out the ranges of a session call one after another, and each of them waits on
    its own for an owner that hangs: 5 s (`MC_TCP_STATUS_TIMEOUT_SEC`), or 1 s if it is gone. So
    calls are short, and from one that failed slowly on they are of a single range, until one is
    well again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._suspects = False

    @property
    def ranges_per_call(self) -> int:
        """How many ranges the next call may take."""
        return 1 if self._suspects else RANGES_PER_CALL

    def is_lost(self, results: Sequence[ObjectResult], taken_s: float) -> bool:
        """Note how a call went; whether it makes no sense to try the ranges after it now.

        Args:
            results: of its ranges.
            taken_s: how long it took.
        """
        failed = not all_are(results, FETCHED) and UNTRIED in results
        if not failed and not self._suspects:  # nearly always: without the lock
            return False
        lost = failed and taken_s > SLOW_S
        with self._lock:
            self._suspects = lost or (self._suspects and failed)
        return lost
