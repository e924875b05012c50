"""One command that checks kvferry on a GPU within minutes: `python3 benchmarks/gpu_check.py OUT`.

Needs Python, torch and Triton, and nothing installed: it runs from the checkout. Every part is a
process with a time limit, and what it finds is in OUT as soon as it ends. Run again, it goes on
with the parts that are not done. Without a GPU the same parts run small, by Triton's interpreter.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_process import Ended, run_bounded
from gpu_report import bar_line, is_done, is_same, passed, read_result, show, write_report

HERE = Path(__file__).resolve().parent
TOTAL_S = 450.0
"""Of all parts on a GPU, unless `--total-s` says otherwise."""

PROBE_S = 90.0
"""For the first question: which GPU is there, and does it answer?"""

CPU_PATIENCE = 3.0
"""So many times the limits hold where there is no GPU, which nobody has lent for minutes."""

LEAST_S = 3.0
"""With less time than that left, a part is not begun."""


@dataclass(frozen=True)
class Part:
    """One question, answered by a file with a function `run(check)`.

    Attributes:
        name: of its files in OUT.
        limit_s: how long it may run.
        script: the file; `gpu_NAME.py` beside this one by default.
    """

    name: str
    limit_s: float
    script: Path | None = None

    @property
    def path(self) -> Path:
        """Where the part's code is."""
        return self.script or HERE / f"gpu_{self.name}.py"


PARTS = (
    Part("doctor", 45),
    Part("bytes", 120),
    Part("copy", 30),
    Part("pack", 60),
    Part("budget", 60),
    Part("waits", 45),
    Part("graph", 30),
    Part("baseline", 40),
    Part("dispatch", 20),
    Part("bulk", 45),
    Part("sweep", 180),
)
"""In the order of what one wants to know first, should the time not suffice."""


def environment(on_gpu: bool) -> dict[str, str]:
    """Return the environment of the parts: this checkout, and the interpreter where no GPU is."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(HERE.parent / "src"), str(HERE), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    kept["PYTHONUNBUFFERED"] = "1"
    if not on_gpu:
        kept["TRITON_INTERPRET"] = "1"
        # Tensors are small, and threads that wait for each other cost more than they save.
        kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def probe(out: Path) -> dict[str, Any] | str:
    """Return the machine's facts, or why they are not to be had."""
    log = out / "machine.log"
    ended = run_bounded(
        [sys.executable, str(HERE / "gpu_machine.py")], log, PROBE_S, environment(True)
    )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if ended.timed_out:
        return f"torch and its GPU did not answer within {PROBE_S:.0f} s; {ended.text}"
    if ended.code:
        return f"{lines[-1] if lines else 'no output'} ({ended.text}; see {log})"
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_part(part: Part, out: Path, machine: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Run one part to its end or its limit; return its result, which is in its file too."""
    on_gpu = machine["device"] != "cpu"
    path, log = out / f"{part.name}.json", out / f"{part.name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "gpu_part.py"), str(part.path), str(path),
               "cuda:0" if on_gpu else "cpu", f"{limit_s:.1f}"]  # fmt: skip
    ended = run_bounded(command, log, limit_s, environment(on_gpu))
    result = _judged(read_result(path) or _empty(), ended)
    return _kept(result, ended.seconds, out, part, machine)


def _judged(result: dict[str, Any], ended: Ended) -> dict[str, Any]:
    if ended.timed_out:
        why = f"stopped after {ended.seconds:.0f} s at «{result['at']}»"
        if ended.code is None:
            why += f"; {ended.text}"
        result.update(state="timed out", why=why)
    elif result["state"] == "running" or (ended.code and result["state"] != "failed"):
        # It died without a word: what it measured before may be what it died of.
        result.update(figures={}, rows=[], bars=[])
        result.update(state="failed", why=f"{ended.text} at «{result['at']}»")
    return result


def _kept(
    result: dict[str, Any], seconds: float, out: Path, part: Part, machine: Mapping[str, Any]
) -> dict[str, Any]:
    result |= {"seconds": round(seconds, 1), "machine": dict(machine)}
    path = out / f"{part.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _empty(state: str = "running", why: str = "") -> dict[str, Any]:
    return {"state": state, "why": why, "at": "start", "summary": "", "figures": {}, "rows": [],
            "bars": [], "left_out": [], "attached": {}}  # fmt: skip


def run_all(
    parts: Iterable[Part],
    out: Path,
    machine: Mapping[str, Any],
    *,
    only: Sequence[str] | None = None,
    again: Sequence[str] = (),
    total_s: float = TOTAL_S,
) -> dict[str, dict[str, Any]]:
    """Run every part that is not done; return all results, in order.

    Args:
        parts: what to run.
        out: folder of the results.
        machine: its facts, see `gpu_machine`.
        only: the parts to run; of the others, what was found before is reported. All by default.
        again: parts to run although they are done.
        total_s: for all of them; parts that find no time left are `not run`.
    """
    end_s = time.monotonic() + total_s
    results: dict[str, dict[str, Any]] = {}
    for part in parts:
        earlier = read_result(out / f"{part.name}.json")
        left_s = end_s - time.monotonic()
        if only is not None and part.name not in only:
            if earlier is not None and is_same(earlier, machine):
                results[part.name] = earlier
            continue
        if earlier is not None and part.name not in again and is_done(earlier, machine):
            result, note = earlier, ", done before"
        elif left_s < LEAST_S:
            why = f"nothing left of {total_s:.0f} s; run again to go on"
            result, note = _kept(_empty("not run", why), 0.0, out, part, machine), ""
        else:
            print(f"{part.name} ...", flush=True)
            result, note = (
                run_part(part, out, machine, min(part.limit_s * _patience(machine), left_s)),
                "",
            )
        results[part.name] = result
        write_report(out, machine, results)
        text = result["why"] or result["summary"]
        print(
            f"{part.name}: {result['state']}{note}, {result['seconds']:.1f} s  {text}", flush=True
        )
        for bar in (bar for bar in result["bars"] if bar["value"] is not None):
            print("  " + bar_line(part.name, bar), flush=True)
    return results


def _patience(machine: Mapping[str, Any]) -> float:
    return CPU_PATIENCE if machine["device"] == "cpu" else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if every bar is kept, 1 if one is short or a part went wrong."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the results; parts done there are kept")
    parser.add_argument("--only", action="append", choices=names, help="this part; may be repeated")
    parser.add_argument("--again", action="append", default=[], choices=names,
                        help="run this part although it is done; may be repeated")  # fmt: skip
    parser.add_argument("--total-s", type=float, help="for all parts together")
    parser.add_argument("--commit", help="what to record as the commit, where there is no .git")
    asked = parser.parse_args(arguments)
    # So that a driver which is told to end kills the part that runs, instead of leaving it alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    machine = probe(asked.out)
    if isinstance(machine, str):
        print(f"gpu-check cannot begin: {machine}", file=sys.stderr)
        return 2
    if asked.commit:
        machine["commit"] = asked.commit
    where = machine["device"]
    if where == "cpu":
        where = "a CPU: everything runs small, in Triton's interpreter, and no speed is reported"
    print(f"on {where}", flush=True)
    total_s = asked.total_s or TOTAL_S * _patience(machine)
    results = run_all(
        PARTS, asked.out, machine, only=asked.only, again=asked.again,
        total_s=total_s - (time.monotonic() - begin),
    )  # fmt: skip
    print("\n" + show(machine, results))
    return 0 if passed(results) else 1


if __name__ == "__main__":
    sys.exit(main())
