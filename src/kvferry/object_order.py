"""Where a page's bytes lie in its object: as in the pool's memory, or by head.

`pool` order copies pages as they are, the fewest runs for one rank's own use. `canonical` order is
(layer, head, pool, tokens, rest): pools of a head group are interleaved by head, so that a range of
heads is one range of the layer, whatever the pool's order in memory. Layers are contiguous in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import LayoutError
from kvferry.nests import Dimension, nested_segments
from kvferry.segments import Segment

if TYPE_CHECKING:
    from kvferry.buffers import Buffer
    from kvferry.pools import Pool

ORDERS = ("pool", "canonical")


@dataclass(frozen=True)
class Place:
    """One pool's page in the object, in one layer.

    Attributes:
        offset_bytes: of its first entry, from the layer's first byte.
        strides_bytes: from one entry to the next, for each of the page's dimensions.
    """

    offset_bytes: int
    strides_bytes: tuple[int, ...]


def dense_strides(
    page_shape: Sequence[int], dims: Sequence[int], item_bytes: int
) -> tuple[int, ...]:
    """Return the strides of a page whose dimensions lie without a gap, `dims` slowest first.

    Dimensions that `dims` leaves out have one entry.
    """
    strides, step = [0] * len(page_shape), item_bytes
    left_out = [dim for dim in range(len(page_shape)) if dim not in dims]
    for dim in reversed([*left_out, *dims]):
        strides[dim] = step
        step *= page_shape[dim]
    return tuple(strides)


def rest_dims(pool: "Pool") -> list[int]:
    """Return the page's dimensions that are neither sharded nor tokens, if they have entries."""
    named = (pool.shard_dim, pool.token_axis)
    return [dim for dim, size in enumerate(pool.page_shape) if size > 1 and dim not in named]


def canonical_dims(pool: "Pool") -> list[int]:
    """Return the page's dimensions in canonical order, slowest first."""
    first = [dim for dim in (pool.shard_dim, pool.token_axis) if dim is not None]
    return [*first, *rest_dims(pool)]


def canonical_meaning(pool: "Pool") -> list[Any]:
    """Return what tells a pool's bytes in canonical order, the same for any order in memory."""
    return [
        pool.name,
        pool.space,
        None if pool.shard_dim is None else pool.page_shape[pool.shard_dim],
        pool.token_axis is not None,
        [pool.page_shape[dim] for dim in rest_dims(pool)],
        pool.dtype,
        pool.layer_ids,
        pool.head_group,
        pool.token_planes,
        pool.shard_parts,
        pool.shard_totals,
    ]


def check_groups(pools: Sequence["Pool"]) -> None:
    """Check that the pools of each head group of an index space have the same heads.

    Raises:
        LayoutError: they have not; names the two pools.
    """
    first: dict[tuple[str, str], Pool] = {}
    for pool in pools:
        if not pool.head_group:
            continue
        other = first.setdefault((pool.space, pool.head_group), pool)
        heads = (pool.shard_parts, pool.shard_totals)
        if heads != (other.shard_parts, other.shard_totals):
            raise LayoutError(
                f"pool {pool.name!r}: has {heads[0][0]} of {heads[1][0]} heads, wanted "
                f"{other.shard_parts[0]} of {other.shard_totals[0]} as pool {other.name!r} of "
                f"head_group {pool.head_group!r}"
            )


def places(pools: Sequence["Pool"], order: str) -> list[Place]:
    """Return the places of the pools that own a buffer in one layer of one index space."""
    if order == "pool":
        starts = _running([pool.page_bytes for pool in pools])
        return [
            Place(start, dense_strides(pool.page_shape, pool.order, pool.item_bytes))
            for start, pool in zip(starts, pools, strict=True)
        ]
    groups: dict[str, list[int]] = {}
    for number, pool in enumerate(pools):
        groups.setdefault(pool.head_group or f"/{number}", []).append(number)
    found: dict[int, Place] = {}
    start = 0
    for members in groups.values():
        head_bytes = [pools[number].page_bytes // _heads(pools[number]) for number in members]
        for number, inner in zip(members, _running(head_bytes), strict=True):
            pool = pools[number]
            strides = list(dense_strides(pool.page_shape, canonical_dims(pool), pool.item_bytes))
            if pool.shard_dim is not None:
                strides[pool.shard_dim] = sum(head_bytes)
            found[number] = Place(start + inner, tuple(strides))
        start += sum(pools[number].page_bytes for number in members)
    return [found[number] for number in range(len(pools))]


def _heads(pool: "Pool") -> int:
    return 1 if pool.shard_dim is None else pool.page_shape[pool.shard_dim]


def _running(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def first_element(buffer: "Buffer", item_bytes: int) -> Segment:
    """Return the segment of a page's first element alone, to build others from."""
    return Segment(
        buffer.layer_id,
        buffer.tensor,
        buffer.address,
        buffer.page_stride_bytes,
        buffer.num_pages,
        buffer.object_offset,
        item_bytes,
        1,
        item_bytes,
        item_bytes,
    )


def strided_segments(buffer: "Buffer", *, by_token: bool = False) -> list[Segment]:
    """Return the segments of whole pages from the two sets of strides alone.

    Args:
        buffer: its pool has a `token_axis` where `by_token` is asked for.
        by_token: such that every segment's tokens can be told.
    """
    pool = buffer.pool
    dimensions = [
        Dimension(size, inner, outer, int(dim == pool.token_axis))
        for dim, (size, inner, outer) in enumerate(
            zip(pool.page_shape, buffer.page_strides, buffer.object_strides, strict=True)
        )
    ]
    element = first_element(buffer, pool.item_bytes)
    segments = nested_segments(element, dimensions, token=0 if by_token else None)
    return sorted(segments, key=lambda segment: segment.object_offset)
