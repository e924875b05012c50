"""What the compiler makes of the kernels, and what a launch costs, without a GPU.

Both run in processes of their own: the suite's kernels are interpreted, and these are compiled.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(*command: str) -> Any:
    done = subprocess.run(
        [sys.executable, *command], env=COMPILED, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What `make inspect` prints and records, for a part of the targets: all would take minutes."""
    path = tmp_path_factory.mktemp("inspected") / "rows.json"
    part = "(tiles|units16_(persistent_)?id4|sum_pairs)[^@]*$"  # behind @: other sizes of a program
    targets = ("sm_90:(tiles|units|pairs)[^@]*$", f"sm_100:{part}", f"gfx942:{part}")
    command = [sys.executable, "-m", "kvferry.tuning", "inspect", "--json", str(path)]
    command += itertools.chain(*zip(itertools.repeat("--target"), targets))
    done = subprocess.run(command, env=COMPILED, capture_output=True, text=True, timeout=600)
    assert path.exists(), done.stderr[-2000:]
    record: dict[str, Any] = json.loads(path.read_text())
    assert done.returncode == (1 if record["faults"] else 0), done.stderr[-2000:]
    return done.stdout, record


def test_every_variant_compiles_for_every_target(inspected: tuple[str, dict[str, Any]]) -> None:
    rows = inspected[1]["rows"]
    names = {target: {row["name"] for row in rows if row["target"] == target}
             for target in ("sm_90", "sm_100", "gfx942")}  # fmt: skip
    assert names["sm_100"] == names["gfx942"] < names["sm_90"]
    assert {"pack_tiles", "unpack_zero_units16_persistent_id4", "sum_tiles"} < names["sm_100"]
    assert {"pack_units1", "unpack_summed_units8_few_persistent", "sum_pairs_moved_id4"} < names[
        "sm_90"
    ]
    assert len(rows) == sum(map(len, names.values()))
    assert all(row["instructions"] for row in rows)


def test_no_variant_is_past_its_threshold(inspected: tuple[str, dict[str, Any]]) -> None:
    text, record = inspected
    assert record["faults"] == []
    assert f"{len(record['rows'])} compiled, 0 faults" in text


def test_the_kernels_that_transfers_use_keep_the_bars(
    inspected: tuple[str, dict[str, Any]],
) -> None:
    """Bars are for ever, whatever a thresholds file says."""
    bars = {"pack_tiles_id4": 19, "unpack_tiles_id4": 19,
            "pack_summed_tiles_id4": 60, "unpack_summed_tiles_id4": 60,
            "pack_units16_id4": 43, "unpack_units16_id4": 43}  # fmt: skip
    rows = [row for row in inspected[1]["rows"] if row["name"] in bars]
    assert len(rows) == 3 * len(bars)
    for row in rows:
        assert row["payload_share"] == 1, row
        assert row["access_bytes"] == 16, row
        assert row["spills"] == row["spill_bytes"] == 0, row
        if row["target"].startswith("sm_"):
            assert row["instructions_per_16_bytes"] <= bars[row["name"]], row
            assert row["in_flight_bytes"] >= 128 * 1024, row


@pytest.mark.parametrize("hint", ["stream", "keep_written"])
def test_machine_code_has_the_hints(inspected: tuple[str, dict[str, Any]], hint: str) -> None:
    rows = {(row["name"], row["target"]): row for row in inspected[1]["rows"]}
    most = {"tiles": 19, "units16": 46}
    for way, form in itertools.product(("pack", "unpack"), most):
        plain = f"{way}_{form}_id4"
        for target in ("sm_90", "sm_100"):
            row = rows[f"{plain}+{hint}", target]
            assert row["loads"] == rows[plain, target]["loads"]
            assert row["stores"] == rows[plain, target]["stores"] == {"16": 8}
            assert row["evict_first_loads"] == {"16": 8}, row
            assert row["evict_first_stores"] == ({"16": 8} if hint == "stream" else {}), row
            assert row["instructions_per_16_bytes"] <= most[form], row
            assert row["programs"] == rows[plain, target]["programs"]
            assert row["in_flight_bytes"] == rows[plain, target]["in_flight_bytes"]
        amd = rows[f"{plain}+{hint}", "gfx942"]
        assert amd["evict_first_loads"] == {}  # Triton drops the hint
        assert amd["evict_first_stores"] == (amd["stores"] if hint == "stream" else {})


def test_wider_accesses_keep_no_more_in_flight(tmp_path: Path) -> None:
    # Why there are none; see docs/inspection.md.
    found = {}
    for width in (16, 32):
        path = tmp_path / f"{width}.json"
        function = ROOT / f"benchmarks/wide_copy.py:copy_by_{width}"
        command = [sys.executable, "-m", "kvferry.tuning", "inspect", "--target", "sm_100",
                   "--function", str(function), "--signature", "i64,i64,i32",
                   "--constants", "BYTES=16384", "--payload-bytes", "16384",
                   "--access-bytes", str(width), "--json", str(path)]  # fmt: skip
        subprocess.run(command, env=COMPILED, check=True, capture_output=True, timeout=300)
        (found[width],) = json.loads(path.read_text())["rows"]
        assert found[width]["payload_share"] == 1
        assert found[width]["spills"] == 0
    narrow, wide = found[16], found[32]
    assert 1 < narrow["instructions_per_16_bytes"] - wide["instructions_per_16_bytes"] < 3
    assert narrow["in_flight_bytes"] <= wide["in_flight_bytes"] <= 1.2 * narrow["in_flight_bytes"]


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
constants = (16384, 0, 8, 0, False, False, 0)
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
