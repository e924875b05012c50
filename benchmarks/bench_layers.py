"""Packed layer groups beside ranges straight from the pools: `make bench-layers`.

Saves and loads pages of DeepSeek-V3.2's geometry (61 layers of 41,984 + 8,448 bytes) layer by layer
through the linker, to an owner in another process over TCP loopback, and moves the same bytes as a
linker without packing does: 122 ranged calls from and into the pools. Turn by turn in one run,
pack and unpack included, every byte of every load compared. Like the ranges, the linker that the
bars judge checks no sums; the one that does is shown beside it.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bars import Bar, report
from pool_ranges import PoolRanges, Sent, ms_since

from kvferry import (
    CacheLayout,
    Linker,
    LinkerConfig,
    LocalMaster,
    LocalOwner,
    MooncakeConfig,
    MooncakeStore,
    StagingBuffer,
)
from kvferry.linker.eviction import evict
from kvferry.models import description
from kvferry.testing import check_telling, make_tensors, poison, write_telling

MODEL = "deepseek-v3.2-dsa-fp8"
CASES = ((32, 11), (128, 3))
"""Pages, and rounds that count."""
WARM_ROUNDS = 2
RANGES, FRAGMENTS = "ranges from the pools", "fragments from the pools"
PACKED, SEALED, WHOLE = "packed groups", "packed groups, checksums", "packed whole objects"

Move = Callable[[list[str], list[int]], Sent]


@dataclass
class Way:
    """One way to move pages to the store and back.

    Attributes:
        put: saves pages under keys.
        get: loads them.
        object_keys: the store's keys for page keys.
        puts: what each round's put took.
        gets: what each round's get took.
    """

    put: Move
    get: Move
    object_keys: Callable[[list[str]], list[str]]
    puts: list[Sent] = field(default_factory=list)
    gets: list[Sent] = field(default_factory=list)


def save_layers(linker: Linker, keys: list[str], page_ids: list[int]) -> Sent:
    """Save all layers at once, as an engine does that saves after the forward."""
    begin = time.perf_counter()
    save = linker.save(keys, page_ids, layerwise=True)
    save.all_written()
    result = save.result()
    taken_ms = ms_since(begin)
    assert result.num_objects == len(keys), result
    return Sent(taken_ms, taken_ms, len(save.groups), len(save.groups))


def load_layers(linker: Linker, keys: list[str], page_ids: list[int]) -> Sent:
    """Load layer by layer, for a model whose layers take no time."""
    begin = time.perf_counter()
    load = linker.load(keys, page_ids, layerwise=True)
    load.start()
    landed = [load.wait_layer(0)]
    first_ms = ms_since(begin)
    landed += [load.wait_layer(layer_id) for layer_id in range(1, linker.layout.num_layers)]
    last_ms = ms_since(begin)
    load.result()
    assert {waited.state for waited in landed} == {"landed"}, landed
    return Sent(first_ms, last_ms, len(load.groups), len(load.groups))


def save_whole(linker: Linker, keys: list[str], page_ids: list[int]) -> Sent:
    """Save whole objects."""
    begin = time.perf_counter()
    result = linker.save(keys, page_ids).result()
    taken_ms = ms_since(begin)
    assert result.num_objects == len(keys), result
    return Sent(taken_ms, taken_ms, 0, 1)


def load_whole(linker: Linker, keys: list[str], page_ids: list[int]) -> Sent:
    """Load whole objects."""
    begin = time.perf_counter()
    linker.load(keys, page_ids).result()
    taken_ms = ms_since(begin)
    return Sent(taken_ms, taken_ms, 0, 1)


class Bench:
    """Pools, a store, and the ways between them."""

    def __init__(self, stack: ExitStack, num_pages: int) -> None:
        self._num_pages = num_pages
        plain = CacheLayout.from_description(description(MODEL))
        self._layout = plain.bind(make_tensors(plain, 2 * num_pages))
        num_bytes = num_pages * plain.object_bytes["full"]
        master = stack.enter_context(LocalMaster())
        stack.enter_context(LocalOwner(master.address, 8 * num_bytes))
        self._store = stack.enter_context(MooncakeStore(MooncakeConfig(master.address)))
        pages = random.Random(0).sample(range(2 * num_pages), 2 * num_pages)
        self._sources, self._destinations = pages[:num_pages], pages[num_pages:]
        self.ways = self._make_ways(stack, num_bytes)

    def _make_ways(self, stack: ExitStack, num_bytes: int) -> dict[str, Way]:
        ranges = PoolRanges(self._layout, self._store)
        ways = {
            RANGES: Way(ranges.put, ranges.get, list),
            FRAGMENTS: Way(ranges.put_fragments, ranges.get, list),
        }
        for integrity, name in ((False, PACKED), (True, SEALED)):
            staging = StagingBuffer(num_bytes + (1 << 20), device=torch.device("cpu"))
            config = LinkerConfig(
                namespace=name.replace(" ", "-"), integrity=integrity, part_bytes=64 << 20
            )
            linker = stack.enter_context(Linker(self._layout, self._store, staging, config))
            object_keys = partial(linker.keys.object_keys, space="full")
            put, get = partial(save_layers, linker), partial(load_layers, linker)
            ways[name] = Way(put, get, object_keys)
            if not integrity:
                put, get = partial(save_whole, linker), partial(load_whole, linker)
                ways[WHOLE] = Way(put, get, object_keys)
        return ways

    def round(self, number: int) -> None:
        """Save and load by every way, in an order that changes from round to round."""
        names = list(self.ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            way = self.ways[name]
            keys = [f"{number}-{name}-{page}".replace(" ", "-") for page in range(self._num_pages)]
            poison(self._layout)
            write_telling(self._layout, "full", self._sources, range(self._num_pages))
            put = way.put(keys, self._sources)
            get = way.get(keys, self._destinations)
            check_telling(self._layout, "full", self._destinations, range(self._num_pages))
            if number >= WARM_ROUNDS:
                way.puts.append(put)
                way.gets.append(get)
            evict(self._store, way.object_keys(keys))

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows: medians, and ratios within each round."""
        base = self.ways[RANGES]
        rows = []
        for name, way in self.ways.items():
            gets = way.gets if name != FRAGMENTS else []
            rows.append(
                {
                    "way": name,
                    "pages": self._num_pages,
                    "calls": way.puts[-1].num_calls or "by size",
                    "ranges": way.puts[-1].num_ranges * self._num_pages,
                    "put ms": statistics.median(put.last_ms for put in way.puts),
                    "put ratio": _ratio(base.puts, way.puts),
                    "layer 0 ms": statistics.median(g.first_ms for g in gets) if gets else "",
                    "all layers ms": statistics.median(g.last_ms for g in gets) if gets else "",
                    "get ratio": _ratio(base.gets, gets) if gets else "",
                }
            )
        return rows


def _ratio(base: list[Sent], other: list[Sent]) -> float:
    """Return how many times faster than the base, the median over the rounds."""
    return statistics.median(
        before.last_ms / after.last_ms for before, after in zip(base, other, strict=True)
    )


def main() -> int:
    """Print the table and the bars."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    rows: list[dict[str, Any]] = []
    for num_pages, num_rounds in CASES:
        with ExitStack() as stack:
            bench = Bench(stack, num_pages)
            for number in range(num_rounds + WARM_ROUNDS):
                bench.round(number)
            rows += bench.rows()
    print(
        f"{MODEL}, remote owner (warm), TCP loopback; rounds: "
        + ", ".join(f"{rounds} of {pages} pages" for pages, rounds in CASES)
        + "; every byte compared; ratio: of ranges from the pools in the same round"
    )
    judged = next(row for row in rows if row["way"] == PACKED)
    bars = [
        Bar("put_over_ranges", judged["put ratio"], 2.5, at_least=True),
        Bar("get_over_ranges", judged["get ratio"], 2.5, at_least=True),
    ]
    return report("layers", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
