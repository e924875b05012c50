"""The GPU check's results: a file for each part, what need not run again, the table, the bars."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bars import Bar, table

IDENTITY = ("device", "torch", "triton", "sources")
"""What must be the same for an earlier result to count."""

LOG_LINES = 30
"""How much of a failed part's log the report holds."""

BAD = ("failed", "timed out", "not run")


def read_result(path: Path) -> dict[str, Any] | None:
    """Return what a part's file holds; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_done(result: Mapping[str, Any] | None, machine: Mapping[str, Any]) -> bool:
    """Whether an earlier result serves: it ended well, with the same code on the same device."""
    return result is not None and result.get("state") == "ok" and is_same(result, machine)


def is_same(result: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Whether a result comes from the same code on the same device."""
    known = result.get("machine", {})
    return all(known.get(key) == machine.get(key) for key in IDENTITY)


def bar_line(part: str, bar: Mapping[str, Any]) -> str:
    """Return `bar NAME VALUE WANTED ok|short|skipped`."""
    bound = f"{'>=' if bar['at_least'] else '<='}{bar['wanted']:g}"
    if bar["value"] is None:
        return f"bar {part}.{bar['name']} not-measured {bound} skipped"
    return f"bar {part}.{bar['name']} {bar['value']:.3f} {bound} {judge(bar)}"


def judge(bar: Mapping[str, Any]) -> str:
    """Return `ok`, `short`, or `skipped` for a bar without a figure."""
    if bar["value"] is None:
        return "skipped"
    return "ok" if Bar("", bar["value"], bar["wanted"], bar["at_least"]).ok else "short"


def passed(results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no part went wrong and no bar is short; what was skipped is not wrong."""
    return not any(
        result["state"] in BAD or any(judge(bar) == "short" for bar in result["bars"])
        for result in results.values()
    )


def write_report(
    out: Path, machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write `report.json`: all that the parts' files hold, and the ends of the logs of bad ones."""
    logs = {
        name: log_end(out / f"{name}.log")
        for name, result in results.items()
        if result["state"] in BAD
    }
    report = {"machine": machine, "passed": passed(results), "parts": results, "logs": logs}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def log_end(path: Path) -> list[str]:
    """Return a log's last lines; none if there is no log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def show(machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the whole report as text: figures by part, what was left out, bars, parts."""
    lines = []
    for name, result in results.items():
        if result["rows"]:
            lines += [f"-- {name}", *_tables(result["rows"]), ""]
    plain = [
        (f"{name}.{key}", value)
        for name, result in results.items()
        for key, value in result["figures"].items()
    ]
    if plain:
        width = max(len(key) for key, _ in plain)
        lines += [f"{key:<{width}}  {_figure(value)}" for key, value in plain] + [""]
    left_out = [
        f"left out: {name}: {what}"
        for name, result in results.items()
        for what in result["left_out"]
    ]
    if left_out:
        lines += [*left_out, ""]
    bars = [bar_line(name, bar) for name, result in results.items() for bar in result["bars"]]
    if bars:
        lines += [*bars, ""]
    parts = [
        {"part": name, "state": result["state"], "s": f"{result['seconds']:.1f}"}
        for name, result in results.items()
    ]
    said = [result["why"] or result["summary"] for result in results.values()]
    heads, *body = table(parts).splitlines()
    lines += [heads, *(f"{row}  {text}".rstrip() for row, text in zip(body, said, strict=True)), ""]
    lines.append(
        f"{machine['device']}, driver {machine.get('driver', 'none')}, torch {machine['torch']}, "
        f"triton {machine['triton']}, commit {machine['commit'][:12]}, {machine['date']}"
    )
    lines.append(verdict(results))
    return "\n".join(lines)


def verdict(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the last line: `PASS`, or what is wrong."""
    wrong = [f"{name} {result['state']}" for name, result in results.items()
             if result["state"] in BAD]  # fmt: skip
    wrong += [f"{name}.{bar['name']} short" for name, result in results.items()
              for bar in result["bars"] if judge(bar) == "short"]  # fmt: skip
    if wrong:
        return "FAIL: " + ", ".join(wrong)
    missing = sum(judge(bar) == "skipped" for each in results.values() for bar in each["bars"])
    skipped = sum(result["state"] == "skipped" for result in results.values())
    if missing or skipped:
        return f"PASS, but {_count(missing, 'bar')} not measured, {_count(skipped, 'part')} skipped"
    return "PASS"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table for each kind of rows: those with the same columns, in order."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    return [line for kind in kinds.values() for line in table(kind).splitlines()]


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
