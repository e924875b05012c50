"""Nested dimensions, each with a stride in the pool and one in the object, as few segments."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.errors import LayoutError
from kvferry.runs import MAX_RUNS
from kvferry.segments import Segment


@dataclass(frozen=True)
class Dimension:
    """`size` steps, at one stride in the pool and another in the object.

    Attributes:
        size: how many entries.
        pool_stride_bytes: from one entry to the next in the pool.
        object_stride_bytes: the same in the object.
        token_step: tokens of the pool's page from one entry to the next; 0 if it counts no tokens.
    """

    size: int
    pool_stride_bytes: int
    object_stride_bytes: int
    token_step: int = 0


def nested_segments(
    element: Segment, dimensions: Sequence[Dimension], *, token: int | None = None
) -> list[Segment]:
    """Return segments that move every combination of entries once.

    Args:
        element: the first element: one part, `part_bytes` long.
        dimensions: in any order; at most one counts tokens.
        token: the first element's token of the page, if the segments' tokens must be told. There
            may be more segments then.

    Raises:
        LayoutError: more than `MAX_RUNS` segments.
    """
    levels = [dimension for dimension in dimensions if dimension.size > 1]
    length, token_bytes = element.part_bytes, 0
    while not token_bytes:
        inner = next((level for level in levels if _continues(level, length, token)), None)
        if inner is None:
            break
        levels.remove(inner)
        token_bytes = length if token is not None and inner.token_step else 0
        length *= inner.size
    levels = _joined(levels, token)
    last = max(levels, key=lambda level: level.size, default=Dimension(1, length, length))
    outer = [level for level in levels if level is not last]
    num_segments = math.prod(level.size for level in outer)
    if num_segments > MAX_RUNS:
        raise LayoutError(
            f"a page falls into {num_segments} segments of {last.size} parts of {length} bytes, "
            f"wanted at most {MAX_RUNS}"
        )
    segments = []
    for indices in itertools.product(*(range(level.size) for level in outer)):
        steps = list(zip(indices, outer, strict=True))
        first = (token or 0) + sum(index * level.token_step for index, level in steps)
        # Without a dimension of tokens in the part, all of the part is one token's.
        width = 0 if token is None else token_bytes or length
        segments.append(
            replace(
                element,
                address=element.address + sum(i * level.pool_stride_bytes for i, level in steps),
                object_offset=element.object_offset
                + sum(i * level.object_stride_bytes for i, level in steps),
                part_bytes=length,
                count=last.size,
                pool_pitch_bytes=last.pool_stride_bytes,
                object_pitch_bytes=last.object_stride_bytes,
                token_bytes=width,
                token_part_bytes=last.token_step * width,
                token_start_bytes=first * width,
            )
        )
    return segments


def _continues(level: Dimension, length: int, token: int | None) -> bool:
    if token is not None and level.token_step > 1:
        return False
    return level.pool_stride_bytes == length and level.object_stride_bytes == length


def _joined(levels: Sequence[Dimension], token: int | None) -> list[Dimension]:
    """Join dimensions that continue each other on both sides; tokens stay apart if they count."""
    joined: list[Dimension] = []
    for level in sorted(levels, key=lambda each: -each.object_stride_bytes):
        outer = joined[-1] if joined else None
        if (
            outer
            and outer.pool_stride_bytes == level.size * level.pool_stride_bytes
            and outer.object_stride_bytes == level.size * level.object_stride_bytes
            and (token is None or not (outer.token_step or level.token_step))
        ):
            joined[-1] = Dimension(
                outer.size * level.size, level.pool_stride_bytes, level.object_stride_bytes
            )
        else:
            joined.append(level)
    return joined
