"""From which page size on should saves leave straight from the pools? `make bench-direct`.

Pools lie block by block, all layers of a page side by side, so that a page is one piece of memory.
Each size is saved by two linkers over the same pools and one connection, turn by turn: straight
from there, and packed into staging before. A remote owner over TCP loopback, its segment warm;
neither side writes checksums. Every object is loaded again, and every byte of it compared.
"""

import os
import statistics
import sys
import time
from contextlib import ExitStack

import torch
from bars import Bar, report

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
from kvferry.pools import PoolTensors
from kvferry.testing import check_telling, poison, write_telling

NUM_LAYERS, PAGE_SIZE = 16, 16
SIZES = [32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20]
NUM_BYTES = 32 << 20
ROUNDS = 15
WARM_ROUNDS = 3


def block_major(object_bytes: int, num_pages: int) -> CacheLayout:
    """Return pools of `num_pages`, a page's layers side by side."""
    row = object_bytes // NUM_LAYERS // PAGE_SIZE // 2
    whole = torch.zeros(num_pages, NUM_LAYERS, PAGE_SIZE, row, dtype=torch.bfloat16)
    views = {layer: whole[:, layer] for layer in range(NUM_LAYERS)}
    return CacheLayout.from_tensors(
        [PoolTensors("kv", "full", "page", views)], page_size=PAGE_SIZE, num_layers=NUM_LAYERS
    )


class Bench:
    """Two linkers over the same pools: one that saves straight from there, one that packs."""

    def __init__(self, stack: ExitStack, store: MooncakeStore, object_bytes: int) -> None:
        """Make pools and linkers; `stack` closes them."""
        self._store = store
        self.num_pages = NUM_BYTES // object_bytes
        self._layout = block_major(object_bytes, 2 * self.num_pages)
        self._linkers = {}
        for name, settings in (
            ("direct", {"direct": "auto", "min_direct_bytes": 0}),
            ("packed", {"direct": "never"}),
        ):
            config = LinkerConfig(
                namespace=f"bench-{object_bytes}", integrity=False, part_bytes=64 << 20, **settings
            )  # type: ignore[arg-type]
            staging = StagingBuffer(2 * NUM_BYTES, device=torch.device("cpu"))
            self._linkers[name] = stack.enter_context(Linker(self._layout, store, staging, config))

    def round(self, number: int) -> dict[str, float]:
        """Return the milliseconds of a save by each, the first to go alternating."""
        taken = {}
        names = list(self._linkers)
        sources, others = range(self.num_pages), range(self.num_pages, 2 * self.num_pages)
        for name in names if number % 2 else names[::-1]:
            linker = self._linkers[name]
            keys = [f"{number}-{name}-{page}" for page in sources]
            poison(self._layout)
            write_telling(self._layout, "full", list(sources), list(sources))
            begin = time.perf_counter()
            saved = linker.save(keys, list(sources)).result()
            taken[name] = (time.perf_counter() - begin) * 1e3
            wanted = self.num_pages if name == "direct" else 0
            assert (saved.num_objects, saved.num_direct) == (self.num_pages, wanted), saved
            self._linkers["packed"].load(keys, list(others)).result()
            check_telling(self._layout, "full", list(others), list(sources))
            evict(self._store, linker.keys.object_keys(keys, "full"))
        return taken


def main() -> int:
    """Print the table and the bars."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    sizes = SIZES[-1:] if "--tiny" in sys.argv[1:] else SIZES
    rows, bars = [], []
    with ExitStack() as stack:
        master = stack.enter_context(LocalMaster())
        stack.enter_context(LocalOwner(master.address, 16 * NUM_BYTES))
        store = stack.enter_context(MooncakeStore(MooncakeConfig(master_address=master.address)))
        for object_bytes in sizes:
            with ExitStack() as inner:
                bench = Bench(inner, store, object_bytes)
                rounds = [bench.round(number) for number in range(ROUNDS + WARM_ROUNDS)]
            rounds = rounds[WARM_ROUNDS:]
            ratio = statistics.median(one["packed"] / one["direct"] for one in rounds)
            rows.append(
                {
                    "page KiB": object_bytes >> 10,
                    "pages": bench.num_pages,
                    "packed ms": statistics.median(one["packed"] for one in rounds),
                    "direct ms": statistics.median(one["direct"] for one in rounds),
                    "packed / direct": ratio,
                }
            )
            if object_bytes >= LinkerConfig().min_direct_bytes:
                name = f"packed_over_direct_{object_bytes >> 10}_KiB"
                bars.append(Bar(name, ratio, 1.0, at_least=True))
    return report("direct", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
