"""`python -m kvferry demo`: pages of real models through a real store, from process to process.

Starts a Mooncake master and an owner of memory on loopback. A writer fills the pools of a model
with telling bytes and saves them; a reader, a fresh process, looks up, loads into other page ids,
and compares every byte. Prints a table; its last line is PASS or FAIL.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from kvferry.demo_worker import DemoCase
from kvferry.errors import KVFerryError
from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner
from kvferry.models import descriptions

DEFAULT_MODELS = ("deepseek-v3.2-dsa-fp8", "gpt-oss-120b", "qwen3-next-80b")
WORKER_LIMIT_S = 300
COLUMNS = (
    "model", "tokens", "pages", "MB", "ranges", "packed", "host ms", "pack ms",
    "put GB/s", "get GB/s", "unpack ms", "verdict",
)  # fmt: skip
LEGEND = """\
ranges: contiguous pieces of memory without packing; packed: objects, one range each
host ms: planning the save in the caller's thread; pack, unpack: the kernels, or torch on a CPU
put, get: bytes over the time in the store's calls, after a warm-up of one page"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if every byte was right, 1 if not, 2 for unusable arguments."""
    options = _parser().parse_args(arguments)
    models = options.model or list(DEFAULT_MODELS)
    unknown = [model for model in models if model not in descriptions()]
    if unknown:
        print(f"--model is {unknown[0]!r}, wanted one of: {', '.join(sorted(descriptions()))}")
        return 2
    cases = [
        DemoCase.of(model, options.tokens, options.device, options.staging_mb << 20)
        for model in models
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        log = Path(folder) / "log"
        try:
            segment_bytes = sum(case.store_bytes for case in cases)
            with LocalMaster() as master, LocalOwner(master.address, segment_bytes):
                for case in cases:
                    bar = Bar(case.model, sys.stderr)
                    rows.append(_run(case, master.address, options.processes, log, bar))
                    bar.clear()
        except KVFerryError as error:
            print(error)
            print("FAIL")
            return 1
        print(_table([row for row, _ in rows]))
        print(LEGEND)
        faults = [fault for _, fault in rows if fault]
        for fault in faults:
            print(fault)
        if faults:
            print(f"the log of the workers ends:\n{log.read_text(errors='replace')[-2000:]}")
    print("FAIL" if faults else "PASS")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvferry demo", description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--model", action="append", help="a model of layouts.json; may be repeated (default: "
        + ", ".join(DEFAULT_MODELS) + ")",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prefix")
    parser.add_argument(
        "--processes", type=int, choices=(1, 2), default=2,
        help="2: another process reads what the first wrote; 1: the same one",
    )  # fmt: skip
    parser.add_argument("--staging-mb", type=int, default=256, help="size of the staging buffer")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser


def _run(
    case: DemoCase, address: str, processes: int, log: Path, bar: "Bar"
) -> tuple[dict[str, str], str]:
    """Run a case; return its table row, and what went wrong or an empty string."""
    roles = [["write", "read"]] if processes == 1 else [["write"], ["read"]]
    results: dict[str, Any] = {}
    fault = ""
    for part in roles:
        command = [
            sys.executable, "-m", "kvferry.demo_worker", address, json.dumps(case.as_dict()), *part,
        ]  # fmt: skip
        fault = _follow(command, log, results, bar)
        if fault:
            break
    saved, loaded = results.get("write", {}), results.get("read", {})
    row = {
        "model": case.model,
        "tokens": f"{case.tokens:,}",
        "pages": f"{case.num_pages:,}",
        "MB": f"{case.num_bytes / 1e6:.0f}",
        "ranges": f"{case.num_ranges:,}",
        "packed": f"{case.num_objects:,}",
        "host ms": _ms(saved.get("plan_us")),
        "pack ms": _ms(saved.get("pack_us")),
        "put GB/s": _rate(case.num_bytes, saved.get("wire_us")),
        "get GB/s": _rate(case.num_bytes, loaded.get("wire_us")),
        "unpack ms": _ms(loaded.get("unpack_us")),
        "verdict": "FAULT" if fault else "exact",
    }
    return row, f"{case.model}: {fault}" if fault else ""


def _follow(command: list[str], log: Path, results: dict[str, Any], bar: "Bar") -> str:
    """Run a worker, showing its progress and keeping its results; return its fault, if any."""
    deadline = time.monotonic() + WORKER_LIMIT_S
    with log.open("ab") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert worker.stdout is not None
    fault = ""
    try:
        for line in worker.stdout:
            event = json.loads(line)
            bar.show(event.get("stage", ""), event.get("share", 0.0))
            results.update({key: event[key] for key in ("write", "read") if key in event})
            fault = event.get("fault", fault)
            if time.monotonic() > deadline:
                fault = f"not done within {WORKER_LIMIT_S} s"
                break
        else:
            if worker.wait(WORKER_LIMIT_S) and not fault:
                fault = f"a worker ended with exit status {worker.returncode}"
    finally:
        worker.kill()
        worker.wait()
    return fault


def _ms(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds / 1e3:.1f}"


def _rate(num_bytes: int, microseconds: float | None) -> str:
    return f"{num_bytes / microseconds / 1e3:.2f}" if microseconds else ""


def _table(rows: list[dict[str, str]]) -> str:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    left = ("model", "verdict")

    def line(cells: dict[str, str]) -> str:
        padded = (
            cells[name].ljust(widths[name]) if name in left else cells[name].rjust(widths[name])
            for name in COLUMNS
        )  # fmt: skip
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * widths[name] for name in COLUMNS)
    return "\n".join([line({name: name for name in COLUMNS}), rule, *map(line, rows)])


class Bar:
    """A progress bar on a terminal; a line per stage elsewhere."""

    WIDTH = 28

    def __init__(self, title: str, out: TextIO) -> None:
        self._title = title
        self._out = out
        self._stage = ""

    def show(self, stage: str, share: float) -> None:
        """Show a stage, `share` (0 to 1) of it done."""
        if not stage:
            return
        if self._out.isatty():
            full = round(share * self.WIDTH)
            bar = "█" * full + "·" * (self.WIDTH - full)
            self._out.write(f"\r\033[K{self._title}  {bar}  {stage}")
        elif stage != self._stage:
            self._out.write(f"{self._title}: {stage}\n")
        self._stage = stage
        self._out.flush()

    def clear(self) -> None:
        """Take the bar off the terminal."""
        if self._out.isatty():
            self._out.write("\r\033[K")
            self._out.flush()
