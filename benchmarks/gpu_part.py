"""What a part of the GPU check is given and hands back; run as a program, it runs one part.

A part is a file with a function `run(check)`. What it notes is written to its JSON file at once,
so that a part which hangs or dies still shows how far it came.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a part that is broken, or a fake one, should not wait for torch
    import torch

DUMP_BEFORE_S = 3.0
"""So long before its limit a part writes into its log where each of its threads stands."""


class Skipped(Exception):
    """A part cannot run here; the text says what is missing."""


class Check:
    """A part's side of the check: where it runs, and what came out.

    Figures of time are kept only on a GPU: on a CPU the same code runs, small, and says nothing of
    a GPU's speed.

    Attributes:
        device_name: `cuda:0` or `cpu`.
        on_gpu: whether that is a GPU.
        limit_s: after so long the driver ends the part.
    """

    def __init__(self, path: Path, device_name: str, limit_s: float = 60.0) -> None:
        self.device_name = device_name
        self.on_gpu = device_name != "cpu"
        self.limit_s = limit_s
        self._path = path
        self._began_s = time.monotonic()
        self._found: dict[str, Any] = {
            "state": "running", "why": "", "at": "start", "summary": "", "figures": {},
            "rows": [], "bars": [], "left_out": [], "attached": {},
        }  # fmt: skip
        self._write()

    @property
    def device(self) -> "torch.device":
        """Where pools and objects are."""
        import torch

        return torch.device(self.device_name)

    @property
    def out(self) -> Path:
        """The folder of the results."""
        return self._path.parent

    @property
    def left_s(self) -> float:
        """How long the part may still run."""
        return self.limit_s - (time.monotonic() - self._began_s)

    def step(self, what: str) -> None:
        """Say what begins now: the last of these is named if the part does not end."""
        print(f"{time.monotonic() - self._began_s:7.2f} s  {what}", flush=True)
        self._found["at"] = what
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Keep a figure that is true on a CPU too: a count, a name."""
        self._found["figures"][name] = value
        self._write()

    def timed(self, name: str, value: float) -> None:
        """Keep a figure of time or rate, if this is a GPU; its name has the unit."""
        if self.on_gpu:
            self.figure(name, value)

    def row(self, **columns: Any) -> None:
        """Add a row to the part's table, if this is a GPU."""
        if self.on_gpu:
            self._found["rows"].append(columns)
            self._write()

    def bar(self, name: str, value: float | None, wanted: float, *, at_least: bool) -> None:
        """Judge a figure; without one, or on a CPU, the bar counts as not measured."""
        kept = value if self.on_gpu else None
        self._found["bars"].append(
            {"name": name, "value": kept, "wanted": wanted, "at_least": at_least}
        )
        self._write()

    def attach(self, name: str, content: Any) -> None:
        """Put a file's content into the report, where it is not printed."""
        self._found["attached"][name] = content
        self._write()

    def left_out(self, what: str) -> None:
        """Say what the part did not do here, and why."""
        print(f"left out: {what}", flush=True)
        self._found["left_out"].append(what)
        self._write()

    def summary(self, text: str) -> None:
        """Say in a few words what was done."""
        self._found["summary"] = text
        self._write()

    def end(self, state: str, why: str = "") -> None:
        """Set how it ended; a part that failed reports no speed."""
        if state == "failed":
            self._found.update(figures={}, rows=[], bars=[])
        self._found.update(state=state, why=why)
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._found, indent=1) + "\n"
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._path)


def run_part(script: Path, check: Check) -> int:
    """Run one part to its end; return the exit status."""
    sys.path.insert(0, str(script.parent))
    try:
        importlib.import_module(script.stem).run(check)
    except Skipped as reason:
        check.end("skipped", str(reason))
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the report
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        check.end("failed", f"{type(error).__name__}: {''.join(first_line)[:300]}")
        return 1
    check.end("ok")
    return 0


def main(arguments: list[str]) -> int:
    """`gpu_part.py SCRIPT RESULT.json DEVICE LIMIT_S`."""
    script, path, device_name, limit_s = arguments
    faulthandler.dump_traceback_later(max(1.0, float(limit_s) - DUMP_BEFORE_S))
    return run_part(Path(script), Check(Path(path), device_name, float(limit_s)))


if __name__ == "__main__":
    # A part's module that imports this one must find the same `Skipped`.
    sys.modules["gpu_part"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
