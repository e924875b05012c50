"""Counters of a linker, their words for failures, and Prometheus' text format."""

import re
import threading
from typing import Any

import pytest

from kvferry.causes import CAUSES, cause_of
from kvferry.errors import TransferFailed
from kvferry.linker.stats import BUCKETS_S, STAGES, Stats
from kvferry.linker.streams import Fence
from kvferry.linker.transfer import Progress, Transfer, TransferResult

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = rf'({_NAME})="((?:[^"\\\n]|\\["\\n])*)"'


def transfer(kind: str = "load", **timings_us: float) -> Transfer:
    made = Transfer(kind, (), Fence(), 30.0, 1000.0)
    for name, value in timings_us.items():
        setattr(made.timings, name, value)
    return made


def count_done(stats: Stats, kind: str, total_s: float, progress: Progress) -> None:
    ended = transfer(kind, total_us=total_s * 1e6, wire_us=2000.0)
    stats.ended(ended, progress.result(ended.timings))


def parse(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Check a text of the exposition format, and return its samples: name to labels to value."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    helped: list[str] = []
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped.append(line.split(" ", 3)[2])
        elif line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert kind in ("counter", "histogram")
            assert name not in types  # one block per metric
            types[name] = kind
        else:
            match = re.fullmatch(rf"({_NAME})\{{({_LABEL}(?:,{_LABEL})*)\}} (\S+)", line)
            assert match, line
            name, labels = match[1], re.findall(_LABEL, match[2])
            base = re.sub("_(bucket|sum|count)$", "", name) if name not in types else name
            assert base == list(types)[-1], f"{line} stands apart from its TYPE"
            assert (types[base] == "counter") == name.endswith("_total")
            unescaped = {
                key: re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), value)
                for key, value in labels
            }
            assert len(unescaped) == len(labels)
            samples = found.setdefault(name, {})
            place = frozenset(unescaped.items())
            assert place not in samples
            samples[place] = float(match.groups()[-1])
    assert helped == list(types)
    return found


def value(
    samples: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str
) -> float:
    return samples[f"kvferry_{name}"][frozenset(labels.items())]


def test_what_ended_well_is_counted_by_kind() -> None:
    stats = Stats()
    count_done(stats, "save", 0.002, Progress(num_objects=3, num_bytes=300, num_existing=2))
    count_done(stats, "save", 0.002, Progress(num_objects=1, num_bytes=100))
    count_done(stats, "load", 0.5, Progress(num_objects=4, num_bytes=4000))
    now = stats.snapshot()
    assert now["transfers"] == {
        "save": {"done": 2, "failed": 0},
        "load": {"done": 1, "failed": 0},
    }
    assert now["objects"] == {"save": 4, "load": 4}
    assert now["bytes"] == {"save": 400, "load": 4000}
    assert now["existing"] == {"save": 2, "load": 0}
    assert now["failures"] == {"save": {}, "load": {}}
    assert now["seconds"]["save"]["wire"] == pytest.approx(0.004)
    assert now["seconds"]["save"]["plan"] == pytest.approx(0.002)
    assert now["seconds"]["load"]["total"] == pytest.approx(0.5)
    assert set(now["seconds"]["save"]) == set(STAGES)


def test_failed_transfers_and_failed_objects_of_a_save_are_counted_by_cause() -> None:
    stats = Stats()
    stats.ended(transfer(), TransferFailed("load failed", {"k": "missing (OBJECT_NOT_FOUND)"}))
    stats.ended(transfer(), TransferFailed("load failed: it is so", cause="thread"))
    count_done(
        stats,
        "save",
        0.1,
        Progress(num_objects=1, failures={"a": "no space (X)", "b": "no space", "c": "pending"}),
    )
    now = stats.snapshot()
    assert now["transfers"]["load"] == {"done": 0, "failed": 2}
    assert now["transfers"]["save"] == {"done": 1, "failed": 0}
    assert now["failures"] == {
        "load": {"missing": 1, "thread": 1},
        "save": {"no space": 2, "pending": 1},
    }


def test_a_failed_transfer_took_as_long_as_it_is_old() -> None:
    stats = Stats()
    old = transfer()
    old._began -= 2.0
    stats.ended(old, TransferFailed("load was cancelled"))
    now = stats.snapshot()
    assert 2.0 <= now["seconds"]["load"]["total"] < 3.0
    assert now["durations"]["load"][BUCKETS_S.index(3.0)] == 1


def test_a_duration_falls_into_the_first_bucket_that_holds_it() -> None:
    stats = Stats()
    for total_s in (0.0005, 0.001, 0.0011, 29.0, 30.0, 31.0, 1000.0):
        count_done(stats, "load", total_s, Progress())
    wanted = [0] * (len(BUCKETS_S) + 1)
    wanted[0], wanted[1], wanted[-2], wanted[-1] = 2, 1, 2, 2
    assert stats.snapshot()["durations"] == {"load": wanted, "save": [0] * len(wanted)}


def test_a_snapshot_is_a_copy() -> None:
    stats = Stats()
    before = stats.snapshot()
    before["failures"]["load"]["other"] = 7
    before["durations"]["load"][0] = 7
    before["seconds"]["save"]["wire"] = 7.0
    assert stats.snapshot() == Stats().snapshot()


