"""Every call to a Mooncake client passes here: gated, and its return codes looked at once."""

import re
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvferry.errors import StoreError, StoreUnavailable
from kvferry.linker import codes
from kvferry.linker.gate import Breaker, Gate
from kvferry.linker.hung_owners import HungOwners
from kvferry.linker.patience import Patience
from kvferry.linker.regions import RegisteredRanges

_PROBE_KEY = "kvferry/probe"
_SESSION_CALLS = (
    "batch_put_session_start",
    "batch_put_session_end",
    "batch_put_session_revoke",
    "batch_put_from_multi_buffer_ranges",
    "batch_get_session_start",
    "batch_get_session_end",
    "batch_get_into_multi_buffer_ranges",
)

Nested = list[list[int]]
"""A column of a ranged call: for each key a list of one number, as `nested` makes it."""


class Calls:
    """A Mooncake client's calls, one list of codes per list of keys, addresses checked.

    Calls in flight are counted, since Mooncake crashes when it is called during or after its
    `close`. Each method raises `StoreClosed` after the gate closed, `StoreUnavailable` in an
    outage (and reports a new one to the breaker), and `StoreError` for an answer of the wrong
    length. Lists are passed on whole: cutting them up is the caller's.
    """

    def __init__(self, client: Any, listens: Callable[[], bool], address: str) -> None:
        """Wrap a client that was set up.

        Args:
            client: Mooncake's.
            listens: whether anybody listens at the master's address now.
            address: the master's, for messages.
        """
        self.client = client
        self.gate = Gate()
        # Nothing refers back to this for good, so that the client goes at once when its store does.
        this = weakref.proxy(self)
        self.breaker = Breaker(partial(_answers, listens, self.gate, client))
        self.ranges = RegisteredRanges()
        self.patience = Patience()
        self._hung = HungOwners(lambda keys: this.owners_of(keys))
        self._address = address

    @property
    def num_outages(self) -> int:
        """Grows with every outage; sessions of before it are void."""
        return self.breaker.num_outages

    def check_addresses(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Raise ArgumentError unless all ranges are registered memory."""
        if self.ranges.hold(addresses, sizes):
            return
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.ranges.check(key, address, size)

    def check_sessions(self) -> None:
        """Raise StoreError if the installed Mooncake has no session calls."""
        absent = [name for name in _SESSION_CALLS if not hasattr(self.client, name)]
        if absent:
            raise StoreError(
                f"the installed Mooncake has no {absent[0]}; sessions need a "
                "mooncake-transfer-engine wheel 0.3.13 or newer"
            )

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Ask for each key; an error answer is an outage, never «missing»."""
        if not keys:
            return []
        answers = self._many("batch_is_exist", keys)
        if min(answers) < 0:
            raise self._outage(next(answer for answer in answers if answer < 0))
        return [answer == 1 for answer in answers]

    def size_of(self, key: str) -> int:
        """Return the object's size in bytes, or a negative code."""
        with self.gate:
            self.breaker.check()
            size = int(self.client.get_size(key))
        if size in codes.OUTAGE_CODES:
            raise self._outage(size)
        return size

    def owners_of(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the address of the owner that each object lies on; others are left out."""
        with self.gate:
            self.breaker.check()
            found = self.client.batch_get_replica_desc(list(keys))
        return {
            key: replicas[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
            for key, replicas in found.items()
            if replicas and replicas[0].is_memory_replica()
        }

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read whole objects; byte counts, or negative codes."""
        return self._hung.read(partial(self._many, "batch_get_into"), keys, addresses, sizes)

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Delete objects that are not leased."""
        return self._many("batch_remove", keys, False)

    def remove_under(self, prefix: str) -> int:
        """Delete all unleased objects whose keys begin so; return how many, or a negative code."""
        with self.gate:
            self.breaker.check()
            count = int(self.client.remove_by_regex("^" + re.escape(prefix), False))
        if count in codes.OUTAGE_CODES:
            raise self._outage(count, "remove_by_regex")
        return count

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """Reserve objects."""
        return self._many("batch_put_session_start", keys, list(sizes))

    def put_write(
        self,
        keys: Sequence[str],
        addresses: Nested,
        sizes: Nested,
        offsets: Nested,
    ) -> list[int]:
        """Write one range per reserved object; byte counts, or negative codes."""
        call = partial(self._many, "batch_put_from_multi_buffer_ranges")
        return self._hung.write(call, keys, addresses, sizes, offsets)

    def put_end(self, keys: Sequence[str]) -> list[int]:
        """Make reserved objects readable, holes and all."""
        return self._many("batch_put_session_end", keys)

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        """Drop reserved objects, and this client's memory of them."""
        return self._many("batch_put_session_revoke", keys)

    def get_start(self, keys: Sequence[str]) -> list[int]:
        """Look replicas up and lease the objects, again if they are held already."""
        return self._many("batch_get_session_start", keys)

    def get_read(
        self,
        keys: Sequence[str],
        addresses: Nested,
        sizes: Nested,
        offsets: Nested,
    ) -> list[int]:
        """Read one range per held object; byte counts, or negative codes."""
        call = partial(self._many, "batch_get_into_multi_buffer_ranges")
        return self._hung.read(call, keys, addresses, sizes, offsets)

    def get_end(self, keys: Sequence[str]) -> None:
        """Forget held objects; does not ask the master, so it works in an outage."""
        if keys:
            with self.gate:
                self.client.batch_get_session_end(list(keys))

    def _many(self, name: str, keys: Sequence[str], *arguments: Any) -> list[int]:
        if not keys:
            return []
        begin_s = time.monotonic()
        with self.gate:
            self.breaker.check()
            names = keys if isinstance(keys, list) else list(keys)
            answers: list[int] = getattr(self.client, name)(names, *arguments)
        if len(answers) != len(keys):
            raise StoreError(
                f"{name} answered {len(answers)} codes for {len(keys)} keys: Mooncake's client is "
                "not set up, or was closed behind this store's back"
            )
        if min(answers) < 0:
            for code in answers:
                if code in codes.OUTAGE_CODES:
                    raise self._outage(code, f"{name} after {time.monotonic() - begin_s:.1f} s")
        return answers

    def _outage(self, code: int, where: str = "") -> StoreUnavailable:
        name = codes.code_name(code)
        reason = f"Mooncake's master at {self._address} does not answer ({where or 'call'}: {name})"
        self.breaker.open(reason)
        return StoreUnavailable(reason, code=code, code_name=name)


def _answers(listens: Callable[[], bool], gate: Gate, client: Any) -> bool:
    """Whether the master answers again; for the breaker's thread."""
    if not listens():
        return False
    with gate:
        answers = client.batch_is_exist([_PROBE_KEY])
    return bool(answers) and answers[0] >= 0


def nested(*lists: Sequence[int]) -> list[Nested]:
    """Return each value in a list of its own; equal ones share it, for it is only read."""
    return [
        [[values[0]]] * len(values)
        if values and values.count(values[0]) == len(values)
        else [[value] for value in values]
        for values in lists
    ]
