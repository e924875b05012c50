"""The soak, for a few seconds: it runs, finds nothing, and would find what it looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mooncake

ROOT = Path(__file__).resolve().parent.parent


def test_a_short_soak_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--minutes", "0.15", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    bars = {
        line.split()[1]: line.split() for line in done.stdout.splitlines() if line[:4] == "bar "
    }
    for name in ("wrong_bytes", "wrong_results", "hangs", "held_staging_bytes", "threads_left"):
        assert float(bars[name][2]) == 0, bars[name]
    counts = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if ", done" in line)
    forms = ("save whole", "save layers", "load whole", "load layers", "load batch")
    assert [form for form in forms if f"{form}, done" not in counts] == []
