"""The layout that the same engine has for the same model on another number of ranks."""

from dataclasses import replace
from typing import Any

from kvferry.arguments import of_type, whole_number
from kvferry.errors import LayoutError
from kvferry.layout import CacheLayout
from kvferry.pools import MOST, Pool

MOST_RANKS = 1 << 20


def layout_for(
    layout: CacheLayout, *, tp_size: int, dcp_size: int = 1, page_size: int | None = None
) -> CacheLayout:
    """Return rank 0's unbound layout on other numbers of ranks, to plan reads of its objects.

    Args:
        layout: any rank's, bound or not, with its sharded axes described.
        tp_size: tensor-parallel ranks. Parts of an axis that they do not divide are taken to be
            held by several of them.
        dcp_size: decode-context ranks.
        page_size: rows of a page on each rank; those of `layout` by default.

    Raises:
        LayoutError: an axis cannot be shared out so, or a pool's pages have no other size.
    """
    of_type("layout", layout, CacheLayout, error=LayoutError)
    tp_size = whole_number("tp_size", tp_size, 1, MOST_RANKS, error=LayoutError)
    dcp_size = whole_number("dcp_size", dcp_size, 1, MOST_RANKS, error=LayoutError)
    rows = layout.page_size
    if page_size is not None:
        rows = whole_number("page_size", page_size, 1, MOST, error=LayoutError)
    plain = layout.description()
    for pool, entry in zip(layout.pools, plain["pools"], strict=True):
        _share_out(pool, entry, tp_size)
        if rows != layout.page_size:
            _resize(pool, entry, layout.page_size, rows)
        # A dimension that had one entry has no place in the order; alone it changes nothing.
        if list(pool.order) == sorted(pool.order) or layout.order == "canonical":
            entry["order"] = None
    plain["page_size"] = rows
    identity = replace(layout.identity, tp=(0, tp_size), dcp=(0, dcp_size))
    return CacheLayout.from_description(plain, identity=identity)


def _share_out(pool: Pool, entry: dict[str, Any], tp_size: int) -> None:
    if pool.shard_axis is None:
        return
    parts = [
        # Fewer entries than ranks: heads, of which a rank cannot hold less than one.
        total // tp_size if total >= tp_size else 1
        for total in pool.shard_totals
    ]
    entry["shard_parts"] = parts
    entry["row_shape"][pool.shard_axis] = sum(parts)


def _resize(pool: Pool, entry: dict[str, Any], old: int, new: int) -> None:
    if pool.rows == "token" or pool.space == "state":
        return
    if pool.token_axis is not None:
        entry["row_shape"][pool.token_axis] = new
    elif sum(pool.token_planes) * old == pool.page_bytes and len(pool.row_shape) == 1:
        entry["row_shape"] = [pool.row_shape[0] * new // old]
    else:
        raise LayoutError(
            f"pool {pool.name!r}: a page of {old} rows has shape {pool.page_shape}, and nothing "
            f"tells that of {new} rows: describe token_axis or token_planes"
        )
