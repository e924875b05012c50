"""A long mix of saves, loads, cancels and faults, every byte checked: `make soak MINUTES=10`.

Two linkers over two clients of one small store write and read the same keys, whole and layer by
layer, while master and owner are killed and frozen and objects are removed, replaced and crowded
out. Now and then the master loses all objects while saves are held between two layers, and another
client stores its own in their place. Wrong bytes, overwritten victims, leaks and hangs must be
none; failures are counted by cause, and are no fault.
"""

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bars import Bar, report
from soak_callers import Caller
from soak_cluster import Cluster
from soak_ending import close_at_work, leaks, num_recovered
from soak_faults import KINDS, Faults
from soak_quiet import Quiet
from soak_tally import Tally
from soak_watch import HANG_S, Watch, peak_bytes

from kvferry.errors import KVFerryError

CALLERS = {"patient": 3, "hasty": 2}
GROWTH_BYTES = 64 << 20


def main() -> int:
    """Run, print the table and the bars; the exit status tells whether all are kept."""
    options = _options()
    log_path = _logs_apart()
    torch.set_num_threads(1)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    seconds = options.minutes * 60
    print(f"soak of {options.minutes:g} minutes, --seed {seed}; logs: {log_path}", flush=True)
    tally = Tally()
    watch = Watch(tally)
    threads_before = threading.active_count()
    cluster = Cluster(tally)
    began = time.monotonic()
    kinds = [] if options.no_faults else [kind for kind in KINDS if options.faults in kind]
    alive = _run(seed, seconds, cluster, tally, watch, kinds)
    taken_s = time.monotonic() - began
    if alive:
        print("threads hang:", ", ".join(alive), flush=True)
        os._exit(1)  # closing would hang too, and its children end with this process
    recovered = num_recovered(cluster, tally)
    watch.look()
    found_leaks = leaks(cluster, drains=options.minutes >= 1)
    watch.look()
    for engine in cluster.engines:
        close_at_work(engine, tally)
    try:
        cluster.close()
    except KVFerryError as error:
        tally.unexpected("closing", error)
    watch.end()
    rows = _rows(tally, watch, seed, taken_s)
    gc.collect()
    num_left = threading.active_count() - threads_before
    for line in tally.reports:
        print(line)
    bars = [
        Bar("wrong_bytes", tally.wrong["wrong bytes"], 0, at_least=False),
        Bar("overwritten_victims", tally.wrong["victims"], 0, at_least=False),
        Bar("wrong_results", tally.wrong["results"], 0, at_least=False),
        Bar("unexpected_errors", tally.wrong["errors"], 0, at_least=False),
        Bar("hangs", tally.wrong["hangs"], 0, at_least=False),
        *(Bar(name, value, 0, at_least=False) for name, value in found_leaks.items()),
        Bar("threads_left", num_left, 0, at_least=False),
        Bar("linkers_that_recovered", recovered, len(cluster.engines), at_least=True),
        Bar("growth_mb", watch.growth_bytes() / 1e6, GROWTH_BYTES / 1e6, at_least=False),
    ]
    if options.no_faults:  # nobody has spoilt an object, so none may be taken for spoilt
        bars.append(Bar("loads_refused_as_spoilt", tally.num_spoilt, 0, at_least=False))
    status = report("soak", rows, bars)
    if status == 0:
        log_path.unlink()
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of callers and faults; chosen if left out")
    parser.add_argument("--faults", default="", help="only those whose names hold this text")
    parser.add_argument("--no-faults", action="store_true", help="inject none; no load may be bad")
    parser.add_argument("--write", action="store_true", help="record the figures")
    options = parser.parse_args()
    if not any(options.faults in kind for kind in KINDS):
        parser.error(f"--faults is {options.faults!r}, wanted a part of one of: {', '.join(KINDS)}")
    return options


def _logs_apart() -> Path:
    """Send what is logged to a file: Mooncake writes lines for every call that a fault breaks."""
    handle, name = tempfile.mkstemp(prefix="kvferry-soak-", suffix=".log")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # where the stacks of a hang still go
    os.dup2(handle, 2)
    os.close(handle)
    return Path(name)


def _run(
    seed: int, seconds: float, cluster: Cluster, tally: Tally, watch: Watch, kinds: Sequence[str]
) -> list[str]:
    """Let callers and faults run; return the names of threads that did not end."""
    quiet = Quiet(sum(CALLERS.values()))
    threads: list[threading.Thread] = [
        Caller(number, seed, engine, tally, watch, quiet)
        for engine in cluster.engines
        for number in range(CALLERS[engine.name])
    ]
    if kinds:
        threads.append(Faults(seed, cluster, tally, watch.stopping, quiet, kinds))
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not watch.look():
        time.sleep(min(1.0, seconds / 20))
    watch.stopping.set()
    end = time.monotonic() + HANG_S
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end and not watch.look():
            thread.join(0.5)
    return [thread.name for thread in threads if thread.is_alive()]


def _rows(tally: Tally, watch: Watch, seed: int, taken_s: float) -> list[dict[str, Any]]:
    return [
        {"what": "seed", "count": seed},
        {"what": "seconds", "count": round(taken_s)},
        {"what": "operations", "count": sum(tally.operations.values())},
        {"what": "faults", "count": sum(tally.faults.values())},
        *tally.rows(),
        {"what": "peak resident MB", "count": peak_bytes() // 1_000_000},
        {"what": "growth of resident MB", "count": watch.growth_bytes() // 1_000_000},
    ]


if __name__ == "__main__":
    sys.exit(main())
