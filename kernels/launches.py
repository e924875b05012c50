"""From tables and a move to the launches that carry it out."""

from collections.abc import Iterator

from kvferry.kernels.handles import Launch
from kvferry.kernels.tables import Move, Tables
from kvferry.kernels.tiles import tile_launches
from kvferry.kernels.units import unit_launches
from kvferry.launch import LaunchConfig


def launches_of(tables: Tables, move: Move, config: LaunchConfig) -> Iterator[Launch]:
    """Yield the launches: of the page kernel, then of the short-run kernel, width by width."""
    if tables.tiles is not None:
        yield from tile_launches(tables.tiles, move, config)
    for table in tables.units:
        yield from unit_launches(table, move, config)
