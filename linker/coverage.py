"""Which bytes of one object were written: disjoint ranges, and whether they cover it whole."""

from bisect import bisect_left

from kvferry.errors import ArgumentError


class Coverage:
    """Ranges of an object of `size` bytes. A range is claimed, then either written or given back.

    Since claimed ranges never overlap, their written lengths add up to `size` exactly when every
    byte was written. Not thread-safe: the owner holds a lock.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._num_written = 0

    @property
    def complete(self) -> bool:
        """Whether every byte was written."""
        return self._num_written == self.size

    def claim(self, offset: int, num_bytes: int) -> None:
        """Take `[offset, offset + num_bytes)`; ArgumentError outside, or over a range taken."""
        end = offset + num_bytes
        if offset < 0 or num_bytes <= 0 or end > self.size:
            raise ArgumentError(
                f"range [{offset}, {end}) is not inside an object of {self.size} bytes"
            )
        index = bisect_left(self._offsets, offset)
        for other in (index - 1, index):
            if (
                0 <= other < len(self._offsets)
                and self._offsets[other] < end
                and self._ends[other] > offset
            ):
                raise ArgumentError(
                    f"range [{offset}, {end}) overlaps [{self._offsets[other]}, "
                    f"{self._ends[other]}), which was written before"
                )
        self._offsets.insert(index, offset)
        self._ends.insert(index, end)

    def written(self, num_bytes: int) -> None:
        """Count a claimed range of that length as written."""
        self._num_written += num_bytes

    def give_back(self, offset: int) -> None:
        """Free the claimed, unwritten range that begins at `offset`, so that it can be retried."""
        index = bisect_left(self._offsets, offset)
        del self._offsets[index]
        del self._ends[index]
