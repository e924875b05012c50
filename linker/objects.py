"""Whole objects on Mooncake: one session or call each way, and what became of every object."""

import time
from collections.abc import Sequence

from kvferry.linker import codes
from kvferry.linker.calls import Calls
from kvferry.linker.put_book import PutBook
from kvferry.linker.put_sessions import MooncakePutSession
from kvferry.linker.store import FETCHED, STORED, ObjectResult, Outcome, all_are

_WRONG_SIZE = ObjectResult(Outcome.WRONG_SIZE)
_GONE = ObjectResult(Outcome.FAILED, codes.code_name(codes.OBJECT_NOT_FOUND))
_EXPIRED = ObjectResult(Outcome.LEASE_EXPIRED, codes.code_name(codes.LEASE_EXPIRED))


def put_objects(
    book: PutBook, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
) -> list[ObjectResult]:
    """Write objects in one session; see `MooncakeStore.put`.

    A lookup leases what was stored: an object that nobody has asked for yet may be evicted at once.
    """
    writing = keys
    with MooncakePutSession(book, keys, sizes) as session:
        started = session.start_results()
        if not all_are(started, STORED):
            opened = [index for index, result in enumerate(started) if result is STORED]
            addresses, sizes = ([row[index] for index in opened] for row in (addresses, sizes))
            writing = [keys[index] for index in opened]
        written = session.write(writing, addresses, sizes, [0] * len(writing))
        results = session.finish()
    why = {
        key: result for key, result in zip(writing, written, strict=True) if result is not STORED
    }
    stored = [key for key, result in zip(keys, results, strict=True) if result is STORED]
    there = book.calls.exists(stored)
    if not all(there):
        why.update(
            (key, _GONE) for key, is_there in zip(stored, there, strict=True) if not is_there
        )
    return [why.get(key, result) for key, result in zip(keys, results, strict=True)]


def get_objects(
    calls: Calls,
    keys: Sequence[str],
    addresses: Sequence[int],
    sizes: Sequence[int],
    lease_ttl_s: float,
) -> list[ObjectResult]:
    """Read objects in one call; see `MooncakeStore.get`."""
    begin_s = time.monotonic()  # no later than the leases' own begin
    answers = calls.get(keys, addresses, sizes)
    in_time = time.monotonic() - begin_s < lease_ttl_s
    return [
        _get_result(calls, key, size, answer, in_time)
        for key, size, answer in zip(keys, sizes, answers, strict=True)
    ]


def _get_result(calls: Calls, key: str, size: int, answer: int, in_time: bool) -> ObjectResult:
    if answer == size:
        return FETCHED if in_time else _EXPIRED
    if answer >= 0:
        return _WRONG_SIZE
    # Mooncake says «invalid» for an object longer than its memory here, among other things.
    if answer == codes.INVALID_PARAMS and calls.size_of(key) > size:
        return ObjectResult(Outcome.WRONG_SIZE, codes.code_name(answer))
    return codes.failure(answer)
