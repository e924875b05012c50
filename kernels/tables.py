"""Tables that tell the pack kernels where a page's bytes lie; made once per layout, kept on device.

A table depends on the pools' addresses and on how objects are aligned in memory, not on the pages
of a transfer, so that a call ships page ids and nothing else.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from kvferry.launch import LaunchConfig
from kvferry.segments import Segment

TILE_COLUMNS = 7
UNIT_COLUMNS = 13
SUMMED_BYTES = 8
"""Narrowest unit that is summed as it moves: what the checksum mixes at once, a pair of words."""

_UNCUT = -(1 << 40)  # where its tokens' bytes begin, if a segment is not cut: before any token
_TILE_ALIGN_BYTES = 128  # a cache line: two tiles of a run never share one


@dataclass(frozen=True)
class Table:
    """Rows of int64 on the pools' device, sorted by layer.

    Attributes:
        rows: `[num_rows, TILE_COLUMNS]` or `[num_rows, UNIT_COLUMNS]`.
        layer_starts: `num_layers + 1` row numbers: layer i has rows
            `[layer_starts[i], layer_starts[i + 1])`.
        unit_bytes: width of one access, 16 for the page kernel.
        max_units: most units of one page in a row; 0 for the page kernel.
        min_units: fewest of them.
        bytes_per_page: what all rows move for one page.
    """

    rows: torch.Tensor
    layer_starts: tuple[int, ...]
    unit_bytes: int
    max_units: int
    min_units: int
    bytes_per_page: int

    def row_address(self, row: int) -> int:
        """Return the device address of a row."""
        address, row_bytes = self._place
        return address + row * row_bytes

    @cached_property
    def _place(self) -> tuple[int, int]:
        return self.rows.data_ptr(), self.rows.stride(0) * self.rows.element_size()


class Move(NamedTuple):  # made for every launch, in a fifth of a frozen dataclass's time
    """One call's arguments, checked: which pages, which layers, where the objects are.

    Attributes:
        ids_address: address of `[num_pages]` page ids.
        id_bytes: 4 or 8.
        num_pages: pages to move, at least one.
        num_pool_pages: valid ids are under this.
        object_address: of object 0, such that the layout's offsets count from here.
        stride_bytes: from one object to the next.
        layer_ranges: `[first, end)` ranges of layer ids, ascending.
        kind: PACK, UNPACK or SUM_ONLY, see `device`.
        sums_address: address of `[num_pages, num_layers]` int64 that checksums are added to; 0 if
            none are wanted.
        num_layers: of the layout.
        tail: WHOLE, ZERO_TAIL or KEEP_TAIL, see `device`.
        tail_tokens: tokens of the last page that are moved, unless it is WHOLE.
    """

    ids_address: int
    id_bytes: int
    num_pages: int
    num_pool_pages: int
    object_address: int
    stride_bytes: int
    layer_ranges: tuple[tuple[int, int], ...]
    kind: int
    sums_address: int = 0
    num_layers: int = 0
    tail: int = 0
    tail_tokens: int = 0

    @property
    def with_sums(self) -> bool:
        """Whether checksums are wanted."""
        return self.sums_address != 0


@dataclass(frozen=True)
class Tables:
    """All that one index space needs.

    `tiles` is for the page kernel, `units` for the short runs, and `pairs` for the checksums of
    what goes by narrow units.

    `tiles` rows: address at page 0, page stride, offset in the object, bytes, a token's bytes, how
    far into its tokens' bytes the tile begins, and the layer.
    `units` rows, one per segment: address at page 0, page stride, offset in the object, units in
    one part, units in a page, pitch in the pool, pitch in the object, the multipliers of the
    divisions by the two numbers of units (see `divisor`), a token's bytes, how the tokens' bytes
    advance by part, where they begin (see `Segment`), and the layer.
    `pairs` rows, one for every stretch: its first byte in the object and the one behind its last,
    pairs of words that it touches, the multiplier of the division by that, and the layer.
    """

    tiles: Table | None
    units: tuple[Table, ...] = field(default=())
    pairs: Table | None = None


def build_tables(
    segments: Sequence[Segment],
    num_layers: int,
    device: torch.device,
    object_align_bytes: int,
    config: LaunchConfig,
    *,
    fill_layers: bool = True,
) -> Tables:
    """Return the tables of a set of segments.

    Args:
        segments: what to move, ascending by layer.
        num_layers: of the layout.
        device: where the tables go.
        object_align_bytes: 16, 8, 4, 2 or 1: what divides every object's address.
        config: tile size, and the length at which a part takes the page kernel.
        fill_layers: whether they leave no gaps in layers, so that these can be summed.
    """
    tiles = _Rows(16, num_layers)
    units = {width: _Rows(width, num_layers) for width in (16, 8, 4, 2, 1)}
    narrow: dict[int, list[tuple[int, int]]] = {}
    for segment in segments:
        width = math.gcd(segment.alignment_bytes, object_align_bytes)
        if width == 16 and segment.part_bytes >= config.page_run_bytes:
            tiles.extend(segment.layer_id, _tile_rows(segment, config.tile_bytes))
        else:
            units[width].extend(segment.layer_id, [_unit_row(segment, width)])
            if fill_layers and width < SUMMED_BYTES:
                narrow.setdefault(segment.layer_id, []).extend(_stretches(segment))
    pairs = _Rows(SUMMED_BYTES, num_layers)
    for layer_id, stretches in narrow.items():
        pairs.extend(layer_id, _pair_rows(stretches, layer_id))
    return Tables(
        tiles.table(device, []),
        tuple(
            table
            for rows in units.values()
            if (table := rows.table(device, [row[4] for row in rows.rows]))
        ),
        pairs.table(device, [row[2] for row in pairs.rows]),
    )


def layer_ranges(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Join ascending layer ids to `[first, last + 1)` ranges."""
    ranges: list[tuple[int, int]] = []
    for layer_id in layers:
        if ranges and ranges[-1][1] == layer_id:
            ranges[-1] = (ranges[-1][0], layer_id + 1)
        else:
            ranges.append((layer_id, layer_id + 1))
    return tuple(ranges)


