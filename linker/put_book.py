"""The keys that one Mooncake client has open for writing, and how they are let go for sure."""

import logging
import threading
from collections.abc import Iterable

from kvferry.errors import StoreClosed, StoreError, StoreUnavailable
from kvferry.linker import codes
from kvferry.linker.calls import Calls
from kvferry.linker.store import ObjectResult, Outcome

_log = logging.getLogger(__name__)


class PutBook:
    """The keys that one client has open for writing; Mooncake keeps them in one map per client.

    A key stays in the book until Mooncake has let go of it, so that nobody revokes another's
    session: a revocation that failed is kept, and repeated when the next session starts.
    """

    def __init__(
        self, calls: Calls, *, max_age_s: float, max_call_bytes: int, max_call_objects: int
    ) -> None:
        self.calls = calls
        self.max_age_s = max_age_s
        self.max_call_bytes = max_call_bytes
        self.max_call_objects = max_call_objects
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._abandoned: set[str] = set()  # a part of _open

    @property
    def num_open(self) -> int:
        """Keys that are open, those included that wait to be revoked."""
        with self._lock:
            return len(self._open)

    def start(self, size_of: dict[str, int]) -> dict[str, ObjectResult]:
        """Open keys for writing; STORED are the caller's until `end` or `revoke`."""
        self._sweep()
        with self._lock:
            mine = [key for key in size_of if key not in self._open]
            self._open.update(mine)
        try:
            results = self._start_mine(mine, size_of)
        except StoreError:
            self.abandon(mine)  # some may have been opened
            raise
        self.release(key for key in mine if results[key].outcome is not Outcome.STORED)
        busy = ObjectResult(Outcome.PENDING)
        return {key: results.get(key, busy) for key in size_of}

    def revoke(self, keys: list[str]) -> None:
        """Drop open keys; in an outage or while closing, leave that for later."""
        try:
            for part in self._parts(keys):
                self.calls.put_revoke(part)
                self.release(part)
        except (StoreUnavailable, StoreClosed) as error:
            _log.warning("could not revoke %d objects yet: %s", len(keys), error)
            self.abandon(keys)

    def end(self, keys: list[str]) -> dict[str, int]:
        """Make open keys readable; those that Mooncake ended leave the book."""
        answers: dict[str, int] = {}
        for part in self._parts(keys):
            answers.update(zip(part, self.calls.put_end(part), strict=True))
        self.release(key for key, code in answers.items() if code == 0)
        return answers

    def release(self, keys: Iterable[str]) -> None:
        """Take keys out of the book: Mooncake does not have them open any more."""
        with self._lock:
            gone = set(keys)
            self._open -= gone
            self._abandoned -= gone

    def abandon(self, keys: Iterable[str]) -> None:
        """Mark keys still in the book for a revocation later."""
        with self._lock:
            self._abandoned.update(self._open.intersection(keys))

    def drain(self) -> list[str]:
        """Return all keys that are open, and forget them: the client is about to close."""
        with self._lock:
            keys = sorted(self._open)
            self._open.clear()
            self._abandoned.clear()
        return keys

    def _sweep(self) -> None:
        with self._lock:
            keys = sorted(self._abandoned)
            self._abandoned.clear()
        if keys:
            self.revoke(keys)

    def _start_mine(self, keys: list[str], size_of: dict[str, int]) -> dict[str, ObjectResult]:
        answers = self._start_codes(keys, size_of)
        # This client still has the key open in Mooncake, from a session that nobody has any more.
        stale = [key for key, code in answers.items() if code == codes.INVALID_PARAMS]
        if stale:
            self.calls.put_revoke(stale)
            answers.update(self._start_codes(stale, size_of))
        taken = [key for key, code in answers.items() if code == codes.OBJECT_ALREADY_EXISTS]
        readable = dict(zip(taken, self.calls.exists(taken), strict=True))
        results = {}
        for key, code in answers.items():
            if code == codes.OBJECT_ALREADY_EXISTS:
                outcome = Outcome.EXISTS if readable[key] else Outcome.PENDING
                results[key] = ObjectResult(outcome, codes.code_name(code))
            else:
                results[key] = ObjectResult(Outcome.STORED) if code == 0 else codes.failure(code)
        return results

    def _start_codes(self, keys: list[str], size_of: dict[str, int]) -> dict[str, int]:
        answers: dict[str, int] = {}
        for part in self._parts(keys):
            started = self.calls.put_start(part, [size_of[key] for key in part])
            answers.update(zip(part, started, strict=True))
        return answers

    def _parts(self, keys: list[str]) -> Iterable[list[str]]:
        step = self.max_call_objects
        return (keys[first : first + step] for first in range(0, len(keys), step))
