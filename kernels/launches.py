"""From tables and a move to the launches that carry it out."""

from collections.abc import Hashable, Iterator, Sequence

from kvferry.kernels.bulk import bulk_launches, takes_bulk
from kvferry.kernels.device import SUM_ONLY
from kvferry.kernels.handles import Launch
from kvferry.kernels.pairs import pair_launches
from kvferry.kernels.tables import SUMMED_BYTES, Move, Tables
from kvferry.kernels.tiles import tile_launches
from kvferry.kernels.units import unit_launches
from kvferry.launch import LaunchConfig

_MAX_SHAPES = 4096


def launches_of(tables: Tables, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield the launches: of the page kernel, then of the short-run kernel, width by width.

    Where checksums are wanted, those of what goes by narrow units come last, from packed objects.
    """
    if tables.tiles is not None:
        long_runs = bulk_launches if takes_bulk(move, config) else tile_launches
        yield from long_runs(tables.tiles, move, config)
    for table in tables.units:
        if move.kind != SUM_ONLY or table.unit_bytes >= SUMMED_BYTES:
            yield from unit_launches(table, move, config)
    if tables.pairs is not None and move.with_sums:
        yield from pair_launches(tables.pairs, move, config)


class LaunchMemory:
    """Launches of one packer's earlier moves, found again by all of a move but its addresses.

    Pages' ids, objects and sums lie elsewhere in every call, the rest of a launch repeats: to work
    it out anew takes the host three times as long. Safe from any thread.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Move, tuple[Launch, ...]]] = {}

    def recall(self, move: Move, object_align_bytes: int) -> Sequence[Launch] | None:
        """Return the launches of a move like one that was remembered, else None."""
        known = self._known.get(_shape(move, object_align_bytes))
        if known is None:
            return None
        like, launches = known
        ids = move.ids_address - like.ids_address
        objects = move.object_address - like.object_address
        sums = move.sums_address - like.sums_address
        return [_shifted(launch, ids, objects, sums) for launch in launches]

    def remember(
        self, move: Move, object_align_bytes: int, launches: Iterator[Launch]
    ) -> Sequence[Launch]:
        """Keep a move's launches, and return them."""
        if len(self._known) >= _MAX_SHAPES:
            self._known.clear()
        known = self._known[_shape(move, object_align_bytes)] = (move, tuple(launches))
        return known[1]


def _shape(move: Move, object_align_bytes: int) -> Hashable:
    return (
        move.num_pages, move.kind, move.layer_ranges, move.stride_bytes, object_align_bytes,
        move.id_bytes, move.sums_address != 0, move.tail, move.tail_tokens,
    )  # fmt: skip


def _shifted(launch: Launch, ids: int, objects: int, sums: int) -> Launch:
    """Return a launch for memory elsewhere: all kernels begin with the same five arguments."""
    kernel, grid, old, constants, num_warps = launch
    arguments = (old[0], old[1] + ids, old[2] + objects, old[3], old[4] + sums, *old[5:])
    return Launch(kernel, grid, arguments, constants, num_warps)
