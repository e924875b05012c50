"""How evenly the page kernel's tiles are shared out among programs under a budget, in bytes."""

from collections.abc import Sequence

from kvferry.kernels.tables import Table


def tile_bytes_in_order(table: Table, num_pages: int) -> list[int]:
    """Return the bytes of each tile of a launch, by number: row by row, each for all pages.

    Args:
        table: of the page kernel, all of whose rows are in the launch.
        num_pages: that are moved.
    """
    return [num_bytes for num_bytes in table.rows[:, 3].tolist() for _ in range(num_pages)]


def bytes_of_programs(tile_bytes: Sequence[int], num_programs: int) -> list[int]:
    """Return what each program moves: program i the tiles i, i + num_programs, and so on."""
    return [sum(tile_bytes[program::num_programs]) for program in range(num_programs)]


def imbalance(tile_bytes: Sequence[int], num_programs: int) -> float:
    """Return the bytes of the program that has the most, over the mean of all; 1 is the best.

    Static: as if every byte took as long wherever it lies. Programs that start late, or wait longer
    for memory, are not in it.
    """
    moved = bytes_of_programs(tile_bytes, num_programs)
    return max(moved) * num_programs / sum(moved)