@lru_cache(maxsize=4096)
def divisor(number: int) -> int:
    """Return `multiplier | (shift + 1) << 32`, by which `device.divide` divides by `number`.

    `n // number == umulhi(2 * n, multiplier) >> shift` holds for 0 <= n < 2**31 (Granlund and
    Montgomery's round-up method, with one bit of n to spare). The shift is stored plus one, so that
    every value needs 64 bits: Triton's interpreter keeps an argument of 32 bits in 32, whatever its
    annotation.
    """
    shift = (number - 1).bit_length()
    multiplier = -(-(1 << (31 + shift)) // number)
    return multiplier | (shift + 1) << 32


class _Rows:
    """A table in the making."""

    def __init__(self, unit_bytes: int, num_layers: int) -> None:
        self.unit_bytes = unit_bytes
        self.num_layers = num_layers
        self.rows: list[tuple[int, ...]] = []
        self.layers: list[int] = []

    def extend(self, layer_id: int, rows: Sequence[tuple[int, ...]]) -> None:
        assert not self.layers or self.layers[-1] <= layer_id, "segments must ascend by layer"
        self.rows.extend(rows)
        self.layers.extend([layer_id] * len(rows))

    def table(self, device: torch.device, num_units: list[int]) -> Table | None:
        if not self.rows:
            return None
        return Table(
            torch.tensor(self.rows, dtype=torch.int64).to(device),
            tuple(bisect.bisect_left(self.layers, layer) for layer in range(self.num_layers + 1)),
            self.unit_bytes,
            max(num_units, default=0),
            min(num_units, default=0),
            sum(num_units) * self.unit_bytes if num_units else sum(row[3] for row in self.rows),
        )


def _tile_rows(segment: Segment, tile_bytes: int) -> list[tuple[int, ...]]:
    """Cut each part into equal tiles: equal work balances, a short last tile does not."""
    num_tiles = -(-segment.part_bytes // tile_bytes)
    tile = -(-segment.part_bytes // num_tiles)
    tile = min(tile_bytes, -(-tile // _TILE_ALIGN_BYTES) * _TILE_ALIGN_BYTES)
    rows: list[tuple[int, ...]] = []
    for part in range(segment.count):
        for inner in range(0, segment.part_bytes, tile):
            num_bytes = min(tile, segment.part_bytes - inner)
            token_start = segment.token_start_bytes + part * segment.token_part_bytes + inner
            rows.append(
                (
                    segment.address + part * segment.pool_pitch_bytes + inner,
                    segment.page_stride_bytes,
                    segment.object_offset + part * segment.object_pitch_bytes + inner,
                    num_bytes,
                    segment.token_bytes,
                    # Not cut by tokens: 0 bytes per token, less this, are all of its bytes.
                    token_start if segment.token_bytes else -num_bytes,
                    segment.layer_id,
                )
            )
    return rows


def _unit_row(segment: Segment, width: int) -> tuple[int, ...]:
    units = segment.part_bytes // width
    return (
        segment.address,
        segment.page_stride_bytes,
        segment.object_offset,
        units,
        units * segment.count,
        segment.pool_pitch_bytes,
        segment.object_pitch_bytes,
        divisor(units),
        divisor(units * segment.count),
        segment.token_bytes,
        segment.token_part_bytes,
        segment.token_start_bytes if segment.token_bytes else _UNCUT,
        segment.layer_id,
    )


def _stretches(segment: Segment) -> list[tuple[int, int]]:
    """Return where a segment's parts lie in the object: first bytes, and those behind the last."""
    pitch, part_bytes = segment.object_pitch_bytes, segment.part_bytes
    if segment.count == 1 or pitch == part_bytes:
        return [(segment.object_offset, segment.object_offset + segment.num_bytes)]
    starts = (segment.object_offset + part * pitch for part in range(segment.count))
    return [(start, start + part_bytes) for start in starts]


def _pair_rows(stretches: Sequence[tuple[int, int]], layer_id: int) -> list[tuple[int, ...]]:
    """Join stretches that follow one another: each pair of words must be summed as one.

    Between others lie wide units alone, since a layer has no gaps: those never share a pair.
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return [
        (start, end, num_pairs, divisor(num_pairs), layer_id)
        for start, end in joined
        for num_pairs in [-(-end // SUMMED_BYTES) - start // SUMMED_BYTES]
    ]
