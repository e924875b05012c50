"""Put sessions on Mooncake: objects written in ranges that become readable whole or never.

Mooncake's ranged writes ask nobody: they go to the memory that was reserved at the session's start,
whoever has it by now. So this file asks. A session writes only while the master says that its
objects are still reserved, and a witness tells that it is the master of the start: an object of a
name that nobody else has, which is reserved first and never written.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from kvferry.arguments import shown
from kvferry.errors import ArgumentError, StoreError
from kvferry.linker import codes, patience
from kvferry.linker.arguments import check_keys, check_sizes, split
from kvferry.linker.calls import Nested, nested
from kvferry.linker.coverage import Coverage
from kvferry.linker.gate import Gate
from kvferry.linker.put_book import WITNESS_PREFIX, PutBook
from kvferry.linker.store import STORED, ObjectResult, Outcome, all_are

_DRAIN_TIMEOUT_S = 90.0  # longer than Mooncake's own bound on a transfer, 60 s

TRUST_S = 0.05
"""How long the master's word is good. A master takes twice as long to start, then has no memory to
give away before an owner comes back to it."""

_WITNESS_BYTES = 16

_TOO_OLD = ObjectResult(Outcome.FAILED, "SESSION_TOO_OLD")
_LOST = ObjectResult(Outcome.FAILED, "SESSION_LOST")
_INCOMPLETE = ObjectResult(Outcome.FAILED, "INCOMPLETE")
_REVOKED = ObjectResult(Outcome.FAILED, "REVOKED")


class MooncakePutSession:
    """A put session; see `kvferry.linker.store.PutSession`. Methods may run on any thread.

    Own code names besides Mooncake's: `SESSION_TOO_OLD`, `SESSION_LOST` (the master was away since
    the start, or has dropped an object, and may have given the memory to others), `INCOMPLETE`,
    `REVOKED`.
    """

    def __init__(
        self,
        book: PutBook,
        keys: Sequence[str],
        sizes: Sequence[int],
    ) -> None:
        """Open the objects; errors as `Store.put_session`."""
        check_keys(keys, sizes=sizes)
        check_sizes(keys, sizes)
        size_of = dict(zip(keys, sizes, strict=True))
        self._book = book
        self._started_s = time.monotonic()  # before the master's own clock starts
        self._num_outages = book.calls.num_outages
        self._witness = WITNESS_PREFIX + secrets.token_hex(16)
        self._started = self._start(size_of)
        self._asked_s = self._started_s
        self._is_lost = self._has_written = False
        self._late: set[str] = set()  # keys with bytes that may still be on their way
        self._coverage = {
            key: Coverage(size_of[key]) for key, result in self._started.items() if result is STORED
        }
        self._lock = threading.Lock()  # of the coverages
        self._writes = Gate(lambda: StoreError("the put session was finished or aborted"))
        self._ending = threading.Lock()
        self._finals: dict[str, ObjectResult] | None = None

    def _start(self, size_of: dict[str, int]) -> dict[str, ObjectResult]:
        book, witness = self._book, self._witness
        # The witness first, so that it has room where anything has.
        started = book.start({witness: _WITNESS_BYTES, **size_of})
        watched = started.pop(witness)
        opened = [key for key, result in started.items() if result is STORED]
        if watched is not STORED:  # what cannot be watched is not written
            book.revoke(opened)
            started.update(dict.fromkeys(opened, watched))
        elif not opened:
            book.revoke([witness])
        return started

    def start_results(self) -> list[ObjectResult]:
        """Return, per key, what the start said; see `PutSession`."""
        return list(self._started.values())

    def write(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[ObjectResult]:
        """Write one range per key; a range that failed may be written again.

        Raises:
            ArgumentError: a key is not open here, a range is outside its object or overlaps
                another, memory is not registered; nothing was written.
            StoreError: the session has ended.
        """
        check_keys(keys, addresses=addresses, sizes=sizes, offsets=offsets)
        check_sizes(keys, sizes)
        self._book.calls.check_addresses(keys, addresses, sizes)
        with self._writes:
            self._claim(keys, sizes, offsets)
            results: list[ObjectResult] = []
            of_client, gives_up = self._book.calls.patience, False
            places, lengths, starts = nested(addresses, sizes, offsets)
            try:
                for part in self._parts(sizes):
                    reason = patience.UNTRIED if gives_up else self._unfit() or self._lost()
                    if reason is not None:
                        results += [reason] * (part.stop - part.start)
                        continue
                    begin_s = time.monotonic()
                    results += self._write_part(
                        keys[part], places[part], lengths[part], starts[part]
                    )
                    self._has_written |= STORED in results[part]
                    gives_up = of_client.is_lost(results[part], time.monotonic() - begin_s)
            finally:
                self._settle(keys, sizes, offsets, results)
        return results

    def finish(self) -> list[ObjectResult]:
        """End what is whole and in time, revoke the rest; repeating it gives the same results.

        Waits for writes in flight, at most 90 s.
        """
        self._writes.home.check()
        with self._ending:
            if self._finals is None:
                self._wait_for_writes()
                self._finals = {**self._started, **dict.fromkeys(self._coverage, _REVOKED)}
                self._finals.update(self._end_open())
            return list(self._finals.values())

    def abort(self) -> None:
        """Revoke every object that is still open; in an outage that is done later."""
        self._writes.home.check()
        with self._ending:
            if self._finals is None:
                self._wait_for_writes()
                self._finals = {**self._started, **dict.fromkeys(self._coverage, _REVOKED)}
                self._let_go(list(self._coverage))

    def __enter__(self) -> "MooncakePutSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writes.home.is_here:
            self.abort()

    def _unfit(self) -> ObjectResult | None:
        """Why no byte may be written or published any more; None while it may."""
        if self._is_lost or self._book.calls.num_outages != self._num_outages:
            return _LOST
        if time.monotonic() - self._started_s > self._book.max_age_s:
            return _TOO_OLD
        return None

    def _lost(self) -> ObjectResult | None:
        """Ask whether all objects are still reserved, by the master of the start, for this session.

        While an object is written the master calls it «not ready», and never anything else.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s > TRUST_S:
            answers = self._book.ask([self._witness, *self._coverage])
            self._is_lost |= answers.count(codes.REPLICA_IS_NOT_READY) < len(answers)
            self._asked_s = now_s
        return _LOST if self._is_lost else None

    def _parts(self, sizes: Sequence[int]) -> Iterator[slice]:
        """Cut a list of ranges into calls: one alone, as long as none has come to an owner."""
        first = 0
        if not self._has_written:
            yield slice(0, min(1, len(sizes)))
            first = 1
        step = min(self._book.max_call_objects, self._book.calls.patience.ranges_per_call)
        for part in split(sizes[first:], self._book.max_call_bytes, step):
            yield slice(first + part.start, first + part.stop)

    def _write_part(
        self,
        keys: Sequence[str],
        addresses: Nested,
        sizes: Nested,
        offsets: Nested,
    ) -> list[ObjectResult]:
        """Write in one call, and note the keys whose bytes may land later."""
        begin_s = time.monotonic()
        results: list[ObjectResult] = []
        try:
            answers = self._book.calls.put_write(keys, addresses, sizes, offsets)
            results = [
                _write_result(answer, size) for answer, (size,) in zip(answers, sizes, strict=True)
            ]
        finally:
            if not all_are(results, STORED) and time.monotonic() - begin_s > patience.SLOW_S:
                with self._lock:
                    self._late.update(
                        key
                        for index, key in enumerate(keys)
                        if index >= len(results) or results[index] is not STORED
                    )
        return results

    def _claim(self, keys: Sequence[str], sizes: Sequence[int], offsets: Sequence[int]) -> None:
        with self._lock:
            for index, key in enumerate(keys):
                try:
                    if key not in self._coverage:
                        raise ArgumentError("not open in this put session; see start_results()")
                    self._coverage[key].claim(offsets[index], sizes[index])
                except ArgumentError as error:
                    for taken, offset in zip(keys[:index], offsets[:index], strict=True):
                        self._coverage[taken].give_back(offset)
                    raise ArgumentError(f"key {shown(key)}: {error}") from None

    def _settle(
        self,
        keys: Sequence[str],
        sizes: Sequence[int],
        offsets: Sequence[int],
        results: list[ObjectResult],
    ) -> None:
        with self._lock:
            for index, key in enumerate(keys):
                if index < len(results) and results[index].outcome is Outcome.STORED:
                    self._coverage[key].written(sizes[index])
                else:
                    self._coverage[key].give_back(offsets[index])

    def _wait_for_writes(self) -> None:
        # Ending or revoking under a write would let its bytes land in somebody else's object.
        num_writes = self._writes.close(_DRAIN_TIMEOUT_S)
        if num_writes:
            raise StoreError(f"{num_writes} writes of the put session do not come to an end")

    def _end_open(self) -> dict[str, ObjectResult]:
        reason = self._unfit()
        whole = [key for key, coverage in self._coverage.items() if coverage.complete]
        finals = {
            key: reason or _INCOMPLETE
            for key, coverage in self._coverage.items()
            if reason or not coverage.complete
        }
        answers: dict[str, int] = {}
        try:
            if reason is None:
                answers = self._book.end(whole)
        except BaseException:  # an exit thrown into this thread, too
            self._book.abandon([self._witness, *(set(self._coverage) - self._late)])
            self._book.abandon(self._late, after_s=patience.DRAIN_S)
            raise
        finals.update(
            (key, STORED if code == 0 else codes.failure(code)) for key, code in answers.items()
        )
        failed = [key for key, result in finals.items() if result.outcome is not Outcome.STORED]
        self._let_go(failed)
        return finals

    def _let_go(self, keys: list[str]) -> None:
        """Revoke objects and the witness; those with bytes on their way later."""
        self._book.abandon(self._late, after_s=patience.DRAIN_S)
        if self._coverage:
            self._book.revoke([self._witness, *(key for key in keys if key not in self._late)])


def _write_result(answer: int, size: int) -> ObjectResult:
    if answer == size:
        return STORED
    return codes.failure(answer) if answer < 0 else ObjectResult(Outcome.FAILED, "SHORT_WRITE")
