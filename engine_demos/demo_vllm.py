"""`make demo-vllm`: vLLM itself, on a CPU, with its prefix cache in Mooncake through kvferry.

For each model an engine answers prompts, stores their pages and ends; a new process answers the
same prompts, and a longer one, with the prefix from Mooncake. The store is harmed under a running
engine, requests are preempted, and times to the first token stand beside those of vLLM's
ExampleConnector. Prints tables and bars; exit status 1 if one is short.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from demo_sglang import write_models
from engine_process import EngineError
from sabotage import SabotageError
from sglang_bed import Engine
from sglang_hits import run_hits
from sglang_report import Results, report
from vllm_bed import VllmBed
from vllm_cases import CASES
from vllm_faults import LEGEND, VllmFaults
from vllm_first import run_first
from vllm_preempt import run_preempted

from kvferry.errors import KVFerryError

FIRST_HEADING = """\
time to first token, medians of 3 prompts, one at a time; said: why a connector has none
(vLLM's MooncakeStoreConnector is not here: it records a CUDA event for every save)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every bar is kept, 1 if not, 2 for arguments that cannot be used."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        print(f"MODELS has {' '.join(unknown)}, wanted some of: {' '.join(CASES)}")
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - begin_s:4.0f} s] {text}", file=sys.stderr, flush=True)

    results = Results([CASES[name] for name in options.models or CASES])
    try:
        _run(results, out, options.quick, note)
    except (EngineError, SabotageError, KVFerryError, OSError) as error:
        results.failure = f"{type(error).__name__}: {error}"
    results.seconds = time.monotonic() - begin_s
    status = report(results, LEGEND)
    print(f"logs are in {out}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_vllm", description=__doc__.split("\n\n")[1])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--quick", action="store_true", help="three of the faults, and no ExampleConnector"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("engine_demo_out"), help="folder for models and logs"
    )
    return parser


def _run(results: Results, out: Path, quick: bool, note: Callable[[str], None]) -> None:
    """Run all cases; results are kept as they come, whatever happens later."""
    models = out / "models"
    note(f"models are made in {models}")
    write_models([case.name for case in results.cases], out)
    preempted: list[dict[str, object]] = []
    first: list[dict[str, object]] = []
    for case in results.cases:

        def tell(text: str, name: str = case.name) -> None:
            note(f"{name}: {text}")

        with VllmBed(case, models / case.name, out) as bed:

            def harm(
                engine: Engine, is_harmed: bool = case is results.harmed, bed: VllmBed = bed
            ) -> None:
                if is_harmed:
                    faults = VllmFaults(bed, engine, tell)
                    faults.run(results.faults, quick=quick)
                    results.more_bars += faults.bars

            run_hits(bed, results.hits, tell, harm)
            if case is results.harmed:
                rows, bars = run_preempted(bed, tell)
                preempted += rows
                results.more_bars += bars
                results.more.append(("preempted, the cache too small for the answers:", preempted))
            if not quick:
                first += run_first(bed, out, tell)
    if first:
        results.more.append((FIRST_HEADING, first))


if __name__ == "__main__":
    sys.exit(main())
