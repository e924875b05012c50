"""Which memory was registered with the store, so that a call on any other is refused."""

import threading
from bisect import bisect_right
from collections.abc import Sequence

from kvferry.arguments import shown
from kvferry.errors import ArgumentError


class RegisteredRanges:
    """Disjoint address ranges; lookups take O(log n) and no lock.

    Transports over TCP accept any memory and RDMA does not: only this check makes a wrong address
    fail on both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced as one, never changed in place: a reader sees one consistent pair.
        self._table: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def add(self, address: int, num_bytes: int) -> None:
        """Add `[address, address + num_bytes)`; ArgumentError if it touches a range that is in."""
        if address <= 0 or num_bytes <= 0:
            raise ArgumentError(
                f"address and num_bytes must be positive, got {address:#x} and {num_bytes}"
            )
        end = address + num_bytes
        with self._lock:
            starts, ends = self._table
            index = bisect_right(starts, address)
            for other in (index - 1, index):
                if 0 <= other < len(starts) and starts[other] < end and ends[other] > address:
                    raise ArgumentError(
                        f"[{address:#x}, {end:#x}) overlaps the registered range "
                        f"[{starts[other]:#x}, {ends[other]:#x}); register each buffer once"
                    )
            self._table = (
                (*starts[:index], address, *starts[index:]),
                (*ends[:index], end, *ends[index:]),
            )

    def remove(self, address: int) -> None:
        """Forget the range that begins at `address`; ArgumentError if none does."""
        with self._lock:
            starts, ends = self._table
            if address not in starts:
                raise ArgumentError(f"no registered range begins at address {address:#x}")
            index = starts.index(address)
            self._table = (
                starts[:index] + starts[index + 1 :],
                ends[:index] + ends[index + 1 :],
            )

    def begins_at(self, address: int) -> bool:
        """Whether a registered range begins at `address`."""
        return address in self._table[0]

    def hold(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether one registered range surely holds all of the bytes; False may be wrong."""
        if not addresses:
            return True
        starts, ends = self._table
        if isinstance(addresses, range):  # objects at a stride: no look at each
            first, last = sorted((addresses[0], addresses[-1]))
        else:
            first, last = min(addresses), max(addresses)
        index = bisect_right(starts, first) - 1
        return index >= 0 and last + max(sizes) <= ends[index]

    def check(self, key: str, address: int, num_bytes: int) -> None:
        """Raise ArgumentError unless one registered range holds all of the bytes."""
        starts, ends = self._table
        index = bisect_right(starts, address) - 1
        if index < 0 or address + num_bytes > ends[index]:
            raise ArgumentError(
                f"key {shown(key)}: {num_bytes} bytes at address {address:#x} are not inside one "
                f"registered range, wanted a registered buffer's ({len(starts)} registered)"
            )
