"""Objects of somebody else: stored while kvferry's sessions are void, compared byte by byte.

Plain Mooncake objects, and some of a linker with `integrity=False`: none has a checksum, so where
kvferry writes into memory that is not its own any more, nothing but this comparison tells.
"""

import hashlib
import random
import time
from collections.abc import Callable

import torch
from soak_bare import BareObjects
from soak_tally import Tally

from kvferry import MooncakeStore
from kvferry.errors import StoreError
from kvferry.linker.eviction import evict
from kvferry.linker.store import ObjectResult, Outcome

VICTIM_BYTES = 16 << 10
NUM_VICTIMS = 800
"""Most of the store: whatever was given away once more, a victim is there."""
_PER_CALL = 50
_BACK_S = 20.0


class Victims:
    """One client's objects; for one thread."""

    def __init__(self, store: MooncakeStore, tally: Tally, bare: BareObjects | None = None) -> None:
        self._store = store
        self._tally = tally
        self._bare = bare
        self._memory = torch.zeros(_PER_CALL * VICTIM_BYTES, dtype=torch.uint8)
        store.register(self._memory.data_ptr(), self._memory.numel())
        self._keys: list[str] = []
        self._next = 0

    def store_many(self) -> bool:
        """Store as many as fit, and lease them; whether any could be stored."""
        end_s = time.monotonic() + _BACK_S
        while len(self._keys) < NUM_VICTIMS:
            if not self._store_some():
                if self._keys or time.monotonic() > end_s:
                    break
                time.sleep(0.1)  # neither master nor owner may be back yet
            elif self._bare is not None and not self._bare.num_stored:
                self._tally.victim("stored", self._bare.store())
        return bool(self._keys)

    def compare(self, during: str) -> None:
        """Compare all that are there; those that are gone or were wrong are let go."""
        there: list[str] = []
        for first in range(0, len(self._keys), _PER_CALL):
            there += self._compare_some(self._keys[first : first + _PER_CALL], during)
        self._keys = there
        if self._bare is not None:
            num_there, wrong = self._bare.compare()
            self._tally.victim("compared", num_there)
            for key in wrong:
                self._tally.found("victims", f"{key}, stored around {during!r}, is not what it was")

    def let_go(self) -> None:
        """Give the memory back, and begin anew; nobody else reads them, so leases do not count."""
        keys, self._keys = self._keys, []
        self._try(lambda: evict(self._store, keys))
        if self._bare is not None:
            self._bare.let_go()

    def _store_some(self) -> bool:
        keys = [f"victim-{self._next + number}" for number in range(_PER_CALL)]
        self._next += _PER_CALL
        for number, key in enumerate(keys):
            self._place(number)[:] = _content(key)
        results = self._try(lambda: self._store.put(keys, *self._columns(len(keys)))) or []
        stored = [
            key
            for key, result in zip(keys, results, strict=False)
            if result.outcome is Outcome.STORED
        ]
        self._keys += stored
        self._tally.victim("stored", len(stored))
        return bool(stored)

    def _compare_some(self, keys: list[str], during: str) -> list[str]:
        """Return those that are there and right."""
        good, doubtful = self._read(keys)
        # Its memory may have been given away between the master's answer and the read: then it is
        # gone, which is no fault.
        good_again, wrong = self._read(doubtful)
        for key in wrong:
            got, wanted = self._place(wrong.index(key)), _content(key)
            differs = torch.nonzero(got != wanted).flatten().tolist()
            self._tally.found(
                "victims",
                f"{key}, stored around {during!r}: {len(differs)} bytes from byte {differs[0]} on "
                f"are not its own but {bytes(got[differs[0] :][:16].tolist()).hex()}",
            )
        return good + good_again

    def _read(self, keys: list[str]) -> tuple[list[str], list[str]]:
        """Return which are right and which wrong, whose bytes are in memory, one after another."""
        if not keys:
            return [], []
        results = self._try(lambda: self._store.get(keys, *self._columns(len(keys)))) or []
        good, wrong = [], []
        for number, (key, result) in enumerate(zip(keys, results, strict=False)):
            if result.outcome is not Outcome.FETCHED:
                continue
            if torch.equal(self._place(number), _content(key)):
                good.append(key)
            else:
                self._place(len(wrong))[:] = self._place(number).clone()
                wrong.append(key)
        self._tally.victim("compared", len(good) + len(wrong))
        return good, wrong

    @staticmethod
    def _try(call: Callable[[], list[ObjectResult]]) -> list[ObjectResult] | None:
        """Return what a store call says; None while the store is away, which is others' concern."""
        try:
            return call()
        except StoreError:
            return None

    def _columns(self, count: int) -> tuple[list[int], list[int]]:
        first = self._memory.data_ptr()
        return [first + number * VICTIM_BYTES for number in range(count)], [VICTIM_BYTES] * count

    def _place(self, number: int) -> torch.Tensor:
        return self._memory[number * VICTIM_BYTES : (number + 1) * VICTIM_BYTES]


def _content(key: str) -> torch.Tensor:
    """Return bytes that no other key has."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return torch.frombuffer(
        bytearray(random.Random(seed).randbytes(VICTIM_BYTES)), dtype=torch.uint8
    )
