"""Get sessions on Mooncake: objects held readable while ranges of them are fetched."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kvferry.arguments import shown
from kvferry.errors import ArgumentError, StoreClosed, StoreError
from kvferry.linker import codes
from kvferry.linker.arguments import check_keys, check_sizes, split
from kvferry.linker.calls import Calls, Nested, nested
from kvferry.linker.gate import Gate
from kvferry.linker.patience import UNTRIED
from kvferry.linker.store import FETCHED, ObjectResult, Outcome, all_are

_DRAIN_TIMEOUT_S = 90.0  # longer than Mooncake's own bound on a transfer, 60 s
_NEVER_S = float("-inf")
_NOWHERE = 4096  # no null pointer, which Mooncake refuses; nothing is moved there

TRUST_S = 0.25
"""How long the master's word is good that an object is where it was: a lease of a master that was
restarted since holds nothing, and its memory may be another object's."""

_EXPIRED = ObjectResult(Outcome.LEASE_EXPIRED, codes.code_name(codes.LEASE_EXPIRED))


@dataclass
class _Held:
    num_holders: int = 0
    leased_s: float = _NEVER_S  # when the last (re)start of its lease was asked for
    num_outages: int = -1


class GetBook:
    """Who holds which key: Mooncake keeps one entry per key and client, so its end is counted."""

    def __init__(
        self, calls: Calls, *, lease_ttl_s: float, max_call_bytes: int, max_call_objects: int
    ) -> None:
        self.calls = calls
        self.lease_ttl_s = lease_ttl_s
        self.trust_s = min(TRUST_S, lease_ttl_s / 2)
        self.max_call_bytes = max_call_bytes
        self.max_call_objects = max_call_objects
        # Held over the calls too: an end that overtakes a start would end the newcomer's entry.
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._num_losses = 0

    @property
    def num_losses(self) -> int:
        """Grows when a key that was held is not any more; what was fresh before may not be so."""
        return self._num_losses

    @property
    def num_open(self) -> int:
        """Keys that somebody holds."""
        with self._lock:
            return len(self._held)

    def start(self, keys: Sequence[str]) -> dict[str, ObjectResult]:
        """Lease keys and count one more holder for each that came FETCHED."""
        with self._lock:
            results: dict[str, ObjectResult] = {}
            try:
                for first in range(0, len(keys), self.max_call_objects):
                    results.update(self._lease(keys[first : first + self.max_call_objects]))
            except StoreError:
                self._end_unheld(list(results))
                raise
            for key, result in results.items():
                if result is FETCHED:
                    self._held[key].num_holders += 1
            if not all_are([*results.values()], FETCHED):
                self._end_unheld(list(results))
            return results

    def fresh(self, keys: Sequence[str]) -> tuple[dict[str, ObjectResult], float]:
        """Renew the leases older than `TRUST_S` or half their time, or from before an outage.

        Returns:
            The keys that could not be renewed, with the reason, and when the oldest of the other
            leases was asked for (monotonic clock, seconds).
        """
        num_outages = self.calls.num_outages
        with self._lock:
            if any(key not in self._held for key in keys):  # drained
                raise StoreClosed("the store is closed")
            oldest_s = time.monotonic() - self.trust_s
            old = [
                key
                for key in keys
                if self._held[key].leased_s < oldest_s or self._held[key].num_outages != num_outages
            ]
            renewed: dict[str, ObjectResult] = {}
            for first in range(0, len(old), self.max_call_objects):
                renewed.update(self._lease(old[first : first + self.max_call_objects]))
            failed = {
                key: result
                for key, result in renewed.items()
                if result.outcome is not Outcome.FETCHED
            }
            leased_s = [self._held[key].leased_s for key in keys if key not in failed]
        return failed, min(leased_s, default=_NEVER_S)

    def ask(self, keys: Sequence[str]) -> list[int]:
        """Return the master's code for each key, as `Calls.get_start`; holds nothing."""
        with self._lock:
            answers: list[int] = []
            for first in range(0, len(keys), self.max_call_objects):
                answers += self.calls.get_start(keys[first : first + self.max_call_objects])
            found = [key for key, code in zip(keys, answers, strict=True) if code == 0]
            self.calls.get_end([key for key in found if key not in self._held])
        return answers

    def dropped(self, key: str) -> None:
        """Note that Mooncake has let go of a key, so that the next read leases it anew."""
        with self._lock:
            self._num_losses += 1
            if key in self._held:
                self._held[key].leased_s = _NEVER_S

    def end(self, keys: Sequence[str]) -> None:
        """Count one holder less for each key; the last one's going ends Mooncake's entry."""
        with self._lock:
            for key in keys:
                if key in self._held:  # not so after drain()
                    self._held[key].num_holders -= 1
            self._end_unheld(list(keys))

    def drain(self) -> list[str]:
        """Return all held keys, and forget them: the client is about to close."""
        with self._lock:
            keys = sorted(self._held)
            self._held.clear()
            self._num_losses += 1
        return keys

    def _lease(self, keys: Sequence[str]) -> dict[str, ObjectResult]:
        num_outages = self.calls.num_outages
        leased_s = time.monotonic()  # before the master's own clock starts
        results: dict[str, ObjectResult] = {}
        for key, code in zip(keys, self.calls.get_start(keys), strict=True):
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = _Held()
            if code == 0:
                held.leased_s, held.num_outages = leased_s, num_outages
                results[key] = FETCHED
            else:
                held.leased_s = _NEVER_S
                self._num_losses += held.num_holders > 0
                results[key] = codes.failure(code)
        return results

    def _end_unheld(self, keys: list[str]) -> None:
        unheld = [key for key in keys if key in self._held and self._held[key].num_holders == 0]
        for key in unheld:
            del self._held[key]
        with contextlib.suppress(StoreClosed):  # the client's close lets everything go
            self.calls.get_end(unheld)


