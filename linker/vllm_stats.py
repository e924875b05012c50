"""What vLLM's metrics get to know: counters of a step or more, as plain numbers that add up."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.linker.stats import KINDS, Stats

COUNTERS = {
    f"{kind}_{what}": (f"kvferry:{kind}_{what}", text)
    for kind in KINDS
    for what, text in (
        ("transfers", f"{kind.capitalize()}s of one cache group that ended well."),
        ("failures", f"Failed {kind}s, and failed objects of them."),
        ("objects", f"Page objects that {kind}s moved."),
        ("bytes", f"Bytes that {kind}s moved."),
        ("seconds", f"Seconds from the calls of {kind}s to their ends."),
    )
}
"""Name of a counter here: its name for Prometheus, and what it counts."""


def totals(stats: Iterable[Stats]) -> dict[str, float]:
    """Return the counters of several linkers, since they were made."""
    counted: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    for one in stats:
        now = one.snapshot()
        for kind in KINDS:
            counted[f"{kind}_transfers"] += now["transfers"][kind]["done"]
            counted[f"{kind}_failures"] += sum(now["failures"][kind].values())
            counted[f"{kind}_objects"] += now["objects"][kind]
            counted[f"{kind}_bytes"] += now["bytes"][kind]
            counted[f"{kind}_seconds"] += now["seconds"][kind]["total"]
    return counted


def since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return what was counted in between; only what has changed."""
    return {
        name: value - before.get(name, 0)
        for name, value in now.items()
        if value != before.get(name, 0)
    }


def together(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two counts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def in_words(counted: Mapping[str, float]) -> dict[str, int | float]:
    """Return what a log line tells of a count: bytes as MB, and rates."""
    told: dict[str, Any] = {}
    for kind in KINDS:
        transfers, seconds = counted.get(f"{kind}_transfers", 0), counted.get(f"{kind}_seconds", 0)
        failures = counted.get(f"{kind}_failures", 0)
        if transfers:
            mb = counted.get(f"{kind}_bytes", 0) / 1e6
            told[f"{kind}s"] = int(transfers)
            told[f"{kind} MB"] = round(mb, 1)
            told[f"mean {kind} ms"] = round(seconds / transfers * 1e3, 1)
        if failures:
            told[f"failed {kind}s"] = int(failures)
    return told
