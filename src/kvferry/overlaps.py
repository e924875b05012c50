"""Whether buffers share bytes: exactly, for views that are woven into each other too.

A buffer's pages are runs of bytes at a stride. K and V halves of one allocation, layers side by
side in a block, heads before tokens: such views cover each other's extent and share no byte.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.buffers import Buffer
from kvferry.errors import LayoutError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Strided:
    """Equal pieces of memory at a stride.

    Attributes:
        start: address of the first piece.
        length: bytes of a piece.
        stride: from one piece to the next, not less than `length`; 0 for a single piece.
        count: how many.
        owner: number of the buffer.
    """

    start: int
    length: int
    stride: int
    count: int
    owner: int

    @property
    def end(self) -> int:
        """Address behind the last piece."""
        return self.start + (self.count - 1) * self.stride + self.length


def no_shared_memory(buffers: Mapping[str, Sequence[Buffer]], num_pages: Mapping[str, int]) -> None:
    """See that no byte of a page belongs to two buffers.

    Costs little more than sorting the buffers, unless some are woven in an unusual way.

    Args:
        buffers: by index space, all of one device.
        num_pages: by index space, how many page ids are valid; what lies behind is never moved.

    Raises:
        LayoutError: two buffers share bytes; names both.
    """
    named = [(buffer, num_pages[space]) for space, row in buffers.items() for buffer in row]
    pieces = [
        piece
        for owner, (buffer, pages) in enumerate(named)
        for piece in _pieces(buffer, pages, owner)
    ]
    for cluster in _clusters(pieces):
        if len({piece.owner for piece in cluster}) < 2 or _are_apart(cluster):
            continue
        for one, other in _neighbours(cluster):
            if _share(one, other):
                first, second = named[one.owner][0], named[other.owner][0]
                raise LayoutError(
                    f"pool {second.pool.name!r} layer {second.layer_id}: shares memory with pool "
                    f"{first.pool.name!r} layer {first.layer_id}; describe shared memory once"
                )


def _pieces(buffer: Buffer, num_pages: int, owner: int) -> Iterator[Strided]:
    """Yield what pages of a buffer are made of, neighbours joined."""
    for run in buffer.runs:
        length, pitch, parts = run.length_bytes, run.pitch_bytes, run.count
        if parts > 1 and pitch == length:
            length, parts = length * parts, 1
        start, stride, count = (
            buffer.address + run.offset_bytes,
            buffer.page_stride_bytes,
            num_pages,
        )
        if parts > 1 and pitch * parts == stride:
            stride, count, parts = pitch, count * parts, 1
        for part in range(parts):
            at = start + part * pitch
            if count == 1 or stride == length:
                yield Strided(at, length * count, 0, 1, owner)
            else:
                yield Strided(at, length, stride, count, owner)


def _clusters(pieces: Iterable[Strided]) -> Iterator[list[Strided]]:
    """Yield those whose extents overlap, directly or through others; the rest are apart."""
    cluster: list[Strided] = []
    end = 0
    for piece in sorted(pieces, key=lambda each: each.start):
        if cluster and piece.start >= end:
            yield cluster
            cluster = []
        end = max(end, piece.end) if cluster else piece.end
        cluster.append(piece)
    if cluster:
        yield cluster


def _are_apart(cluster: Sequence[Strided]) -> bool:
    """Whether places alone tell that none share bytes: within the stride that all have in common.

    So it is where layers or halves lie side by side in every block. False says nothing.
    """
    period = math.gcd(*(piece.stride for piece in cluster))
    if period == 0:
        return False
    places = sorted((piece.start % period, piece.length) for piece in cluster)
    places.append((places[0][0] + period, 0))
    return all(
        place + length <= after for (place, length), (after, _) in itertools.pairwise(places)
    )


def _neighbours(cluster: Sequence[Strided]) -> Iterator[tuple[Strided, Strided]]:
    """Yield the pairs of different owners whose extents overlap; `cluster` ascends."""
    open_: list[Strided] = []
    for piece in cluster:
        open_ = [other for other in open_ if other.end > piece.start]
        for other in open_:
            if other.owner != piece.owner:
                yield other, piece
        open_.append(piece)


def _share(one: Strided, other: Strided) -> bool:
    """Whether two have a byte in common."""
    if one.stride == other.stride and one.stride:
        # Piece i of one meets piece i + k of the other where they begin less than a length apart.
        apart = other.start - one.start
        least = -((apart + other.length - 1) // one.stride)
        most = (one.length - 1 - apart) // one.stride
        return max(least, 1 - one.count) <= min(most, other.count - 1)
    if one.count > other.count:
        one, other = other, one
    step, stride = max(1, one.stride), max(1, other.stride)
    first = max(0, -((one.start + one.length - 1 - other.start) // step))
    last = min(one.count - 1, (other.end - 1 - one.start) // step)
    for begin in range(first, last + 1, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, last + 1), dtype=np.int64)
        apart_ = numbers * step + (one.start - other.start)
        # Pieces of the other that end behind this one's first byte, and begin before its last.
        least_ = np.maximum(-((other.length - 1 - apart_) // stride), 0)
        most_ = np.minimum((apart_ + one.length - 1) // stride, other.count - 1)
        if (least_ <= most_).any():
            return True
    return False