class MooncakeGetSession:
    """A get session; see `kvferry.linker.store.GetSession`. Methods may run on any thread."""

    def __init__(self, book: GetBook, keys: Sequence[str]) -> None:
        """Lease the objects; errors as `Store.get_session`."""
        check_keys(keys)
        self._book = book
        # Before the start: what is lost or ends while it goes on must count.
        self._num_losses, self._num_outages = book.num_losses, book.calls.num_outages
        self._leased_s = time.monotonic()
        self._started = book.start(keys)
        self._open = {key for key, result in self._started.items() if result is FETCHED}
        self._reads = Gate(lambda: StoreError("the get session was closed"))
        self._ending = threading.Lock()

    def start_results(self) -> list[ObjectResult]:
        """Return, per key, what the start said; see `GetSession`."""
        return list(self._started.values())

    def read(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[ObjectResult]:
        """Fetch one range per key: FETCHED, MISSING, WRONG_SIZE, LEASE_EXPIRED or FAILED.

        Leases are renewed on the way, so a session may live longer than one. Only FETCHED bytes
        may be used.

        Raises:
            ArgumentError: a key is not open here, memory is not registered; nothing was read.
            StoreError: the session was closed.
        """
        check_keys(keys, addresses=addresses, sizes=sizes, offsets=offsets)
        check_sizes(keys, sizes)
        if not self._open.issuperset(keys) or min(offsets, default=0) < 0:
            for key, offset in zip(keys, offsets, strict=True):
                if key not in self._open:
                    raise ArgumentError(
                        f"key {shown(key)} is not open here, wanted one of this get session"
                    )
                if offset < 0:
                    raise ArgumentError(f"key {shown(key)}: offset is {offset}, wanted 0 or more")
        self._book.calls.check_addresses(keys, addresses, sizes)
        results: list[ObjectResult] = []
        with self._reads:
            patience, is_lost = self._book.calls.patience, False
            step = min(self._book.max_call_objects, patience.ranges_per_call)
            places, lengths, starts = nested(addresses, sizes, offsets)
            for part in split(sizes, self._book.max_call_bytes, step):
                if is_lost:
                    results += [UNTRIED] * (part.stop - part.start)
                    continue
                begin_s = time.monotonic()
                results += self._read_part(keys[part], places[part], lengths[part], starts[part])
                is_lost = patience.is_lost(results[part], time.monotonic() - begin_s)
        return results

    def longer(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Return, per key, whether the object goes on behind `sizes[i]`; asks nobody.

        Mooncake's client refuses a range that ends behind an object, as it knows it from the start
        of the session, without a word to anyone; where the object is longer it moves the nothing
        that is asked for. 1,000 keys take 0.7 ms.
        """
        check_keys(keys, sizes=sizes)
        found: list[bool] = []
        step = self._book.max_call_objects
        with self._reads:
            for first in range(0, len(keys), step):
                some = keys[first : first + step]
                places, lengths, behind = nested(
                    [_NOWHERE] * len(some),
                    [0] * len(some),
                    [size + 1 for size in sizes[first:][:step]],
                )
                answers = self._book.calls.get_read(some, places, lengths, behind)
                found += [answer >= 0 for answer in answers]
        return found

    def close(self) -> None:
        """Let the objects go, once reads in flight are through (at most 90 s)."""
        self._reads.home.check()
        with self._ending:
            num_reads = self._reads.close(_DRAIN_TIMEOUT_S)
            if num_reads:
                raise StoreError(f"{num_reads} reads of the get session do not come to an end")
            self._book.end(sorted(self._open))
            self._open.clear()

    def __enter__(self) -> "MooncakeGetSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reads.home.is_here:
            self.close()

    def _read_part(
        self,
        keys: Sequence[str],
        addresses: Nested,
        sizes: Nested,
        offsets: Nested,
    ) -> list[ObjectResult]:
        num_outages = self._book.calls.num_outages
        failed, leased_s = self._fresh(keys)
        asked = keys
        if failed:
            ready = [index for index, key in enumerate(keys) if key not in failed]
            keys = [keys[index] for index in ready]
            addresses, sizes, offsets = (
                [column[index] for index in ready] for column in (addresses, sizes, offsets)
            )
        answers = self._book.calls.get_read(keys, addresses, sizes, offsets)
        in_time = self._is_in_time(leased_s, num_outages)
        if in_time and not failed and answers == [size for (size,) in sizes]:
            return [FETCHED] * len(keys)
        results = dict(failed)
        for key, answer, (size,), (offset,) in zip(keys, answers, sizes, offsets, strict=True):
            results[key] = self._read_result(key, answer, size, offset, in_time)
        return [results[key] for key in asked]

    def _fresh(self, keys: Sequence[str]) -> tuple[dict[str, ObjectResult], float]:
        """Return as `GetBook.fresh`, without a look at each key while nothing has changed.

        All of the session's keys are renewed together, so that this costs a call per `TRUST_S`.
        """
        book = self._book
        if (
            time.monotonic() < self._leased_s + book.trust_s
            and book.num_losses == self._num_losses
            and book.calls.num_outages == self._num_outages
        ):
            return {}, self._leased_s
        num_losses, num_outages = book.num_losses, book.calls.num_outages
        failed, leased_s = book.fresh(sorted(self._open))
        if not failed:
            self._num_losses, self._num_outages, self._leased_s = num_losses, num_outages, leased_s
        return {key: failed[key] for key in keys if key in failed}, leased_s

    def _is_in_time(self, leased_s: float, num_outages: int) -> bool:
        """Whether bytes that came now came within the lease."""
        return (
            time.monotonic() - leased_s < self._book.lease_ttl_s
            and self._book.calls.num_outages == num_outages
        )

    def _read_result(
        self, key: str, answer: int, size: int, offset: int, in_time: bool
    ) -> ObjectResult:
        if answer == size:
            return FETCHED if in_time else _EXPIRED
        if answer >= 0:
            return ObjectResult(Outcome.WRONG_SIZE)
        self._book.dropped(key)
        if answer == codes.INVALID_PARAMS and 0 <= self._book.calls.size_of(key) < offset + size:
            return ObjectResult(Outcome.WRONG_SIZE, codes.code_name(answer))
        return codes.failure(answer)
