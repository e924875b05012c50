"""Bars: what a benchmark's figures must reach, a line each; exit status 1 if one is short.

With `--write` the figures also go to `benchmarks/results/NAME.json`, with date, machine and
versions: the only place that documents quote figures from.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch", "triton", "numpy", "nvtx", "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A figure and the bound that it must keep.

    Attributes:
        name: what is measured, with its unit.
        value: what came out.
        wanted: the bound.
        at_least: whether the value must be at least the bound, else at most.
    """

    name: str
    value: float
    wanted: float
    at_least: bool

    @property
    def ok(self) -> bool:
        """Whether the bound is kept."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


def report(
    name: str,
    rows: list[dict[str, Any]],
    bars: list[Bar],
    more: Sequence[list[dict[str, Any]]] = (),
) -> int:
    """Print the rows as a table, then `bar NAME VALUE WANTED ok|short`; return the exit status.

    Args:
        name: of the benchmark, and of its file of results.
        rows: figures by column; the keys of the first are the table's heads.
        bars: the bounds.
        more: further tables.
    """
    tables = [one for one in more if one]
    print("\n\n".join(map(table, [rows, *tables])))
    for bar in bars:
        bound = f"{'>=' if bar.at_least else '<='}{bar.wanted:g}"
        print(f"bar {bar.name} {bar.value:.3f} {bound} {'ok' if bar.ok else 'short'}")
    if "--write" in sys.argv[1:]:
        RESULTS.mkdir(exist_ok=True)
        record = {"machine": machine(), "rows": rows, "bars": [asdict(bar) for bar in bars]}
        if tables:
            record["more"] = tables
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(bar.ok for bar in bars) else 1


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as aligned columns, the first one to the left."""
    heads = list(rows[0])
    cells = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def machine() -> dict[str, Any]:
    """Return what a figure must be read with: date, processor, versions, commit."""
    installed = {str(found.metadata["Name"]).lower(): found.version for found in distributions()}
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }
