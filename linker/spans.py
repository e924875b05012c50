"""Which parts of a buffer are free: a first-fit allocator over offsets, without any memory."""

import bisect


class SpanAllocator:
    """First fit over sorted free intervals, joined when neighbours meet. Not thread-safe.

    First fit keeps long transfers' spans at low offsets and the far end whole, which is what a
    mix of a few sizes needs; spans live for milliseconds, so fragmentation does not build up.
    """

    def __init__(self, num_bytes: int, align_bytes: int) -> None:
        """Start with everything free; `num_bytes` is a multiple of `align_bytes`."""
        self._align = align_bytes
        self._starts = [0]
        self._ends = [num_bytes]

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are free."""
        return sum(self._ends) - sum(self._starts)

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest free interval."""
        return max((e - s for s, e in zip(self._starts, self._ends, strict=True)), default=0)

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of `num_bytes`, now taken; None if no free interval is long enough."""
        size = self._rounded(num_bytes)
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                self._starts[index] += size
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free what `take(num_bytes)` returned as `offset`."""
        end = offset + self._rounded(num_bytes)
        index = bisect.bisect_left(self._starts, offset)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_previous = index > 0 and self._ends[index - 1] == offset
        if joins_previous and joins_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_previous:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._align) * self._align
