"""A long mix of saves, loads, cancels and faults, every byte checked: `make soak MINUTES=10`.

Two linkers over two clients of one small store write and read the same keys, whole and layer by
layer, while master and owner are killed and frozen and objects are removed, replaced and crowded
out. Wrong bytes, leaks and hangs must be none; failures are counted by cause, and are no fault.
"""

import argparse
import gc
import os
import random
import sys
import threading
import time
from typing import Any

import torch
from bars import Bar, report
from soak_callers import Caller
from soak_cluster import NUM_CHAINS, Cluster, Engine, Prefix
from soak_faults import KINDS, Faults
from soak_tally import Tally
from soak_watch import HANG_S, Watch, peak_bytes

from kvferry.errors import TransferFailed
from kvferry.testing import check_telling, write_telling

CALLERS = {"patient": 3, "hasty": 2}
RECOVERY_S = 40.0
DRAIN_S = 75.0
"""Longer than a span is kept aside after a call that failed late."""
GROWTH_BYTES = 64 << 20


def main() -> int:
    """Run, print the table and the bars; the exit status tells whether all are kept."""
    options = _options()
    os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
    torch.set_num_threads(1)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    seconds = options.minutes * 60
    print(f"soak of {options.minutes:g} minutes, --seed {seed}", flush=True)
    tally = Tally()
    watch = Watch(tally)
    threads_before = threading.active_count()
    cluster = Cluster(tally)
    began = time.monotonic()
    alive = _run(seed, seconds, cluster, tally, watch)
    taken_s = time.monotonic() - began
    if alive:
        print("threads hang:", ", ".join(alive), flush=True)
        os._exit(1)  # closing would hang too, and its children end with this process
    recovered = sum(
        _recovers(engine, other, Prefix(NUM_CHAINS + number, 8), tally)
        for number, (engine, other) in enumerate(_pairs(cluster))
    )
    leaks = _leaks(cluster, drain_s=DRAIN_S if options.minutes >= 1 else 0.0)
    rows = _rows(tally, watch, seed, taken_s, cluster)
    cluster.close()
    watch.end()
    gc.collect()
    num_left = threading.active_count() - threads_before
    for line in tally.reports:
        print(line)
    bars = [
        Bar("wrong_bytes", tally.wrong["wrong bytes"], 0, at_least=False),
        Bar("wrong_results", tally.wrong["results"], 0, at_least=False),
        Bar("unexpected_errors", tally.wrong["errors"], 0, at_least=False),
        Bar("hangs", tally.wrong["hangs"], 0, at_least=False),
        *(Bar(name, value, 0, at_least=False) for name, value in leaks.items()),
        Bar("threads_left", num_left, 0, at_least=False),
        Bar("linkers_that_recovered", recovered, len(CALLERS), at_least=True),
        Bar("growth_mb", watch.growth_bytes() / 1e6, GROWTH_BYTES / 1e6, at_least=False),
    ]
    return report("soak", rows, bars)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of callers and faults; chosen if left out")
    parser.add_argument("--write", action="store_true", help="record the figures")
    return parser.parse_args()


def _run(seed: int, seconds: float, cluster: Cluster, tally: Tally, watch: Watch) -> list[str]:
    """Let callers and faults run; return the names of threads that did not end."""
    faults = Faults(seed, cluster, tally, watch.stopping)
    threads = [
        Caller(number, seed, engine, tally, watch)
        for engine in cluster.engines
        for number in range(CALLERS[engine.name])
    ]
    for thread in (*threads, faults):
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not watch.look():
        time.sleep(min(1.0, seconds / 20))
    watch.stopping.set()
    end = time.monotonic() + HANG_S
    for thread in (*threads, faults):
        while thread.is_alive() and time.monotonic() < end and not watch.look():
            thread.join(0.5)
    return [thread.name for thread in (*threads, faults) if thread.is_alive()]


def _pairs(cluster: Cluster) -> list[tuple[Engine, Engine]]:
    first, second = cluster.engines
    return [(first, second), (second, first)]


def _recovers(engine: Engine, other: Engine, prefix: Prefix, tally: Tally) -> bool:
    """Whether, the faults being over, what one linker saves the other one loads, in every form."""
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        try:
            _there_and_back(engine, other, prefix)
        except TransferFailed as error:
            tally.ended("after the faults", "failed", error.cause)
            time.sleep(0.5)
        else:
            return True
    return False


def _there_and_back(engine: Engine, other: Engine, prefix: Prefix) -> None:
    counts = {space: len(pages) for space, pages in prefix.wanted(saving=True).items()}
    ids, targets = engine.pages.lend(counts), other.pages.lend(counts)
    if ids is None or targets is None:
        raise TransferFailed("no pages are free")
    try:
        for space, pages in ids.items():
            tags = prefix.tags(space, saving=True)
            write_telling(engine.linker.layout, space, pages, tags)
        save = engine.linker.save(prefix.keys, prefix.rows(ids, saving=True), layerwise=True)
        save.all_written()
        failures = save.result().failures
        if failures:
            raise TransferFailed("not all was stored", failures)
        other.linker.load(prefix.keys, prefix.rows(targets, saving=True)).result()
        for space, pages in targets.items():
            tags = prefix.tags(space, saving=True)
            check_telling(other.linker.layout, space, pages, tags)
    finally:
        engine.pages.take_back(ids, "the last save")
        other.pages.take_back(targets, "the last load")


def _leaks(cluster: Cluster, drain_s: float) -> dict[str, float]:
    """Return what is still held though nothing is in flight, by name."""
    time.sleep(1.0)
    end = time.monotonic() + drain_s
    stagings = [engine.staging for engine in cluster.engines]
    while time.monotonic() < end and any(
        staging.num_free_bytes < staging.num_bytes for staging in stagings
    ):
        time.sleep(1.0)
    for engine in cluster.engines:
        engine.pages.check_watched(everything=True)
    leaks = {
        "held_staging_bytes": sum(staging.num_held_bytes for staging in stagings),
        "open_put_sessions": sum(engine.store.num_open_puts for engine in cluster.engines),
        "open_get_sessions": sum(engine.store.num_open_gets for engine in cluster.engines),
    }
    if drain_s:
        leaks["leaked_staging_bytes"] = sum(
            staging.num_bytes - staging.num_free_bytes for staging in stagings
        )
    return leaks


def _rows(
    tally: Tally, watch: Watch, seed: int, taken_s: float, cluster: Cluster
) -> list[dict[str, Any]]:
    forms = sum(count for (form, _), count in tally.operations.items() if "," not in form)
    return [
        {"what": "seed", "count": seed},
        {"what": "seconds", "count": round(taken_s)},
        {"what": "operations", "count": forms},
        {"what": "faults", "count": sum(tally.faults[kind] for kind in KINDS)},
        *tally.rows(),
        {"what": "peak resident MB", "count": peak_bytes() // 1_000_000},
        {"what": "growth of resident MB", "count": watch.growth_bytes() // 1_000_000},
    ]


if __name__ == "__main__":
    sys.exit(main())
