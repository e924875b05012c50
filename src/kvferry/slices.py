"""What a reader's page and a writer's object have in common: heads and tokens, as segments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvferry.buffers import Buffer
from kvferry.cyclic import Deal, Rows, common_rows
from kvferry.errors import LayoutError
from kvferry.layout import CacheLayout
from kvferry.nests import Dimension, nested_segments
from kvferry.object_order import first_element, rest_dims
from kvferry.pools import Pool
from kvferry.segments import Segment
from kvferry.sharding import held_by, pieces, starts


@dataclass(frozen=True)
class Slice:
    """Part of a page that some writers hold: entries of the sharded axis, and rows of tokens.

    `rows` is None where the page is not cut by tokens. Without a sharded axis, 0, 0 and 1.
    """

    pool: Pool
    rows: Rows | None
    reader_first: int
    writer_first: int
    size: int
    holders: tuple[tuple[int, int], ...]  # (tp rank, dcp rank)


def deal_of(layout: CacheLayout) -> Deal:
    """Return how a layout's pages are dealt out to its decode-context ranks."""
    return Deal(layout.page_size, layout.identity.dcp[1])


def slices_of(
    writer: CacheLayout,
    written: Pool,
    reader: CacheLayout,
    pool: Pool,
    writer_page: int,
    reader_page: int,
    dcp_in_tp: bool,
) -> Iterator[Slice]:
    """Yield the slices of one pool that a pair of pages has in common."""
    tp_size, dcp_size = writer.identity.tp[1], writer.identity.dcp[1]
    for dcp_rank, rows in _rows(writer, reader, pool, writer_page, reader_page):
        for reader_first, writer_first, size, ranks in _axis(written, tp_size, pool, reader):
            if dcp_rank is None:  # a state is on all of them
                rank = reader.identity.dcp[0] * dcp_size // reader.identity.dcp[1]
                holders = [(tp, tp % dcp_size if dcp_in_tp else rank) for tp in ranks]
            else:
                holders = [
                    (tp, dcp_rank) for tp in ranks if not dcp_in_tp or tp % dcp_size == dcp_rank
                ]
            if not holders:
                raise LayoutError(
                    f"pool {pool.name!r}: the writers' tp ranks {ranks[0]} .. {ranks[-1]} hold the "
                    f"same entries, and none of them owns the tokens of dcp rank {dcp_rank}"
                )
            yield Slice(pool, rows, reader_first, writer_first, size, tuple(holders))


def _rows(
    writer: CacheLayout, reader: CacheLayout, pool: Pool, writer_page: int, reader_page: int
) -> Iterator[tuple[int | None, Rows | None]]:
    """Yield each writer dcp rank that has tokens of the reader's page, and which ones."""
    deals, rank = (deal_of(writer), deal_of(reader)), reader.identity.dcp[0]
    if pool.space == "state":
        yield None, None
    elif deals[0] == deals[1]:
        yield rank, None
    elif pool.token_axis is None and not pool.token_planes:
        raise LayoutError(
            f"pool {pool.name!r}: its pages cannot be cut by tokens, and the reader's have "
            f"{deals[1]}, the writer's {deals[0]}: describe token_axis or token_planes"
        )
    else:
        for dcp_rank in range(deals[0].size):
            rows = common_rows(
                deals[0], dcp_rank, deals[1], rank,
                writer_page=writer_page, reader_page=reader_page,
            )  # fmt: skip
            if rows is not None:
                yield dcp_rank, rows


def _axis(
    written: Pool, tp_size: int, pool: Pool, reader: CacheLayout
) -> list[tuple[int, int, int, range]]:
    """Return entries of the sharded axis: the reader's first, the writer's first, size, ranks."""
    if pool.shard_axis is None:
        return [(0, 0, 1, range(tp_size))]
    rank, reader_size = reader.identity.tp
    parts = zip(
        starts(pool.shard_parts), pool.shard_parts,
        starts(written.shard_parts), written.shard_parts, pool.shard_totals,
        strict=True,
    )  # fmt: skip
    found: list[tuple[int, int, int, range]] = []
    for reader_start, wanted, writer_start, local, total in parts:
        mine = held_by(rank, wanted, total, reader_size)
        for piece in pieces(local, total, tp_size):
            first = max(mine.first, piece.first)
            size = min(mine.first + mine.size, piece.first + piece.size) - first
            if size <= 0:
                continue
            inner = reader_start + first - mine.first
            outer = writer_start + first - piece.first
            last = found[-1] if found else None
            if (
                last
                and last[3] == piece.ranks
                and ((inner, outer) == (last[0] + last[2], last[1] + last[2]))
            ):  # parts that both sides hold whole
                found[-1] = (last[0], last[1], last[2] + size, piece.ranks)
            else:
                found.append((inner, outer, size, piece.ranks))
    return found


