"""Tables that tell the pack kernels where a page's bytes lie; made once per layout, kept on device.

A table depends on the pools' addresses and on how objects are aligned in memory, not on the pages
of a transfer, so that a call ships page ids and nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvferry.errors import ArgumentError
from kvferry.launch import LaunchConfig
from kvferry.layout import Buffer, CacheLayout
from kvferry.runs import Run

TILE_COLUMNS = 4
UNIT_COLUMNS = 8
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
        bytes_per_page: what all rows move for one page.
    """

    rows: torch.Tensor
    layer_starts: tuple[int, ...]
    unit_bytes: int
    max_units: int
    bytes_per_page: int

    def row_address(self, row: int) -> int:
        """Return the device address of a row."""
        return self.rows.data_ptr() + row * self.rows.stride(0) * self.rows.element_size()


@dataclass(frozen=True)
class Move:
    """One call's arguments, checked: which pages, which layers, where the objects are.

    Attributes:
        ids_address: address of `[num_pages]` page ids.
        id_bytes: 4 or 8.
        num_pages: pages to move, at least one.
        num_pool_pages: valid ids are under this.
        object_address: of object 0, such that the layout's offsets count from here.
        stride_bytes: from one object to the next.
        layer_ranges: `[first, end)` ranges of layer ids, ascending.
        unpack: objects to pages, else pages to objects.
    """

    ids_address: int
    id_bytes: int
    num_pages: int
    num_pool_pages: int
    object_address: int
    stride_bytes: int
    layer_ranges: tuple[tuple[int, int], ...]
    unpack: bool


@dataclass(frozen=True)
class Tables:
    """All that one index space needs: `tiles` for the page kernel, `units` for the short runs.

    `tiles` rows: address at page 0, page stride, offset in the object, bytes.
    `units` rows, one per run: address at page 0, page stride, offset in the object, units in one
    part, units in a page, pitch, and the multipliers of the two divisions (see `divisor`).
    """

    tiles: Table | None
    units: tuple[Table, ...] = field(default=())


def build_tables(
    layout: CacheLayout, space: str, object_align_bytes: int, config: LaunchConfig
) -> Tables:
    """Return the tables of one index space.

    Args:
        layout: bound to tensors.
        space: one of the layout's index spaces.
        object_align_bytes: 16, 8, 4, 2 or 1: what divides every object's address.
        config: tile size, and the length at which a run takes the page kernel.

    Raises:
        ArgumentError: the layout is not bound, or has no such space.
    """
    if not layout.is_bound or layout.device is None:
        raise ArgumentError("layout is not bound to tensors: call layout.bind(tensors) first")
    tiles = _Rows(16)
    units = {width: _Rows(width) for width in (16, 8, 4, 2, 1)}
    buffers = {
        layer_id: [buffer for buffer in layout.buffers[space] if buffer.layer_id == layer_id]
        for layer_id in range(layout.num_layers)
    }
    for layer_id in range(layout.num_layers):
        for rows in (tiles, *units.values()):
            rows.layer_starts.append(len(rows.rows))
        for buffer in buffers[layer_id]:
            width = math.gcd(buffer.alignment_bytes, object_align_bytes)
            offset = buffer.object_offset
            for run in buffer.runs:
                if width == 16 and run.length_bytes >= config.page_run_bytes:
                    tiles.extend(_tile_rows(buffer, run, offset, config.tile_bytes))
                else:
                    units[width].append(_unit_row(buffer, run, offset, width))
                offset += run.length_bytes * run.count
    return Tables(
        tiles.table(layout, 0),
        tuple(
            table
            for rows in units.values()
            if (table := rows.table(layout, max((row[4] for row in rows.rows), default=0)))
        ),
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

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.rows: list[tuple[int, ...]] = []
        self.layer_starts: list[int] = []

    def append(self, row: tuple[int, ...]) -> None:
        self.rows.append(row)

    def extend(self, rows: Sequence[tuple[int, ...]]) -> None:
        self.rows.extend(rows)

    def table(self, layout: CacheLayout, max_units: int) -> Table | None:
        if not self.rows:
            return None
        column = 4 if max_units else 3
        scale = self.unit_bytes if max_units else 1
        return Table(
            torch.tensor(self.rows, dtype=torch.int64).to(layout.device),
            (*self.layer_starts, len(self.rows)),
            self.unit_bytes,
            max_units,
            sum(row[column] for row in self.rows) * scale,
        )


def _tile_rows(
    buffer: Buffer, run: Run, object_offset: int, tile_bytes: int
) -> list[tuple[int, ...]]:
    """Cut each part of a run into equal tiles: equal work balances, a short last tile does not."""
    num_tiles = -(-run.length_bytes // tile_bytes)
    tile = -(-run.length_bytes // num_tiles)
    tile = min(tile_bytes, -(-tile // _TILE_ALIGN_BYTES) * _TILE_ALIGN_BYTES)
    rows: list[tuple[int, ...]] = []
    for part in range(run.count):
        start = run.offset_bytes + part * run.pitch_bytes
        for inner in range(0, run.length_bytes, tile):
            rows.append(
                (
                    buffer.address + start + inner,
                    buffer.page_stride_bytes,
                    object_offset + part * run.length_bytes + inner,
                    min(tile, run.length_bytes - inner),
                )
            )
    return rows


def _unit_row(buffer: Buffer, run: Run, object_offset: int, width: int) -> tuple[int, ...]:
    units = run.length_bytes // width
    return (
        buffer.address + run.offset_bytes,
        buffer.page_stride_bytes,
        object_offset,
        units,
        units * run.count,
        run.pitch_bytes,
        divisor(units),
        divisor(units * run.count),
    )
