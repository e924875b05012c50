"""What Triton's launch hooks are told of our kernels, without a GPU: names and bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "hooked_launches.py"
PAGES, LAYERS, TILE_BYTES, UNITS = 7, 3, 16384, 1024


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script prints."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=compiled, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_names_and_bytes(found: dict[str, Any]) -> None:
    told = {one["what"]: (one["name"], one["bytes"]) for one in found["told"]}
    payload = PAGES * LAYERS * 8 * 4096  # two full tiles a page and layer
    blocks = -(-PAGES * 8 * 48 // 16 // UNITS) * LAYERS
    assert told == {
        "full tiles": ("kvferry_pack_tiles", 2 * payload),
        "tiles of a part": ("kvferry_unpack_tiles", 2 * PAGES * LAYERS * 2 * TILE_BYTES),
        "tiles that are summed": ("kvferry_sum_tiles", payload),
        "tiles in a budget": ("kvferry_pack_tiles", 2 * payload),
        "units": ("kvferry_unpack_units", 2 * blocks * UNITS * 16),
        "units in a budget": ("kvferry_unpack_units", 2 * blocks * UNITS * 16),
        "signal": ("kvferry_signal_layers", 5 * 2 * 8),
        "raise": ("kvferry_signal_layers", 5 * 4 * 8),
        "wait": ("kvferry_wait_layer", None),
    }
    assert told["tiles of a part"][1] >= 2 * PAGES * LAYERS * 8 * 2560
    assert told["units"][1] >= 2 * PAGES * LAYERS * 8 * 48


def test_nothing_is_computed_without_a_hook(found: dict[str, Any]) -> None:
    before, during, after = found["asked"]
    assert (before, after - during) == (0, 0)
    assert during == len(found["told"])
    assert found["bare"]


def test_launches_are_the_same_with_a_hook_and_without(found: dict[str, Any]) -> None:
    assert found["same"]
