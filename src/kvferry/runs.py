"""Contiguous runs of a page, derived from the sizes and strides of a tensor."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import LayoutError

MAX_RUNS = 4096
"""Runs of one page in one buffer, beyond which a layout is refused as too scattered."""


@dataclass(frozen=True)
class Run:
    """`count` contiguous parts of `length_bytes` each, `pitch_bytes` apart, in every page.

    In the object the parts follow each other without a gap.

    Attributes:
        offset_bytes: from the page's first byte to the first part.
        length_bytes: length of a part.
        count: how many parts.
        pitch_bytes: from one part to the next; equals `length_bytes` where `count` is 1.
    """

    offset_bytes: int
    length_bytes: int
    count: int
    pitch_bytes: int


def page_runs(
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    num_pages: int,
    page_stride_bytes: int,
) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """Return the order of a page's dimensions in memory, and its runs in that order.

    Args:
        shape: the page's sizes.
        strides_bytes: its strides, one per dimension.
        item_bytes: size of an element.
        num_pages: how many pages the tensor holds.
        page_stride_bytes: from one page to the next.

    Returns:
        The dimensions of more than one entry, slowest first, and the runs, ascending in memory.

    Raises:
        LayoutError: elements overlap (a stride of 0, an expanded view), or the page falls into
            more than `MAX_RUNS` runs.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    order = sorted(dims, key=lambda dim: (-strides_bytes[dim], dim))
    nested = [(shape[dim], strides_bytes[dim]) for dim in order]
    pages = [(num_pages, page_stride_bytes)] if num_pages > 1 else []
    _refuse_overlap([*nested, *pages], item_bytes)
    length = item_bytes
    while nested and nested[-1][1] == length:
        length *= nested.pop()[0]
    levels: list[tuple[int, int]] = []  # outer to inner, neighbours that continue each other joined
    for size, stride in nested:
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    count, pitch = levels.pop() if levels else (1, length)
    starts = (
        [
            sum(index * stride for index, (_, stride) in zip(indices, levels, strict=True))
            for indices in itertools.product(*(range(size) for size, _ in levels))
        ]
        if _product(levels) <= MAX_RUNS
        else []
    )
    if not starts:
        raise LayoutError(
            f"a page falls into {_product(levels)} runs at a pitch, wanted at most {MAX_RUNS}"
        )
    return tuple(order), tuple(Run(start, length, count, pitch) for start in starts)


def _product(levels: Sequence[tuple[int, int]]) -> int:
    product = 1
    for size, _ in levels:
        product *= size
    return product


def _refuse_overlap(levels: Sequence[tuple[int, int]], item_bytes: int) -> None:
    extent = item_bytes
    for size, stride in sorted(levels, key=lambda level: level[1]):
        if stride < extent:
            raise LayoutError(
                f"elements overlap: {size} entries at a stride of {stride} bytes, wanted a stride "
                f"of at least {extent}"
            )
        extent = (size - 1) * stride + extent
