"""`python -m kvferry.tuning inspect`: compile every kernel, tabulate what came of it, check it."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import triton

from kvferry.tuning.compiled import (
    Variant,
    bulk_variants,
    hinted_variants,
    pair_variants,
    signal_variants,
    tuned_variants,
    variants,
)
from kvferry.tuning.functions import load_function, parse_constants
from kvferry.tuning.gate import faults, load_thresholds
from kvferry.tuning.inspection import TARGETS, Inspected, inspect

BULK_TARGETS = ("sm_90", "sm_100", "sm_120")
"""Those of the targets that have bulk copies."""

_SHORT = 12


def variants_for(target: str) -> Iterator[Variant]:
    """Yield every variant in use on a target: those that move pages, and those that signal."""
    yield from variants()
    yield from hinted_variants()
    yield from pair_variants()
    if target in BULK_TARGETS:
        yield from bulk_variants()
    yield from tuned_variants()
    yield from signal_variants(asm=not target.startswith("gfx"))


def inspect_named(name: str, target: str) -> Inspected:
    """Inspect the variant of this name; for another process, to which kernels can't be sent."""
    return inspect(next(one for one in variants_for(target) if one.name == name), target)


def inspect_all(targets: Sequence[str], only: str = "", processes: int | None = None) -> list[
    Inspected
]:  # fmt: skip
    """Inspect every variant on every target, as many at once as there are processors.

    Args:
        targets: `sm_90`, or `sm_90:PATTERN` for the variants that have the pattern in their names.
        only: a pattern for all targets.
        processes: how many at once.
    """
    wanted = []
    for target, _, pattern in (each.partition(":") for each in targets):
        wanted += [
            (variant.name, target)
            for variant in variants_for(target)
            if re.search(pattern, variant.name) and re.search(only, variant.name)
        ]
    if len(wanted) < _SHORT:  # sooner done than processes are started
        return [inspect_named(*each) for each in wanted]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(inspect_named, *zip(*wanted, strict=True), chunksize=4))


def cells(row: Inspected) -> dict[str, str]:
    """Return a row of the table, text by column; a dash for what is not known there."""
    per_16, share, kib = row.instructions_per_16_bytes, row.payload_share, row.in_flight_bytes
    signals = [name for name in row.ordering if name.startswith(("BAR", "MEMBAR", "ATOM", "RED"))]
    return {
        "variant": row.name,
        "target": row.target,
        "payload": "-" if share is None else f"{row.access_bytes} B, {share:.0%}",
        "per 16 B": "-" if per_16 is None else f"{per_16:.1f}",
        "instructions": str(row.instructions),
        "registers": str(row.registers),
        "spills": str(row.spills + row.spill_bytes),
        "shared B": str(row.shared_bytes),
        "programs": "-" if row.programs is None else str(row.programs),
        "occupancy": "-" if row.occupancy is None else f"{row.occupancy:.2f}",
        "in flight KiB": "-" if kib is None else f"{kib / 1024:g}",
        "barriers and scopes": _ordering(signals) if row.payload_share is None else "-",
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as aligned columns, the first to the left; the first row's keys are the heads."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def main(arguments: Sequence[str]) -> int:
    """Run the command; exit status 1 if a threshold is not kept."""
    asked = _parser().parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set, wanted it unset: an interpreted kernel has no machine code",
              file=sys.stderr)  # fmt: skip
        return 2
    targets = asked.target or TARGETS
    print(f"Triton {triton.__version__}")
    if asked.function:
        variant = load_function(
            asked.function, asked.signature, parse_constants(asked.constants), asked.num_warps,
            asked.payload_bytes, asked.access_bytes,
        )  # fmt: skip
        rows = [inspect(variant, target) for target in targets]
        print(table([cells(row) | accesses(row) for row in rows]))
        found = [
            f"{row.target}: 0 instructions were read: {row.unread}"
            for row in rows
            if not row.instructions
        ]
    else:
        rows = inspect_all(targets, asked.only, asked.jobs)
        if not rows:
            print("no variant has this name, wanted at least one", file=sys.stderr)
            return 2
        version, thresholds = load_thresholds(triton.__version__)
        print(table([cells(row) for row in rows]))
        print(f"thresholds of Triton {version}; gfx: what can be read from AMD's assembly")
        found = [fault for row in rows for fault in faults(row, thresholds)]
    if asked.json:
        record = {"triton": triton.__version__, "rows": [asdict(row) for row in rows],
                  "faults": found}  # fmt: skip
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*(f"FAULT {fault}" for fault in found), f"{len(rows)} compiled, "
                     f"{len(found)} faults"]))  # fmt: skip
    return 1 if found else 0


def accesses(row: Inspected) -> dict[str, str]:
    """Return further columns for any function: how many accesses of which width each thread has."""
    return {
        name: ", ".join(f"{n} x {width} B" for width, n in sorted(found.items())) or "none"
        for name, found in (("loads", row.loads), ("stores", row.stores))
    }


def _ordering(names: Sequence[str]) -> str:
    """`BAR MEMBAR.SYS ATOMG.SYS`: each instruction's first part and its scope."""
    short = []
    for name in names:
        parts = name.split(".")
        scope = [part for part in parts[1:] if part in ("CTA", "GPU", "SYS")]
        short.append(".".join([parts[0], *scope]))
    return " ".join(short) or "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvferry.tuning inspect", description=__doc__)
    add = parser.add_argument
    targets = ", ".join(TARGETS)
    add("--target", action="append", metavar="NAME[:PATTERN]",
        help=f"compile for this alone, of {targets}; may be repeated")  # fmt: skip
    add("--only", default="", metavar="PATTERN",
        help="only variants that have this regular expression in their names")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    add("--jobs", type=int, metavar="N", help="how many to compile at once")
    other = parser.add_argument_group("any @triton.jit function instead of ours; no thresholds")
    add = other.add_argument
    add("--function", metavar="FILE.py:NAME", help="or MODULE:NAME, if it is installed")
    add("--signature", default="", metavar="TYPES",
        help="of the run-time arguments: '*i16:16,i64', :16 for a multiple of 16")  # fmt: skip
    add("--constants", default="", metavar="NAME=VALUE,...", help="the compile-time arguments")
    add("--num-warps", type=int, default=4)
    add("--payload-bytes", type=int, default=0, help="what one program moves")
    add("--access-bytes", type=int, default=16, help="the width that payload should have")
    return parser
