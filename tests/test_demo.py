"""The demo, as its users run it, with small models; and that it can fail."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.demo import Bar, _follow

pytestmark = pytest.mark.mooncake


def demo(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )
    return done.returncode, done.stdout.splitlines()


def test_two_processes_pass_every_byte() -> None:
    status, lines = demo("--model", "fp4-scales-odd", "--model", "gpt-oss-120b", "--tokens", "192")
    assert status == 0, lines
    assert lines[-1] == "PASS"
    (row,) = [line.split() for line in lines if line.startswith("gpt-oss-120b")]
    # 3 pages of 36 ranges, the last 2 pages of 36 more; 5 objects of 2,359,296 bytes
    assert row[1:6] == ["192", "3", "12", "180", "5"]
    assert row[-1] == "exact"
    assert all(float(figure) > 0 for figure in row[6:-1])


def test_one_process_does_both() -> None:
    status, lines = demo("--model", "odd-bytes", "--tokens", "30", "--processes", "1")
    assert (status, lines[-1]) == (0, "PASS")


def test_an_unknown_model_is_refused_by_name() -> None:
    status, lines = demo("--model", "gpt-17")
    assert status == 2
    assert "'gpt-17'" in lines[0]


@pytest.mark.parametrize(
    ("worker", "fault"),
    [
        (
            'print(\'{"fault": "pool k: 1 of 8 bytes differ"}\'); raise SystemExit(1)',
            "bytes differ",
        ),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
    ],
)
def test_what_a_worker_finds_wrong_is_a_fault(worker: str, fault: str, tmp_path: Path) -> None:
    bar = Bar("model", io.StringIO())
    assert fault in _follow([sys.executable, "-c", worker], tmp_path / "log", {}, bar)
