"""What a profiler's hook is told of a launch, in the form that Proton reads: a name, and bytes.

Bytes are payload, read and written; a kernel that only sums reads them. Those of a move are an
upper bound: the host does not know what the device's tables say, so tiles and blocks count as full.
Page ids, tables and checksums are not counted.
"""

from collections.abc import Mapping
from typing import Any

from kvferry.kernels.device import PACK, SUM_ONLY, UNPACK

_MOVES = {PACK: "pack", UNPACK: "unpack", SUM_ONLY: "sum"}


def tiles_metadata(
    grid: tuple[int, ...], metadata: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a launch of the page kernel."""
    return _move("tiles", arguments, arguments["num_tiles"] * arguments["TILE_BYTES"])


def units_metadata(
    grid: tuple[int, ...], metadata: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a launch of the short-run kernel."""
    block_bytes = arguments["UNITS"] * arguments["UNIT_BYTES"]
    return _move("units", arguments, arguments["num_blocks"] * block_bytes)


def pairs_metadata(
    grid: tuple[int, ...], metadata: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a launch that sums what moved by narrow units."""
    num_bytes = arguments["num_blocks"] * arguments["PAIRS"] * 8
    return {"name": "kvferry_sum_pairs", "bytes": num_bytes}


def signal_metadata(
    grid: tuple[int, ...], metadata: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a launch that raises counters; its bytes are exact."""
    words = 2 + arguments["RAISE"] + arguments["MIRROR"]  # counter read and written, limit, mirror
    num_layers = arguments["end_layer"] - arguments["first_layer"]
    return {"name": "kvferry_signal_layers", "bytes": num_layers * words * 8}


def wait_metadata(
    grid: tuple[int, ...], metadata: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a launch that waits; how often it reads the counter nobody knows before."""
    return {"name": "kvferry_wait_layer"}


def _move(form: str, arguments: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    move = arguments["MOVE"]
    ways = 1 if move == SUM_ONLY else 2
    return {"name": f"kvferry_{_MOVES[move]}_{form}", "bytes": ways * num_bytes}
