"""What must be so when a soak's faults are over: everything works, ends, and is given back."""

import time
from typing import Any

from soak_cluster import NUM_CHAINS, Cluster, Engine, Prefix
from soak_tally import Tally

from kvferry.errors import TransferFailed
from kvferry.linker.layer_load import LoadRequest
from kvferry.testing import check_telling, write_telling

RECOVERY_S = 40.0
LATE_S = 75.0
"""Longer than a call that outlasts its transfer, and the time for which its span drains."""
CLOSE_S = 3.0
_NUM_PAGES = 8


def num_recovered(cluster: Cluster, tally: Tally) -> int:
    """Return how many linkers save what another one then loads, every byte right."""
    first, second = cluster.engines
    pairs = [(first, second), (second, first)]
    return sum(
        _recovers(engine, other, Prefix(NUM_CHAINS + number, _NUM_PAGES), tally)
        for number, (engine, other) in enumerate(pairs)
    )


def leaks(cluster: Cluster, *, drains: bool) -> dict[str, float]:
    """Return what is still held though nothing is in flight, by name.

    Calls that outlast their transfers are waited for: the store bounds them.

    Args:
        cluster: all of whose transfers have ended.
        drains: whether to wait also for the spans that such calls leave to drain.
    """
    end = time.monotonic() + LATE_S
    found = _held(cluster, drains=drains)
    while any(found.values()) and time.monotonic() < end:
        time.sleep(0.5)
        for engine in cluster.engines:
            # What could not be revoked at once is revoked when the next session starts.
            if engine.store.num_open_puts:
                engine.store.put_session(["soak-end"], [64]).abort()
        found = _held(cluster, drains=drains)
    for engine in cluster.engines:
        engine.pages.check_watched(everything=True)
    return found


def _held(cluster: Cluster, *, drains: bool) -> dict[str, float]:
    stagings = [engine.staging for engine in cluster.engines]
    held: dict[str, float] = {
        "held_staging_bytes": sum(staging.num_held_bytes for staging in stagings),
        "open_put_sessions": sum(engine.store.num_open_puts for engine in cluster.engines),
        "open_get_sessions": sum(engine.store.num_open_gets for engine in cluster.engines),
    }
    if drains:
        held["leaked_staging_bytes"] = sum(
            staging.num_bytes - staging.num_free_bytes for staging in stagings
        )
    return held


def close_at_work(engine: Engine, tally: Tally) -> None:
    """Close a linker with transfers in flight: each must end, and no page be touched after."""
    prefix = Prefix(NUM_CHAINS, _NUM_PAGES)
    counts = {space: len(pages) for space, pages in prefix.wanted(saving=True).items()}
    lent = [ids for _ in range(4) if (ids := engine.pages.lend(counts)) is not None]
    linker, handles = engine.linker, []
    for number, ids in enumerate(lent):
        keys = [f"closing-{number}-{page}" for page in range(_NUM_PAGES)]
        rows = prefix.rows(ids, saving=True)
        if number < 2:  # whose model goes no further
            save: Any = linker.save(keys, rows, layerwise=True)
            save.layer_written(number)
            handles.append(save)
        else:
            load = linker.load_batch([LoadRequest(prefix.keys, rows)])
            load.start()
            handles += load.transfers
        tally.began(engine.name, "save" if number < 2 else "load")
    try:
        linker.close(CLOSE_S)
    except TransferFailed as error:
        tally.found("hangs", f"{engine.name}: {error}")
    for handle in handles:
        if not handle.done():
            tally.found("results", f"{engine.name}: {handle!r} outlived its linker")
    for ids in lent:
        engine.pages.take_back(ids, "a closed linker's transfer")
    time.sleep(0.5)
    engine.pages.check_watched(everything=True)
    _compare_stats(engine, tally)


def _compare_stats(engine: Engine, tally: Tally) -> None:
    """Check that the linker has counted each transfer that it took, once."""
    transfers = engine.linker.stats.snapshot()["transfers"]
    for kind, by_outcome in transfers.items():
        begun = tally.begun[engine.name, kind]
        if sum(by_outcome.values()) != begun:
            tally.found("results", f"{engine.name}: {by_outcome} of {begun} {kind}s counted")


def _recovers(engine: Engine, other: Engine, prefix: Prefix, tally: Tally) -> bool:
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        try:
            _there_and_back(engine, other, prefix, tally)
        except TransferFailed as error:
            tally.failed("after the faults", error.cause)
            time.sleep(0.5)
        else:
            return True
    return False


def _there_and_back(engine: Engine, other: Engine, prefix: Prefix, tally: Tally) -> None:
    counts = {space: len(pages) for space, pages in prefix.wanted(saving=True).items()}
    ids, targets = engine.pages.lend(counts), other.pages.lend(counts)
    if ids is None or targets is None:
        raise TransferFailed("no pages are free")
    try:
        for space, pages in ids.items():
            tags = prefix.tags(space, saving=True)
            write_telling(engine.linker.layout, space, pages, tags)
        save = engine.linker.save(prefix.keys, prefix.rows(ids, saving=True), layerwise=True)
        tally.began(engine.name, "save")
        save.all_written()
        failures = save.result().failures
        if failures:
            raise TransferFailed("not all was stored", failures)
        load = other.linker.load(prefix.keys, prefix.rows(targets, saving=True))
        tally.began(other.name, "load")
        load.result()
        for space, pages in targets.items():
            tags = prefix.tags(space, saving=True)
            try:
                check_telling(other.linker.layout, space, pages, tags)
            except AssertionError as error:
                tally.found("wrong bytes", f"after the faults, {prefix}: {error}")
    finally:
        engine.pages.take_back(ids, "the last save")
        other.pages.take_back(targets, "the last load")