def test_a_snapshot_shows_a_transfer_whole_or_not_at_all() -> None:
    stats, seen = Stats(), []
    reader = threading.Thread(target=lambda: seen.append(stats.snapshot()))

    class ReadMeanwhile(dict[str, str]):
        def values(self) -> Any:  # asked for in the midst of counting
            reader.start()
            reader.join(0.1)
            return super().values()

    made = transfer("save", total_us=2.0)
    failures = ReadMeanwhile(k="pending")
    stats.ended(made, TransferResult(1, 2, 3, failures, made.timings))
    reader.join(10)
    assert seen == [stats.snapshot()]
    assert seen[0]["failures"]["save"] == {"pending": 1}


def test_the_text_says_what_the_snapshot_says() -> None:
    stats = Stats()
    count_done(stats, "save", 0.02, Progress(num_objects=3, num_bytes=300, num_existing=2))
    count_done(stats, "save", 0.5, Progress(num_objects=1, failures={"k": "no space"}))
    stats.ended(transfer(total_us=31e6), TransferFailed("x", {"k": "lease expired"}))
    samples = parse(stats.prometheus())
    assert value(samples, "transfers_total", kind="save", outcome="done") == 2
    assert value(samples, "transfers_total", kind="load", outcome="failed") == 1
    assert value(samples, "objects_total", kind="save") == 4
    assert value(samples, "bytes_total", kind="save") == 300
    assert value(samples, "existing_objects_total", kind="save") == 2
    assert value(samples, "failures_total", kind="save", cause="no space") == 1
    assert value(samples, "failures_total", kind="load", cause="lease expired") == 1
    assert value(samples, "failures_total", kind="load", cause="missing") == 0
    assert value(samples, "stage_seconds_total", kind="save", stage="wire") == pytest.approx(0.004)
    bucket = "transfer_duration_seconds_bucket"
    assert [value(samples, bucket, kind="save", le=str(bound)) for bound in BUCKETS_S] == [
        0, 0, 0, 1, 1, 1, 2, 2, 2, 2
    ]  # fmt: skip
    assert value(samples, bucket, kind="save", le="+Inf") == 2
    assert value(samples, bucket, kind="load", le="30.0") == 0
    assert value(samples, bucket, kind="load", le="+Inf") == 1
    assert value(samples, "transfer_duration_seconds_count", kind="save") == 2
    assert value(samples, "transfer_duration_seconds_sum", kind="save") == pytest.approx(0.52)


def test_an_unused_linkers_text_is_whole() -> None:
    samples = parse(Stats().prometheus())
    assert {value for samples in samples.values() for value in samples.values()} == {0.0}
    assert len(samples["kvferry_failures_total"]) == 2 * len(CAUSES)


@pytest.mark.parametrize("name", ["plain", 'a "quoted" one', "back\\slash\\n", "two\nlines", "ü"])
def test_labels_are_escaped(name: str) -> None:
    samples = parse(Stats().prometheus({"model": name}))
    assert value(samples, "objects_total", kind="load", model=name) == 0


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("missing (OBJECT_NOT_FOUND)", "missing"),
        ("missing", "missing"),
        ("lease expired (LEASE_EXPIRED)", "lease expired"),
        ("no space (NO_AVAILABLE_HANDLE)", "no space"),
        ("pending (REPLICA_IS_NOT_READY)", "pending"),
        ("wrong size (INVALID_PARAMS)", "wrong size"),
        ("corrupted: checksums of layers [1] differ", "corrupted"),
        ("foreign: the object of another key", "foreign"),
        ("foreign: no kvferry object, its trailer is missing or damaged", "foreign"),
        ("other format: format version 1, wanted 2", "other format"),
        ("failed (TRANSFER_FAIL)", "transport"),
        ("failed (SESSION_TOO_OLD)", "session too old"),
        ("failed (SESSION_LOST)", "session lost"),
        ("failed (ILLEGAL_CLIENT)", "session lost"),
        ("failed (INCOMPLETE)", "incomplete"),
        ("failed (RPC_FAIL)", "unavailable"),
        ("load was cancelled", "cancelled"),
        ("save was cancelled, and its pages are still being touched", "cancelled"),
        ("load not done within 30 s", "deadline"),
        (
            "load failed: no span of 99 bytes within 1 s: 0 of 99 bytes are free, 0 in one piece",
            "staging",
        ),
        ("load failed: Mooncake's master at a:1 does not answer (call: RPC_FAIL)", "unavailable"),
        ("save refused: the linker is closed", "closed"),
        ("the linker was closed", "closed"),
        ("load failed: the store is closed", "closed"),
        ("save failed: its thread died", "thread"),
        ("failed (UNKNOWN_-123)", "other"),
        ("save failed: ZeroDivisionError('division by zero')", "other"),
        ("", "other"),
    ],
)
def test_the_word_for_a_reason(reason: str, cause: str) -> None:
    assert cause in CAUSES
    assert cause_of(reason) == cause


def test_a_failure_knows_its_cause() -> None:
    assert TransferFailed("load was cancelled").cause == "cancelled"
    assert TransferFailed("no idea").cause == "other"
    causes = {"a": "missing (OBJECT_NOT_FOUND)", "b": "lease expired", "c": "lease expired"}
    failed = TransferFailed("load failed: 3 of 4", causes)
    assert (failed.cause, failed.causes) == ("lease expired", causes)
    assert TransferFailed("load failed: 3 of 4", causes, cause="closed").cause == "closed"
