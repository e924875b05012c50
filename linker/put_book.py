"""The keys that one Mooncake client has open for writing, and how they are let go for sure."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvferry.errors import StoreClosed, StoreUnavailable
from kvferry.linker import codes
from kvferry.linker.calls import Calls
from kvferry.linker.store import STORED, ObjectResult, Outcome

_log = logging.getLogger(__name__)

WITNESS_PREFIX = "kvferry/witness/"
"""How keys begin that sessions open to tell whether the master is still that of their start."""


class PutBook:
    """The keys that one client has open for writing; Mooncake keeps them in one map per client.

    A key stays in the book until Mooncake has let go of it, so that nobody revokes another's
    session: a revocation that failed, or that must not be made yet, is kept, and made when a later
    session starts.

    Attributes:
        calls: of the client.
        ask: asks the master for objects without a lease that anyone minds; a code for each key.
        max_age_s: how long a session may be written and ended.
        max_call_bytes, max_call_objects: of one call.
    """

    def __init__(
        self,
        calls: Calls,
        ask: Callable[[Sequence[str]], list[int]],
        *,
        max_age_s: float,
        max_call_bytes: int,
        max_call_objects: int,
    ) -> None:
        self.calls = calls
        self.ask = ask
        self.max_age_s = max_age_s
        self.max_call_bytes = max_call_bytes
        self.max_call_objects = max_call_objects
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._abandoned: dict[str, float] = {}  # a part of _open: from when on they are revoked

    @property
    def num_open(self) -> int:
        """Keys that are open, without witnesses; those included that wait to be revoked."""
        with self._lock:
            return sum(not key.startswith(WITNESS_PREFIX) for key in self._open)

    def start(self, size_of: dict[str, int]) -> dict[str, ObjectResult]:
        """Open keys for writing; STORED are the caller's until `end` or `revoke`."""
        self._sweep()
        with self._lock:
            mine = [key for key in size_of if key not in self._open]
            self._open.update(mine)
        try:
            results = self._start_mine(mine, size_of)
        except BaseException:  # an exit thrown into this thread, too
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
        except BaseException:
            self.abandon(keys)
            raise

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
            for key in gone.intersection(self._abandoned):
                del self._abandoned[key]

    def abandon(self, keys: Iterable[str], *, after_s: float = 0.0) -> None:
        """Mark keys still in the book for a revocation later.

        Args:
            keys: of objects that nobody writes any more.
            after_s: not before this has passed: a revocation lets the master give their memory to
                others, which bytes that are still on their way would then reach.
        """
        until_s = time.monotonic() + after_s
        with self._lock:
            self._abandoned.update(dict.fromkeys(self._open.intersection(keys), until_s))

    def drain(self) -> list[str]:
        """Return the keys that are to be revoked, and forget all: the client is about to close.

        Those whose bytes may still be on their way are left to the master, which discards them.
        """
        now_s = time.monotonic()
        with self._lock:
            late = {key for key, until_s in self._abandoned.items() if until_s > now_s}
            keys = sorted(self._open - late)
            self._open.clear()
            self._abandoned.clear()
        return keys

    def _sweep(self) -> None:
        if not self._abandoned or self.calls.breaker.is_open:  # nearly always; else in vain
            return
        now_s = time.monotonic()
        with self._lock:
            keys = sorted(key for key, until_s in self._abandoned.items() if until_s <= now_s)
            for key in keys:
                del self._abandoned[key]
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
                results[key] = STORED if code == 0 else codes.failure(code)
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
