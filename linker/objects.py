"""Whole objects on Mooncake: one call each way, and what became of every object in it."""

import time
from collections.abc import Sequence
from typing import Any

from kvferry.linker import codes
from kvferry.linker.calls import Calls
from kvferry.linker.store import EXISTS, FETCHED, STORED, ObjectResult, Outcome

_WRONG_SIZE = ObjectResult(Outcome.WRONG_SIZE)
_EXPIRED = ObjectResult(Outcome.LEASE_EXPIRED, codes.code_name(codes.LEASE_EXPIRED))


def put_objects(
    calls: Calls,
    keys: Sequence[str],
    addresses: Sequence[int],
    sizes: Sequence[int],
    *,
    absent: bool = False,
) -> list[ObjectResult]:
    """Write objects in one call, between two lookups; see `MooncakeStore.put`."""
    there = [False] * len(keys) if absent else calls.exists(keys)
    writing = [index for index, is_there in enumerate(there) if not is_there]
    columns: list[Sequence[Any]] = [keys, addresses, sizes]
    if len(writing) < len(keys):
        columns = [[column[index] for index in writing] for column in columns]
    answers = calls.put(*columns)
    accepted = [
        index
        for index, code in zip(writing, answers, strict=True)
        if code in (0, codes.OBJECT_ALREADY_EXISTS)
    ]
    readable = calls.exists([keys[index] for index in accepted])
    results = [EXISTS] * len(keys)
    for index, code in zip(writing, answers, strict=True):
        if code != 0:
            results[index] = codes.failure(code)
    for index, is_readable in zip(accepted, readable, strict=True):
        results[index] = STORED if is_readable else _unreadable(calls, keys[index])
    return results


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


def _unreadable(calls: Calls, key: str) -> ObjectResult:
    """Why a key that was accepted can't be read: another's write goes on, or it is gone again."""
    size = calls.size_of(key)
    if size >= 0:
        return STORED  # the other writer ended just now
    outcome = Outcome.PENDING if size == codes.REPLICA_IS_NOT_READY else Outcome.FAILED
    return ObjectResult(outcome, codes.code_name(size))


def _get_result(calls: Calls, key: str, size: int, answer: int, in_time: bool) -> ObjectResult:
    if answer == size:
        return FETCHED if in_time else _EXPIRED
    if answer >= 0:
        return _WRONG_SIZE
    # Mooncake says «invalid» for an object longer than its memory here, among other things.
    if answer == codes.INVALID_PARAMS and calls.size_of(key) > size:
        return ObjectResult(Outcome.WRONG_SIZE, codes.code_name(answer))
    return codes.failure(answer)
