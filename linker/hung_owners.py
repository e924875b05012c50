"""Owners that do not answer: what lies on them fails at once for a while, not call after call."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import StoreClosed, StoreUnavailable
from kvferry.linker.codes import TRANSFER_FAIL

_log = logging.getLogger(__name__)

SLOW_S = 0.9
"""A transfer that failed and took longer has waited: an owner that is gone costs 1 s a time."""

HOLD_S = 3.0
"""How long nothing is asked of an owner that has let a transfer wait in vain."""

ANY_OWNER = "any owner"
"""In place of an owner's address: where Mooncake puts an object is not to be had beforehand."""

Call = Callable[..., list[int]]
"""Of a Mooncake client: keys and columns to a code for each key."""


class HungOwners:
    """Owners that have let a transfer of this client wait in vain. Safe from any thread.

    Mooncake waits for an owner that hangs 5 s (`MC_TCP_STATUS_TIMEOUT_SEC`) and up to 1 s until it
    connects again: for each range of a session call, or for each 16 objects of another one
    (`MC_TCP_LANES_PER_PEER`). After a call that paid for that, the objects of that owner are not
    read for `HOLD_S`; then one of them is tried, and the others if it came well. Writes do the same
    for all owners together: which one a new object comes to lie on, only the master knows.
    """

    def __init__(self, owners_of: Callable[[Sequence[str]], Mapping[str, str]]) -> None:
        """Know of none.

        Args:
            owners_of: returns the address of the owner that holds each object, as far as it is
                known; asks the master.
        """
        self._owners_of = owners_of
        self._lock = threading.Lock()
        self._held_until_s: dict[str, float] = {}

    def read(self, call: Call, keys: Sequence[str], *columns: Sequence[Any]) -> list[int]:
        """Read objects, or ranges of them; those on an owner that hangs fail at once."""
        if not self._held_until_s:  # nearly always
            return self._watched(call, keys, columns, lambda failed: self._owners_of(failed))
        owners = self._owners_of(keys)
        answers = [TRANSFER_FAIL] * len(keys)
        well: list[int] = []
        waiting: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            owner = owners.get(key, "")
            held = owner in self._held_until_s
            (waiting.setdefault(owner, []) if held else well).append(index)

        def read_some(indices: Sequence[int]) -> None:
            some = [[column[index] for index in indices] for column in (keys, *columns)]
            came = self._watched(call, some[0], some[1:], lambda _: owners)
            for index, answer in zip(indices, came, strict=True):
                answers[index] = answer

        for owner, indices in waiting.items():
            if self._may_try(owner):
                read_some(indices[:1])
                if self._is_back(owner, answers[indices[0]]):
                    well += indices[1:]
        if well:
            read_some(sorted(well))
        return answers

    def write(self, call: Call, keys: Sequence[str], *columns: Sequence[Any]) -> list[int]:
        """Write objects, or ranges of them; all fail at once for a while after one that hung."""
        tried: list[int] = []
        if ANY_OWNER in self._held_until_s:
            if self._may_try(ANY_OWNER):
                first = [column[:1] for column in columns]
                tried = self._watched(call, keys[:1], first, lambda _: {keys[0]: ANY_OWNER})
            if not tried or not self._is_back(ANY_OWNER, tried[0]):
                return (tried + [TRANSFER_FAIL] * len(keys))[: len(keys)]
            keys, columns = keys[1:], tuple(column[1:] for column in columns)
        return tried + self._watched(
            call, keys, columns, lambda failed: dict.fromkeys(failed, ANY_OWNER)
        )

    def _watched(
        self,
        call: Call,
        keys: Sequence[str],
        columns: Iterable[Sequence[Any]],
        owners_of: Callable[[Sequence[str]], Mapping[str, str]],
    ) -> list[int]:
        """Call, and note the owners of what failed if that took long."""
        begin_s = time.monotonic()
        answers = call(keys, *columns)
        taken_s = time.monotonic() - begin_s
        if taken_s > SLOW_S and TRANSFER_FAIL in answers:
            failed = [key for key, code in zip(keys, answers, strict=True) if code == TRANSFER_FAIL]
            # Where the master cannot be asked either, the next call will say so.
            with contextlib.suppress(StoreUnavailable, StoreClosed):
                owners = owners_of(failed)
                self._hold({owners[key] for key in failed if key in owners}, taken_s)
        return answers

    def _hold(self, owners: Iterable[str], taken_s: float) -> None:
        with self._lock:
            self._held_until_s.update(dict.fromkeys(owners, time.monotonic() + HOLD_S))
        _log.warning(
            "no answer from %s within %.1f s; its transfers fail at once for %g s",
            ", ".join(sorted(owners)) or "an owner that the master has forgotten",
            taken_s,
            HOLD_S,
        )

    def _may_try(self, owner: str) -> bool:
        """Whether it is time to try an owner again; others then wait for what comes of that."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._held_until_s.get(owner, 0.0):
                return False
            self._held_until_s[owner] = now_s + HOLD_S
        return True

    def _is_back(self, owner: str, answer: int) -> bool:
        if answer == TRANSFER_FAIL:
            return False
        with self._lock:
            self._held_until_s.pop(owner, None)
        return True
