"""Contiguous runs of a page, derived from the sizes and strides of a tensor."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import LayoutError

MAX_RUNS = 4096
"""Runs of one page in one buffer, beyond which a layout is refused as too scattered."""


@dataclass(frozen=True)
class Run:
    """`count` contiguous parts of `length_bytes` each, `pitch_bytes` apart, in every page.

    In the object the parts follow each other without a gap. Where the page's tokens are known,
    byte b of part p belongs to token
    `(token_start_bytes + p * token_part_bytes + b) // token_bytes`.

    Attributes:
        offset_bytes: from the page's first byte to the first part.
        length_bytes: length of a part.
        count: how many parts.
        pitch_bytes: from one part to the next; equals `length_bytes` where `count` is 1.
        token_bytes: see above; 0 where the page is not cut by tokens.
        token_part_bytes: see above.
        token_start_bytes: see above.
    """

    offset_bytes: int
    length_bytes: int
    count: int
    pitch_bytes: int
    token_bytes: int = 0
    token_part_bytes: int = 0
    token_start_bytes: int = 0


@dataclass(frozen=True)
class _Level:
    """A dimension, or several that continue each other: `size` steps of `stride` bytes.

    `inner` is how many of the steps one token takes, where the tokens' dimension is among them.
    """

    size: int
    stride: int
    inner: int = 0


def page_runs(
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    num_pages: int,
    page_stride_bytes: int,
    token_axis: int | None = None,
) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """Return the order of a page's dimensions in memory, and its runs in that order.

    Args:
        shape: the page's sizes.
        strides_bytes: its strides, one per dimension.
        item_bytes: size of an element.
        num_pages: how many pages the tensor holds.
        page_stride_bytes: from one page to the next.
        token_axis: the dimension that counts tokens. If given, the runs are such that their tokens
            can be told; there may be more of them.

    Returns:
        The dimensions of more than one entry, slowest first, and the runs, ascending in memory.

    Raises:
        LayoutError: elements overlap (a stride of 0, an expanded view), or the page falls into
            more than `MAX_RUNS` runs.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    order = sorted(dims, key=lambda dim: (-strides_bytes[dim], dim))
    nested = [
        _Level(shape[dim], strides_bytes[dim], 1 if dim == token_axis else 0) for dim in order
    ]
    pages = [_Level(num_pages, page_stride_bytes)] if num_pages > 1 else []
    _refuse_overlap([*nested, *pages], item_bytes)
    length, token_bytes = item_bytes, 0
    while nested and nested[-1].stride == length and not token_bytes:
        level = nested.pop()
        token_bytes = length if level.inner else 0
        length *= level.size
    levels = _joined(nested)
    last = levels.pop() if levels else _Level(1, length)
    num_runs = math.prod(level.size for level in levels)
    if num_runs > MAX_RUNS:
        raise LayoutError(
            f"a page falls into {num_runs} runs at a pitch, wanted at most {MAX_RUNS}"
        )
    part_bytes = 0
    if last.inner:  # some parts make a token
        token_bytes, part_bytes = last.inner * length, length
    is_one_token = token_axis is not None and shape[token_axis] == 1
    runs = []
    for indices in itertools.product(*(range(level.size) for level in levels)):
        steps = list(zip(indices, levels, strict=True))
        start = sum(index * level.stride for index, level in steps)
        tokens = [index // level.inner for index, level in steps if level.inner]
        if tokens or is_one_token:  # the whole run belongs to one token
            token_bytes, part_bytes = last.size * length, length
        runs.append(
            Run(
                start,
                length,
                last.size,
                last.stride,
                token_bytes,
                part_bytes,
                tokens[0] * token_bytes if tokens else 0,
            )
        )
    return tuple(order), tuple(runs)


def _joined(nested: Sequence[_Level]) -> list[_Level]:
    """Join neighbours, outer to inner, that continue each other; nothing joins outside tokens."""
    levels: list[_Level] = []
    for level in nested:
        outer = levels[-1] if levels else None
        if outer and outer.stride == level.size * level.stride and not level.inner:
            levels[-1] = _Level(outer.size * level.size, level.stride, outer.inner * level.size)
        else:
            levels.append(level)
    return levels


def _refuse_overlap(levels: Sequence[_Level], item_bytes: int) -> None:
    extent = item_bytes
    for level in sorted(levels, key=lambda level: level.stride):
        if level.stride < extent:
            raise LayoutError(
                f"elements overlap: {level.size} entries at a stride of {level.stride} bytes, "
                f"wanted a stride of at least {extent}"
            )
        extent = (level.size - 1) * level.stride + extent
