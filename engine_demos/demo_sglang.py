"""`make demo-sglang`: SGLang itself, on a CPU, with its prefix cache in Mooncake through kvferry.

For each model an engine answers prompts, stores their pages and ends; a new process answers the
same prompts, and a longer one, with the prefix from Mooncake. Then the store is harmed under a
running engine. Prints a table of hits, one of faults, and bars; exit status 1 if one is short.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_process import EngineError
from sabotage import SabotageError
from sglang_bed import Bed, Engine
from sglang_cases import CASES, Case
from sglang_faults import Faults
from sglang_hits import run_hits
from sglang_report import Results, report

from kvferry.errors import KVFerryError

MODELS_LIMIT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every bar is kept, 1 if not, 2 for arguments that cannot be used."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        print(f"MODELS has {' '.join(unknown)}, wanted some of: {' '.join(CASES)}")
        return 2
    cases = [CASES[name] for name in options.models or CASES]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - begin_s:4.0f} s] {text}", file=sys.stderr, flush=True)

    results = Results(cases)
    try:
        _run(results, out, options.quick, note)
    except (EngineError, SabotageError, KVFerryError, OSError) as error:
        results.failure = f"{type(error).__name__}: {error}"
    results.seconds = time.monotonic() - begin_s
    status = report(results)
    print(f"logs are in {out}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_sglang", description=__doc__.split("\n\n")[1])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="only two of the faults")
    parser.add_argument(
        "--out", type=Path, default=Path("engine_demo_out"), help="folder for models and logs"
    )
    return parser


def _run(results: Results, out: Path, quick: bool, note: Callable[[str], None]) -> None:
    """Run all cases; results are kept as they come, whatever happens later."""
    note(f"models are made in {out / 'models'}")
    write_models([case.name for case in results.cases], out)
    for case in results.cases:

        def tell(text: str, name: str = case.name) -> None:
            note(f"{name}: {text}")

        with Bed(case, out / "models" / case.name, out) as bed:

            def harm(engine: Engine, case: Case = case, bed: Bed = bed) -> None:
                if case is results.harmed:
                    Faults(bed, engine, tell).run(results.faults, quick=quick)

            run_hits(bed, results.hits, tell, harm)


def write_models(names: Sequence[str], out: Path) -> None:
    """Have tiny models written to `out/models`, in a process that ends.

    Raises:
        EngineError: they were not.
    """
    script = str(Path(__file__).with_name("sglang_models.py"))
    log_path = out / "models.log"
    with log_path.open("wb") as log:
        try:
            subprocess.run(
                [sys.executable, script, str(out / "models"), *names],
                stdout=log, stderr=log, timeout=MODELS_LIMIT_S, check=True,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"the models were not made; the log is {log_path}") from error


if __name__ == "__main__":
    sys.exit(main())
