"""What vLLM's metrics get to know: counters that add up, over steps and workers."""

from types import SimpleNamespace
from typing import Any

from kvferry.linker.vllm_stats import COUNTERS, in_words, since, together, totals


def stats(load_bytes: int, failures: dict[str, int]) -> Any:
    """What a linker's `Stats` tells."""
    one = {"save": 0, "load": load_bytes}
    return SimpleNamespace(
        snapshot=lambda: {
            "transfers": {kind: {"done": int(count > 0)} for kind, count in one.items()},
            "failures": {"save": {}, "load": failures},
            "objects": one,
            "bytes": one,
            "seconds": {kind: {"total": count / 1e6} for kind, count in one.items()},
        }
    )


def test_totals_are_over_all_groups() -> None:
    got = totals([stats(3_000_000, {"missing": 1}), stats(1_000_000, {"missing": 2, "late": 1})])
    assert set(got) == set(COUNTERS)
    assert got["load_bytes"] == 4_000_000
    assert got["load_failures"] == 4
    assert got["load_transfers"] == 2
    assert got["load_seconds"] == 4.0
    assert got["save_bytes"] == 0


def test_steps_and_workers_add_up() -> None:
    before = totals([stats(1_000_000, {})])
    now = totals([stats(3_000_000, {"missing": 1})])
    changed = since(now, before)
    assert changed == {
        "load_bytes": 2_000_000, "load_objects": 2_000_000, "load_failures": 1, "load_seconds": 2.0,
    }  # fmt: skip
    assert since(now, now) == {}
    assert since(now, {}) == {name: value for name, value in now.items() if value}
    assert together(before, changed) == now
    assert together({}, {"load_bytes": 1}) == {"load_bytes": 1}


def test_words() -> None:
    counted = {
        "load_transfers": 4,
        "load_bytes": 6_000_000,
        "load_seconds": 0.2,
        "save_failures": 2,
    }
    assert in_words(counted) == {
        "loads": 4, "load MB": 6.0, "mean load ms": 50.0, "failed saves": 2,
    }  # fmt: skip
    assert in_words({}) == {}
