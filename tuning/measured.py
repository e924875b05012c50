"""The file that a sweep leaves: checked by the reader of such files, then written, and drawn."""

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvferry.tuned import DIRECTIONS, SCHEMA, parse
from kvferry.tuning.choose import beside_of, classes_of, faults_of
from kvferry.tuning.derive import text_of
from kvferry.tuning.plans import Group, Plan
from kvferry.tuning.records import Record
from kvferry.tuning.target import Target
from kvferry.tuning.workload import LAYOUTS


def content_of(
    plan: Plan, target: Target, about: Mapping[str, str], records: Mapping[Group, Record]
) -> dict[str, Any] | None:
    """Return what the file holds; None if there is no class of one direction or the other.

    Beyond what `kvferry.tuned` reads: the plan, the layouts, figures by layout, what moves cost a
    matmul, classes that were left out, candidates that failed.
    """
    classes, left_out = classes_of(plan, records)
    if {one["direction"] for one in classes} != set(DIRECTIONS):
        return None
    layouts = {name: LAYOUTS[name].what for names in plan.layouts.values() for name in names}
    return {
        "schema": SCHEMA,
        "gpu": target.gpu,
        "device_names": list(target.device_names),
        "origin": "measured",
        "architecture": target.architecture,
        "triton": about["triton"],
        "torch": about["torch"],
        "driver": about["driver"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": about["commit"],
        "sources": about["sources"],
        "rule": "see tuning/plans.py and tuning/choose.py",
        "plan": plan.name,
        "num_rounds": plan.num_rounds,
        "layouts": layouts,
        "classes": classes,
        "beside_matmul": beside_of(records.values()),
        "left_out": left_out,
        "failed": faults_of(records.values()),
    }


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write a file, whole or not at all.

    Raises:
        ArgumentError: the loader would not read it; nothing is written then.
    """
    parse(dict(content), str(path))
    part = path.with_name(path.name + ".part")
    part.write_text(text_of(dict(content)), encoding="utf-8")
    os.replace(part, path)


def draw(content: Mapping[str, Any], target: Target, path: Path) -> str:
    """Write the picture of the budget curve; return a line that says so, or why there is none."""
    try:
        from kvferry.tuning import curve
    except ImportError as error:
        return f"no picture: {error}; pip install matplotlib, then sweep --resume draws it"
    warning = "Triton's interpreter on a CPU: this says nothing about any GPU"
    curve.draw(content, path, warning if target.is_cpu else "")
    return f"wrote {path}"
