"""What do NVTX ranges cost a transfer? `make bench-ranges`.

Calls functions that do nothing as often as a save of one part calls those with a range: once for
the transfer, once for its pack, once for its store call. The time of the same functions without
ranges is taken off. `annotate` is the nvtx package's own `with nvtx.annotate(...)`, which has no
payload here. A tool that listens is the tests' own, which writes a line for each event to
/dev/null; what Nsight takes is its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvtx
from bars import Bar, report

from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import is_heard, of_plans, ranged

TESTS = Path(__file__).resolve().parent.parent / "tests"
CALLS, ROUNDS = 2000, 41
PLAN = SpacePlan("full", [f"{page:064x}" for page in range(64)], np.arange(64), 1 << 20, 1 << 20,
                 1 << 20, True)  # fmt: skip


def transfer_with(put_range: Callable[[str], Callable[[Any], Any]]) -> Callable[[], None]:
    """Return a save of one part that does nothing, with ranges put around its three functions."""

    @put_range("pack")
    def pack(plan: SpacePlan) -> None:
        pass

    @put_range("wire")
    def wire(plan: SpacePlan) -> None:
        pass

    @put_range("save")
    def save(plan: SpacePlan) -> None:
        pack(plan)
        wire(plan)

    return lambda: save(PLAN)


def annotated(kind: str) -> Callable[[Any], Any]:
    """Put a range around a function by the nvtx package's context manager."""

    def wrapped(function: Callable[[SpacePlan], None]) -> Callable[[SpacePlan], None]:
        def call(plan: SpacePlan) -> None:
            with nvtx.annotate(kind, domain="kvferry"):
                function(plan)

        return call

    return wrapped


FORMS = {
    "none": lambda kind: lambda function: function,
    "kvferry": lambda kind: ranged(lambda plan: of_plans(kind, [plan])),
    "annotate": annotated,
}


def measure() -> dict[str, float]:
    """Return microseconds per transfer of each form, beyond those of none: medians of rounds."""
    transfers = {name: transfer_with(form) for name, form in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in transfers}
    for _ in range(ROUNDS):
        for name, transfer in transfers.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                transfer()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {name: found - medians["none"] for name, found in medians.items()}


def heard() -> dict[str, float] | None:
    """Measure in a process that the tests' listener listens to; None without a C compiler."""
    sys.path.insert(0, str(TESTS))
    from nvtx_listening import COMPILER, listener

    if COMPILER is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "NVTX_INJECTION64_PATH": str(listener(Path(folder))),
            "NVTX_LISTENER_FILE": os.devnull,
        }
        done = subprocess.run(
            [sys.executable, __file__, "--measure"],
            env={**os.environ, **variables}, check=True, capture_output=True, text=True, timeout=300
        )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the table and the bar."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if "--measure" in sys.argv[1:]:
        assert is_heard
        print(json.dumps(measure()))
        return 0
    assert not is_heard, "a tool listens to this benchmark: run it without one"
    alone, with_tool = measure(), heard()
    rows = [
        {"us per transfer": name, "no tool": f"{alone[name]:.3f}",
         "a tool listens": f"{with_tool[name]:.1f}" if with_tool else "no C compiler"}
        for name in ("kvferry", "annotate")
    ]  # fmt: skip
    return report(
        "ranges", rows, [Bar("nvtx_us_per_transfer", alone["kvferry"], 1.0, at_least=False)]
    )


if __name__ == "__main__":
    sys.exit(main())
