"""`python -m kvferry.tuning sweep`: measure on this GPU which launch numbers are best for it."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.errors import ArgumentError
from kvferry.tuned import CONFIGS
from kvferry.tuning.ahead import compile_ahead, figures_ahead, is_readable
from kvferry.tuning.derive import Candidate, Figures
from kvferry.tuning.groups import measure_all
from kvferry.tuning.inspect import table
from kvferry.tuning.limit import Limit
from kvferry.tuning.measured import content_of, draw, write
from kvferry.tuning.plans import (
    CPU,
    FULL,
    SHORT,
    Plan,
    known_figures,
    pruned,
    told_budget,
    told_bytes,
)
from kvferry.tuning.preview import preview
from kvferry.tuning.records import RecordFile
from kvferry.tuning.target import Target, here, is_interpreter_wanted, named

LEAST_LIMIT_S = 1
_RESERVE = 0.1


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if a candidate failed, or too little was measured for a file; 2 if it cannot be run.
    """
    asked = _parser().parse_args(arguments)
    try:
        if asked.dry_run:
            return _dry_run(asked)
        return _sweep(asked)
    except ArgumentError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: --resume goes on from here", file=sys.stderr)
        return 130


def _dry_run(asked: argparse.Namespace) -> int:
    if is_interpreter_wanted():
        raise ArgumentError(
            "TRITON_INTERPRET is set, wanted it unset: an interpreted kernel has no machine code"
        )
    target = named(asked.gpu) if asked.gpu else here()
    plan = _plan_for(target, asked.short)
    figures, source = _figures(plan, target)
    out = _out(plan, figures)
    print(f"{target.gpu}, {target.architecture}; plan {plan.name}; {source}\n")
    path = (_folder(asked.out, target) / f"{target.stem}.json").resolve()
    with suppress(ValueError):  # it is elsewhere
        path = path.relative_to(Path.cwd())
    print(preview(plan, figures, out, path))
    return 0


def _sweep(asked: argparse.Namespace) -> int:
    limit_s = asked.limit_s
    if limit_s is not None and limit_s < LEAST_LIMIT_S:
        raise ArgumentError(f"limit-s is {limit_s:g}, wanted at least {LEAST_LIMIT_S}")
    # What is kept back is for writing and drawing.
    limit = Limit(None if limit_s is None else limit_s * (1 - _RESERVE))
    target = here()
    if asked.gpu not in (None, target.stem):
        raise ArgumentError(
            f"gpu is {asked.gpu!r} and this is {target.stem}: --dry-run plans for another GPU"
        )
    assert target.device is not None
    folder = _folder(asked.out, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"out is {folder}, wanted a folder: {error.strerror}") from error
    plan = _plan_for(target, asked.short)
    about = target.about()
    file = RecordFile(
        folder / f"{target.stem}.sweep.jsonl",
        # A commit may change what has no part in this; sources that have are told by their hash.
        {name: about[name] for name in about if name != "commit"} | {"plan": plan.name},
        resume=asked.resume,
    )
    if file.records:
        print(f"{len(file.records)} groups are in {file.path} already")
    print(", ".join(f"{name} {text}" for name, text in about.items()), flush=True)
    with limit:
        figures, source = _figures(plan, target)
        out = _out(plan, figures)
        print(f"plan {plan.name}; {source}; {len(out)} candidates are out", flush=True)
        if target.architecture.startswith("sm_"):
            tried = [one for one in plan.all_candidates() if one not in out]
            compile_ahead(tried, target.architecture)
        measure_all(plan, target.device, file, out)
    content = content_of(plan, target, about, file.records)
    if limit.is_up:
        print(f"the limit of {limit_s:g} s was reached; --resume goes on from here")
    return _report(content, target, folder / f"{target.stem}.json", file)


def _report(content: Mapping[str, Any] | None, target: Target, path: Path, file: RecordFile) -> int:
    if content is None:
        print(
            f"no file: not one class of each direction is complete; {len(file.records)} groups "
            f"are in {file.path}"
        )
        return 1
    write(content, path)
    print(table([_row(one) for one in content["classes"]]))
    for one in content["beside_matmul"]:
        told = one["matmul_slowdown"] or f"«not measured»: {one['why_not']}"
        print(f"matmul beside {one['direction']}, {told_budget(one['max_programs'])}: {told}")
    for line in content["left_out"]:
        print(f"left out: {line}")
    for line in content["failed"]:
        print(f"FAILED {line}")
    print(f"wrote {path}; every figure is in {file.path}")
    print(draw(content, target, path.with_suffix(".png")))
    return 1 if content["failed"] else 0


def _row(one: Mapping[str, Any]) -> dict[str, str]:
    config = one["config"]
    return {
        "class": f"{one['direction']}, {told_budget(one['max_programs'])}",
        "bytes": told_bytes(one["num_bytes"]),
        "tile x warps": f"{config['tile_bytes']} x {config['tile_warps']}",
        "units x warps": f"{config['units_per_program']} x {config['unit_warps']}",
        "cache": config["cache"],
        "GB/s": f"{one['gb_per_s']:.4g}",
        "of copy_": f"{one['share_of_copy']:.3g}",
        "spread": f"{one['spread']:.3f}",
    }


def _plan_for(target: Target, is_short: bool) -> Plan:
    if target.is_cpu:
        return CPU
    return SHORT if is_short else FULL


def _folder(out: Path | None, target: Target) -> Path:
    if target.is_cpu and (out is None or out.resolve() == CONFIGS.resolve()):
        raise ArgumentError(
            f"out is {out or CONFIGS}, wanted another folder: an interpreter's figures must not "
            "be taken for a GPU's"
        )
    return out or CONFIGS


def _figures(plan: Plan, target: Target) -> tuple[dict[Candidate, Figures], str]:
    """Return the figures of a plan's candidates, and in words where they are from."""
    arch = target.architecture
    if not is_readable(arch):
        return {}, f"machine code of {arch} is not read, so none is out before it is timed"
    known, name = known_figures(arch, target.stem)
    figures = figures_ahead(plan.all_candidates(), arch, known)
    num_known = sum(one in known for one in figures)
    source = f"figures of {num_known} candidates from {name}, " if num_known else ""
    return figures, f"{source}{len(figures) - num_known} candidates compiled"


def _out(plan: Plan, figures: Mapping[Candidate, Figures]) -> dict[Candidate, str]:
    forms: dict[tuple[str, str, bool], list[Candidate]] = {}
    for one in figures:
        forms.setdefault((one.kernel, one.direction, one.persistent), []).append(one)
    out: dict[Candidate, str] = {}
    for some in forms.values():
        out |= pruned(some, figures, plan.least_in_flight)
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvferry.tuning sweep", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER",
        help="where the file goes; by default tuning/configs, where kvferry finds it")  # fmt: skip
    add("--short", action="store_true", help="fewer sizes, budgets, layouts and candidates")
    add("--limit-s", type=float, metavar="SECONDS",
        help="end by then, and write what is complete")  # fmt: skip
    add("--resume", action="store_true", help="go on where an earlier sweep ended")
    add("--dry-run", action="store_true",
        help="say what would be tried and what is out; needs no GPU")  # fmt: skip
    add("--gpu", metavar="NAME", help="for a dry run: of which GPU, such as NVIDIA_H200")
    return parser
