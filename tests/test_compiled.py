"""What the compiler makes of the kernels, and what a launch costs, without a GPU.

Both run in processes of their own: the suite's kernels are interpreted, and these are compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(*command: str) -> Any:
    done = subprocess.run(
        [sys.executable, *command], env=COMPILED, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run(
        "-m", "kvferry.tuning.compiled", "90", "100:tiles,units16", "gfx942:tiles,units16"
    )
    return rows


def test_every_variant_compiles_for_every_target(compiled: list[dict[str, Any]]) -> None:
    names = {target: {row["name"] for row in compiled if row["target"] == target}
             for target in ("sm_90", "sm_100", "gfx942")}  # fmt: skip
    assert names["sm_100"] == names["gfx942"] < names["sm_90"]
    assert {"pack_tiles", "unpack_zero_units16_persistent", "sum_tiles"} < names["sm_100"]
    assert {"pack_units1", "unpack_summed_units8_few_persistent"} < names["sm_90"]
    assert len(compiled) == sum(map(len, names.values()))


def test_payload_moves_at_full_width(compiled: list[dict[str, Any]]) -> None:
    for row in cuda(compiled):
        loads, stores = row["sass"]["loads"], row["sass"]["stores"]
        width, wanted = str(row["access_bytes"]), row["payload_bytes_per_thread"]
        where = f"{row['name']} on {row['target']}: {loads} {stores}"
        # Every store is payload; loads are the payload's and, narrow, those of rows and page ids.
        if row["name"].startswith("sum"):
            assert stores == {}, where
        else:
            assert set(stores) == {width}, where
            assert stores[width] * int(width) == wanted, where
        assert loads[width] * int(width) >= wanted, where


def test_nothing_spills(compiled: list[dict[str, Any]]) -> None:
    for row in cuda(compiled):
        assert row["sass"]["spills"] == row["sass"]["spill_bytes"] == 0, row
        # Most are under 100; summing pages of a few units takes an address for each unit.
        assert row["sass"]["registers"] <= 160, row


def test_long_runs_take_few_instructions(compiled: list[dict[str, Any]]) -> None:
    for row in cuda(compiled):
        if row["name"] in ("pack_tiles", "unpack_tiles"):
            assert row["instructions_per_16_bytes"] <= 19, row
        elif row["name"] in ("pack_units16_id4", "unpack_units16_id4"):
            assert row["instructions_per_16_bytes"] <= 43, row
            assert row["sass"]["registers"] <= 64, row  # 8 programs, 128 KiB, on a multiprocessor
        elif row["name"].endswith("_tiles"):
            assert row["instructions_per_16_bytes"] <= 60, row


def cuda(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in compiled if row["target"].startswith("sm_")]


HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
LAUNCHES = """
import json, time
import torch
from stub_driver import calls

from kvferry.kernels import handles
from kvferry.kernels.tables import divisor
from kvferry.kernels.tiles import _move_tiles_kernel as kernel

device = torch.device("cuda", 0)
big = 1 << 45
constants = (16384, 0, 8, 0, False, False)
for count in range(1, 1001):
    arguments = (big + count, big + 2 * count, big, 48 * count, big + 8 * count, count, count,
                 divisor(count), count, count % 64, count)
    handles.Launch(kernel, (count, 1), arguments, constants, 4).start(device)
ours = calls[-1]
kernel[(1000, 1)](*arguments, *constants, num_warps=4)
theirs = calls[-1]
launch = handles.Launch(kernel, (1000, 1), arguments, constants, 4)
begin = time.perf_counter()
for _ in range(2000):
    launch.start(device)
print(json.dumps({
    "handles": len(handles._handles),
    "compiled": sum(len(cache[0]) for cache in kernel.device_caches.values()),
    "ours": [*ours[:4], *ours[-15:]],
    "theirs": [*theirs[:4], *theirs[-15:]],
    "signature": handles._handles[next(iter(handles._handles))].src.signature,
    "launch_us": (time.perf_counter() - begin) / 2000 * 1e6,
}))
"""


def test_a_thousand_launches_compile_once_and_pass_what_triton_passes() -> None:
    found = run("-c", HERE + LAUNCHES)
    assert found["handles"] == 1
    assert found["compiled"] == 1
    assert found["ours"] == found["theirs"]
    assert found["ours"][:4] == [1000, 1, 1, 77]
    widths = [width for width in found["signature"].values() if width != "constexpr"]
    assert widths == ["i64"] * 6 + ["i32"] + ["i64"] * 3 + ["i32"]
    assert found["launch_us"] < 100
