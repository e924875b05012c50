"""Part `sweep` of the GPU check: numbers for this GPU's launches, measured in a short form."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_part import Check, Skipped

LEAST_S = 20.0
MARGIN_S = 8.0
CPU_S = 45.0
"""On a CPU a sweep only shows that it works."""

REFUSED = 2
"""The sweep's exit status where its arguments, or records to go on from, are of something else."""


def run(check: Check) -> None:
    """Run `python -m kvferry.tuning sweep --short`; its files go to `configs` beside the result."""
    from kvferry.tuning.__main__ import COMMANDS

    if "sweep" not in COMMANDS:
        raise Skipped("this checkout has no sweep")
    limit_s = check.left_s - MARGIN_S
    if limit_s < LEAST_S:
        raise Skipped(f"{check.left_s:.0f} s are left, wanted {LEAST_S + MARGIN_S:.0f}")
    if not check.on_gpu:
        limit_s = min(limit_s, CPU_S)
    folder = check.out / "configs"
    check.step(f"sweep, at most {limit_s:.0f} s")
    status = _sweep(folder, limit_s, resume=True)
    if status == REFUSED:
        check.step("sweep anew: the records are of another device or code")
        status = _sweep(folder, check.left_s - MARGIN_S, resume=False)
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not files and not check.on_gpu:
        raise Skipped(f"no size was complete after {limit_s:.0f} s: this CPU is slow, or busy")
    if not files:
        raise AssertionError(f"the sweep wrote no file into {folder}, exit status {status}")
    content: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8"))
    if status:
        print(content.get("failed"))
        raise AssertionError(f"the sweep ended with exit status {status}")
    if check.on_gpu:
        check.attach(files[-1].name, content)
    for each in content["classes"]:
        check.row(**{
            "sweep": each["direction"], "programs": each["max_programs"] or "unbounded",
            "MB": each["num_bytes"] / 1e6, "GB/s": each["gb_per_s"],
            "of copy": each["share_of_copy"], **each["config"],
        })  # fmt: skip
    if not check.on_gpu:
        check.left_out("numbers: a CPU's sweep only shows that it works")
    check.summary(f"{len(content['classes'])} classes in configs/{files[-1].name}")


def _sweep(folder: Path, limit_s: float, *, resume: bool) -> int:
    command = [sys.executable, "-m", "kvferry.tuning", "sweep", "--short",
               "--limit-s", f"{limit_s:.0f}", "--out", str(folder)]  # fmt: skip
    return subprocess.run(command + ["--resume"] * resume).returncode
