"""Part `sweep` of the GPU check: numbers for this GPU's launches, measured in a short form."""

import subprocess
import sys
from pathlib import Path

from gpu_part import Check, Skipped

LEAST_S = 20.0
MARGIN_S = 10.0


def run(check: Check) -> None:
    """Run `python -m kvferry.tuning sweep --short`; its files go to `configs` beside the result."""
    from kvferry.tuning.__main__ import COMMANDS

    if "sweep" not in COMMANDS:
        raise Skipped("this checkout has no sweep")
    if not check.on_gpu:
        raise Skipped("needs a GPU: it measures")
    limit_s = check.left_s - MARGIN_S
    if limit_s < LEAST_S:
        raise Skipped(f"{check.left_s:.0f} s are left, wanted {LEAST_S + MARGIN_S:.0f}")
    check.step(f"sweep for {limit_s:.0f} s")
    folder = check.out / "configs"
    command = [sys.executable, "-m", "kvferry.tuning", "sweep", "--short",
               "--limit-s", f"{limit_s:.0f}", "--out", str(folder)]  # fmt: skip
    status = subprocess.run(command, timeout=check.left_s).returncode
    files = sorted(path.name for path in Path(folder).glob("*.json"))
    if status:
        raise AssertionError(f"the sweep ended with exit status {status}")
    if not files:
        raise AssertionError(f"the sweep wrote no file into {folder}")
    check.figure("files", ", ".join(files))
    check.summary(f"wrote {', '.join(files)}")
