"""What the linker asks of an object store, without a word about which store it is.

Addresses are plain integers: bytes at `[address, address + num_bytes)` must lie inside one range
that was given to `register`. The caller owns those bytes and keeps them unchanged (put) or unread
(get) until the call returns. All methods may be called from any thread; all of them block, and
none longer than the store's own limits.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


class Outcome(enum.Enum):
    """What became of one object in one call."""

    STORED = "stored"  # written now, and readable
    EXISTS = "exists"  # was there before; its bytes were kept
    PENDING = "pending"  # another writer holds the key; not readable yet
    FETCHED = "fetched"  # read whole, within its lease
    MISSING = "missing"  # no such object, or no replica left
    WRONG_SIZE = "wrong size"  # the object is there, with another length than asked
    NO_SPACE = "no space"  # the store is full; worth another try later
    LEASE_EXPIRED = "lease expired"  # the bytes came too late to be trusted
    FAILED = "failed"  # anything else; `code_name` says what


@dataclass(frozen=True)
class ObjectResult:
    """One object's outcome; `code_name` is the store's own word where it gave one."""

    outcome: Outcome
    code_name: str = ""


STORED = ObjectResult(Outcome.STORED)
EXISTS = ObjectResult(Outcome.EXISTS)
FETCHED = ObjectResult(Outcome.FETCHED)


def all_are(results: Sequence[ObjectResult], wanted: ObjectResult) -> bool:
    """Whether every result is `wanted`.

    Stores hand out the three above, and lists compare identities first: so that transfers of which
    nothing failed, nearly all, cost nothing for each object here.
    """
    return list(results) == [wanted] * len(results)


class PutSession(Protocol):
    """Objects that are written in ranges and become readable all at once, or never.

    A context manager: leaving it without `finish()` revokes every object that is still open.
    """

    def start_results(self) -> list[ObjectResult]:
        """Return, per key, STORED (open for writing), EXISTS, PENDING, NO_SPACE or FAILED."""
        ...

    def write(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[ObjectResult]:
        """Write one range per key at `offsets[i]` of its object; ranges must not overlap."""
        ...

    def finish(self) -> list[ObjectResult]:
        """End each object whose every byte was written in time, revoke the others."""
        ...

    def abort(self) -> None:
        """Revoke every object that is still open."""
        ...

    def __enter__(self) -> "PutSession": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class GetSession(Protocol):
    """Objects that are held readable while ranges of them are fetched."""

    def start_results(self) -> list[ObjectResult]:
        """Return, per key, FETCHED (open for reading), MISSING or FAILED."""
        ...

    def read(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[ObjectResult]:
        """Fetch one range per key, from `offsets[i]` of its object."""
        ...

    def longer(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Return, per key, whether its object has more than `sizes[i]` bytes; asks nobody."""
        ...

    def close(self) -> None:
        """Let the objects go. Repeating it does nothing."""
        ...

    def __enter__(self) -> "GetSession": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Store(Protocol):
    """An object store with immutable objects under string keys.

    Every method raises `StoreClosed` after `close()`, `StoreUnavailable` while the store cannot be
    reached, and `ArgumentError` for an unregistered address, a repeated key, lists of different
    lengths, or a size that is not in 1 .. 2**31 - 1.
    """

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory known to the transport; once per buffer. The caller keeps it allocated."""
        ...

    def unregister(self, address: int) -> None:
        """Forget a range by its first address; nothing may be in flight on it."""
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, per key, whether a readable object is there now."""
        ...

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[ObjectResult]:
        """Write whole objects; per key STORED, EXISTS, PENDING, NO_SPACE or FAILED.

        STORED and EXISTS both mean that a readable object of that key is there now.
        """
        ...

    def get(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[ObjectResult]:
        """Read whole objects; per key FETCHED, MISSING, WRONG_SIZE, LEASE_EXPIRED or FAILED.

        Only FETCHED bytes may be used.
        """
        ...

    def remove(self, keys: Sequence[str]) -> list[ObjectResult]:
        """Delete objects; per key STORED (done), MISSING or FAILED.

        Objects that are leased stay, and FAIL: somebody reads them. They can be removed once all
        leases have ended, which every question about them renews.
        """
        ...

    def remove_under(self, prefix: str) -> int:
        """Delete all objects whose keys begin with `prefix`; return how many were.

        Objects that are leased, or being written, stay and are not counted.

        Raises:
            StoreUnavailable, StoreClosed: it could not be asked.
            StoreError: it refused.
        """
        ...

    def put_session(self, keys: Sequence[str], sizes: Sequence[int]) -> PutSession:
        """Open objects for writing in ranges."""
        ...

    def get_session(self, keys: Sequence[str]) -> GetSession:
        """Open objects for reading in ranges."""
        ...

    @property
    def available(self) -> bool:
        """Whether calls are let through now; False while the store cannot be reached."""
        ...

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait for calls in flight, then disconnect. Repeating it does nothing."""
        ...