def segments_of(
    source: CacheLayout,
    reader: CacheLayout,
    space: str,
    slices: Sequence[Slice],
    by_token: bool,
) -> tuple[Segment, ...]:
    """Return what moves slices of a source's object into the reader's pools, by layer.

    Raises:
        LayoutError: `by_token`, and a pool's pages cannot be cut by tokens; names it.
    """
    by_token = by_token and space != "state"
    page_sizes = source.page_size, reader.page_size
    objects = {(each.pool.name, each.layer_id): each for each in source.buffers[space]}
    segments: list[Segment] = []
    for buffer in reader.buffers[space]:
        for piece in slices:
            if piece.pool.name == buffer.pool.name:
                placed = objects[buffer.pool.name, buffer.layer_id]
                # What fills a page behind its tokens moves only where whole pages are alike.
                alike = buffer.pool.page_shape == placed.pool.page_shape
                segments.extend(
                    _of_planes(buffer, placed, piece, page_sizes)
                    if buffer.pool.token_planes and (piece.rows or by_token or not alike)
                    else _of_slice(buffer, placed, piece, by_token)
                )
    return tuple(sorted(segments, key=lambda each: (each.layer_id, each.object_offset)))


def _of_slice(buffer: Buffer, placed: Buffer, piece: Slice, by_token: bool) -> list[Segment]:
    """Return the segments of a slice: `buffer` in the reader's pool, `placed` in the object."""
    pool, written = buffer.pool, placed.pool
    inner, outer = buffer.page_strides, placed.object_strides
    dimensions = [
        Dimension(pool.page_shape[dim], inner[dim], outer[twin])
        for dim, twin in zip(rest_dims(pool), rest_dims(written), strict=True)
    ]
    address, offset = buffer.address, placed.object_offset
    if pool.shard_dim is not None and written.shard_dim is not None:
        address += piece.reader_first * inner[pool.shard_dim]
        offset += piece.writer_first * outer[written.shard_dim]
        dimensions.append(Dimension(piece.size, inner[pool.shard_dim], outer[written.shard_dim]))
    token = None
    if pool.token_axis is not None and written.token_axis is not None:
        rows = piece.rows or Rows(pool.page_shape[pool.token_axis], 0, 1, 0, 1)
        stride, twin = inner[pool.token_axis], outer[written.token_axis]
        address += rows.reader_first * stride
        offset += rows.writer_first * twin
        dimensions.append(
            Dimension(
                rows.count, rows.reader_step * stride, rows.writer_step * twin, rows.reader_step
            )
        )
        token = rows.reader_first if by_token else None
    elif by_token:
        raise LayoutError(
            f"pool {pool.name!r} layer {buffer.layer_id}: its pages cannot be cut by tokens; "
            "describe token_axis or token_planes, or move whole pages"
        )
    element = replace(first_element(buffer, pool.item_bytes), address=address, object_offset=offset)
    return nested_segments(element, dimensions, token=token)


def _of_planes(
    buffer: Buffer, placed: Buffer, piece: Slice, page_sizes: tuple[int, int]
) -> Iterator[Segment]:
    """Yield the segments of tokens in pages of planes; what fills a page behind them stays."""
    if not (buffer.has_planes and placed.has_planes):
        raise LayoutError(
            f"pool {buffer.pool.name!r} layer {buffer.layer_id}: a page of token_planes lies in "
            "several runs in memory, wanted one"
        )
    writer_rows, reader_rows = page_sizes
    rows = piece.rows or Rows(reader_rows, 0, 1, 0, 1)
    before = 0
    for width in buffer.pool.token_planes:
        element = replace(
            first_element(buffer, width),
            address=buffer.address + before * reader_rows + rows.reader_first * width,
            object_offset=placed.object_offset + before * writer_rows + rows.writer_first * width,
        )
        step = Dimension(
            rows.count, rows.reader_step * width, rows.writer_step * width, rows.reader_step
        )
        yield from nested_segments(element, [step], token=rows.reader_first)
        before += width
