"""Reading what ranks of another number wrote: which of their objects, and which bytes of each.

Every writer stores its own share of a page. `plan_reshard` finds, for one reader rank, the writers
whose objects hold its share, and the segments by which a `Packer` unpacks each of them into the
reader's pools. It refuses, with the reason, what cannot be cut and joined.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.arguments import flag, of_type
from kvferry.cyclic import pages_per_page
from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.object_order import rest_dims
from kvferry.pools import Pool
from kvferry.segments import Segment
from kvferry.slices import Slice, deal_of, segments_of, slices_of


@dataclass(frozen=True)
class ByteRange:
    """Bytes `[offset_bytes, offset_bytes + num_bytes)` of an object, all of one layer."""

    layer_id: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class ReshardSource:
    """One writer's object, and what a reader takes from it.

    Attributes:
        space: the index space of the object and of the reader's pages.
        layout: the writer rank's, unbound; `KeyScheme.of` makes the objects' keys of it.
        writer_page: which of the writer's pages, where a reader's page holds several; else 0.
        reader_page: which of the reader's pages, where a writer's page holds several; else 0.
        segments: for a `Packer` of the reader's layout; offsets count in the writer's object.
    """

    space: str
    layout: CacheLayout
    writer_page: int
    reader_page: int
    segments: tuple[Segment, ...]

    @property
    def identity(self) -> ModelIdentity:
        """Whose object it is."""
        return self.layout.identity

    @property
    def object_bytes(self) -> int:
        """Size of the whole object."""
        return self.layout.object_bytes[self.space]

    @property
    def num_bytes(self) -> int:
        """Bytes of the object that are needed."""
        return sum(segment.num_bytes for segment in self.segments)

    def byte_ranges(self, *, gap_bytes: int = 0) -> tuple[ByteRange, ...]:
        """Return the ranges of the object that suffice, ascending, none across two layers.

        Their number and length tell whether ranged reads pay, or the whole object is the better
        read.

        Args:
            gap_bytes: join ranges of a layer that are at most so far apart.
        """
        ranges: list[ByteRange] = []
        needed = sorted(
            (segment.layer_id, segment.object_offset + part * segment.object_pitch_bytes,
             segment.part_bytes)
            for segment in self.segments
            for part in range(segment.count)
        )  # fmt: skip
        for layer_id, offset, length in needed:
            last = ranges[-1] if ranges else None
            if (
                last
                and last.layer_id == layer_id
                and offset <= last.offset_bytes + last.num_bytes + gap_bytes
            ):
                ranges[-1] = replace(last, num_bytes=offset + length - last.offset_bytes)
            else:
                ranges.append(ByteRange(layer_id, offset, length))
        return tuple(ranges)


@dataclass(frozen=True)
class ReshardPlan:
    """All that one reader rank reads.

    Attributes:
        sources: in the order of index spaces, pages and writer ranks.
        writer_pages: how many of the writer's pages make one page of the reader. Above 1, reader
            page i holds the writer's pages `i * writer_pages + source.writer_page`.
        reader_pages: how many of the reader's pages a page of the writer holds. Above 1, reader
            page i lies in the writer's page `i // reader_pages`, and takes the sources whose
            `reader_page` is `i % reader_pages`.
    """

    sources: tuple[ReshardSource, ...]
    writer_pages: int
    reader_pages: int

    def sources_of(self, space: str, reader_page: int = 0) -> tuple[ReshardSource, ...]:
        """Return the sources of one index space's pages; together they fill the page once."""
        return tuple(
            source
            for source in self.sources
            if source.space == space and source.reader_page == reader_page
        )

    def page_pairs(self, source: ReshardSource, num_pages: int) -> list[tuple[int, int]]:
        """Return `(reader's page, writer's page)` for each page that a source helps to fill.

        Args:
            source: one of `sources`.
            num_pages: of the reader, counted from the beginning of a prefix as all pages here. In
                the state space pages of both are counted alike.
        """
        return [
            (page, page // self.reader_pages * self.writer_pages + source.writer_page)
            for page in range(source.reader_page, num_pages, self.reader_pages)
        ]


def plan_reshard(
    writer: CacheLayout, reader: CacheLayout, *, dcp_in_tp: bool = True, by_token: bool = False
) -> ReshardPlan:
    """Plan how one rank reads objects that ranks of the same or another number wrote.

    Args:
        writer: the layout of any one of the writers, bound or not; `identity.tp` and
            `identity.dcp` tell how many there are.
        reader: the reader's own, whose `identity` says which rank it is. Unbound, the segments
            count from address 0 and only describe.
        dcp_in_tp: whether the writers' decode-context rank is their tensor-parallel rank modulo
            the number of the former, as in SGLang and vLLM. If not, every pair of ranks exists.
        by_token: such that the segments' tokens can be told, for pages that are moved in part.

    Raises:
        LayoutError: what was written cannot be read so; says why.
    """
    of_type("writer", writer, CacheLayout, error=LayoutError)
    of_type("reader", reader, CacheLayout, error=LayoutError)
    flag("dcp_in_tp", dcp_in_tp)
    flag("by_token", by_token)
    _check_identities(writer, reader, dcp_in_tp)
    deals = deal_of(writer), deal_of(reader)
    reader_pages, writer_pages = pages_per_page(*deals)
    sources = []
    for space in reader.spaces:
        pairs = [(_written(writer, pool), pool) for pool in reader.pools if pool.space == space]
        if space == "state" and reader_pages * writer_pages > 1:
            raise LayoutError(
                f"pool {pairs[0][1].name!r}: a state stands at the end of a page, and the reader's "
                f"pages have {deals[1]}, the writer's {deals[0]}: wanted as many tokens"
            )
        for reader_page in range(reader_pages):
            for writer_page in range(writer_pages):
                slices = [
                    piece
                    for written, pool in pairs
                    for piece in slices_of(
                        writer, written, reader, pool, writer_page, reader_page, dcp_in_tp
                    )
                ]
                for rank, taken in sorted(_choose(slices, writer, reader).items()):
                    source = _of_rank(writer, rank)
                    segments = segments_of(source, reader, space, taken, by_token)
                    sources.append(ReshardSource(space, source, writer_page, reader_page, segments))
    return ReshardPlan(tuple(sources), writer_pages, reader_pages)


def _of_rank(writer: CacheLayout, rank: tuple[int, int]) -> CacheLayout:
    identity = writer.identity
    return writer.of_rank(
        replace(identity, tp=(rank[0], identity.tp[1]), dcp=(rank[1], identity.dcp[1]))
    )


def _check_identities(writer: CacheLayout, reader: CacheLayout, dcp_in_tp: bool) -> None:
    for name in (
        "model", "revision", "config", "generation", "kv_dtype", "draft", "pp", "layers", "cp",
    ):  # fmt: skip
        wrote, wanted = getattr(writer.identity, name), getattr(reader.identity, name)
        if wrote != wanted:
            raise LayoutError(f"{name}: the writer has {wrote!r}, the reader {wanted!r}")
    if writer.num_layers != reader.num_layers:
        raise LayoutError(
            f"num_layers: the writer has {writer.num_layers}, the reader {reader.num_layers}"
        )
    (tp_rank, tp_size), (dcp_rank, dcp_size) = writer.identity.tp, writer.identity.dcp
    if dcp_in_tp and (tp_size % dcp_size or tp_rank % dcp_size != dcp_rank):
        raise LayoutError(
            f"writer: rank {tp_rank} of {tp_size} in tp is rank {dcp_rank} of {dcp_size} in dcp, "
            "wanted tp rank modulo dcp size, and a tp size that is a multiple of it; or pass "
            "dcp_in_tp=False"
        )


def _written(writer: CacheLayout, pool: Pool) -> Pool:
    """Return the writer's pool of that name, checked against the reader's."""
    named = {each.name: each for each in writer.pools}
    if pool.name not in named:
        raise LayoutError(f"pool {pool.name!r}: the writer has {sorted(named)} only")
    written = named[pool.name]
    missing = sorted(set(pool.layer_ids) - set(written.layer_ids))
    if missing:
        raise LayoutError(f"pool {pool.name!r} layer {missing[0]}: the writer has no such layer")
    facts = (
        ("index space", written.space, pool.space),
        ("dtype", written.dtype, pool.dtype),
        ("token_planes", written.token_planes, pool.token_planes),
        ("token_axis", _has(written.token_axis), _has(pool.token_axis)),
        ("shard_axis", _has(written.shard_axis), _has(pool.shard_axis)),
        ("shard_totals", written.shard_totals, pool.shard_totals),
    )
    for what, wrote, wanted in facts:
        if wrote != wanted:
            raise LayoutError(
                f"pool {pool.name!r}: {what} is {wrote} for the writer, {wanted} for the reader"
            )
    if not pool.token_planes and _rest_sizes(written) != _rest_sizes(pool):
        raise LayoutError(
            f"pool {pool.name!r}: beside tokens and the sharded axis a page has dimensions "
            f"{_rest_sizes(written)} for the writer, {_rest_sizes(pool)} for the reader: one "
            "order in memory cannot be made from the other"
        )
    return written


def _has(axis: int | None) -> str:
    return "not described" if axis is None else "described"


def _rest_sizes(pool: Pool) -> list[int]:
    return [pool.page_shape[dim] for dim in rest_dims(pool)]


def _choose(
    slices: Sequence[Slice], writer: CacheLayout, reader: CacheLayout
) -> Mapping[tuple[int, int], list[Slice]]:
    """Give each slice to one of its holders.

    The writer at the reader's own place in proportion has some of its bytes in every pool, so that
    the holders next to it make the fewest objects, and readers spread over replicas.
    """
    place = reader.identity.tp[0] * writer.identity.tp[1] // reader.identity.tp[1]
    chosen: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for piece in slices:
        chosen[min(piece.holders, key=lambda each: (abs(each[0] - place), each))].append(piece)
    return chosen
