"""Do packed pages reach the rate of Mooncake's own contiguous calls? `make bench-transport`.

Saves and loads 8 objects of 4 MiB through the linker, to an owner in another process over TCP
loopback, and moves the same bytes by `batch_put_from` and `batch_get_into` from the same staging
buffer, turn by turn in one run. Pack and unpack are shown apart; every byte is compared.
"""

import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

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
    TransferResult,
)
from kvferry.linker.eviction import evict
from kvferry.testing import check_telling, make_tensors, poison, write_telling

NUM_OBJECTS = 8
OBJECT_BYTES = 4 << 20
ROUNDS = 41
LAYOUT = {
    "page_size": 64,
    "num_layers": 32,
    "pools": [
        {"name": name, "index": "full", "rows": "token", "row_shape": [4, 128],
         "dtype": "bfloat16", "layers": list(range(32))}
        for name in ("k", "v")
    ],
    "object_bytes": {"full": OBJECT_BYTES},
}  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One round's times, in milliseconds."""

    put: float
    raw_put: float
    get: float
    raw_get: float
    pack: float
    unpack: float


class Bench:
    """Linker and raw client over one connection."""

    def __init__(self, store: MooncakeStore, linker: Linker, staging: StagingBuffer) -> None:
        self._store = store
        self._linker = linker
        self._staging = staging
        self._pages = list(range(NUM_OBJECTS))
        self._others = [NUM_OBJECTS + page for page in self._pages]

    def round(self, number: int) -> Round:
        """Move the same bytes both ways by both, the first to go alternating."""
        write_telling(self._linker.layout, "full", self._pages, self._pages)
        keys = [f"{number}-{page}" for page in self._pages]
        raw_keys = [f"raw-{key}" for key in keys]
        span = self._staging.acquire(NUM_OBJECTS * OBJECT_BYTES, 1.0)
        addresses = list(range(span.address, span.address + span.num_bytes, OBJECT_BYTES))
        sizes = [OBJECT_BYTES] * NUM_OBJECTS
        span.tensor.copy_(torch.arange(span.num_bytes, dtype=torch.int64).to(torch.uint8))
        wanted = span.tensor.clone()

        def raw_put() -> float:
            begin = time.perf_counter()
            codes = self._store.client.batch_put_from(raw_keys, addresses, sizes)
            taken = time.perf_counter() - begin
            assert set(codes) == {0}, codes
            return taken * 1e3

        def raw_get() -> float:
            span.tensor.zero_()
            begin = time.perf_counter()
            lengths = self._store.client.batch_get_into(raw_keys, addresses, sizes)
            taken = time.perf_counter() - begin
            assert lengths == sizes, lengths
            assert torch.equal(span.tensor, wanted), "raw get: bytes differ"
            return taken * 1e3

        if number % 2:
            raw_put_ms = raw_put()
            saved = self._linker.save(keys, self._pages).result()
            raw_get_ms = raw_get()
            loaded = self._load(keys)
        else:
            saved = self._linker.save(keys, self._pages).result()
            raw_put_ms = raw_put()
            loaded = self._load(keys)
            raw_get_ms = raw_get()
        span.release()
        assert saved.num_objects == NUM_OBJECTS, saved
        check_telling(self._linker.layout, "full", self._others, self._pages)
        evict(self._store, [*self._linker.keys.object_keys(keys, "full"), *raw_keys])
        return Round(
            saved.timings.wire_us / 1e3,
            raw_put_ms,
            loaded.timings.wire_us / 1e3,
            raw_get_ms,
            saved.timings.pack_us / 1e3,
            loaded.timings.unpack_us / 1e3,
        )

    def _load(self, keys: list[str]) -> TransferResult:
        poison(self._linker.layout)
        return self._linker.load(keys, self._others).result()


def main() -> int:
    """Print the table and the bars."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    layout = CacheLayout.from_description(LAYOUT)
    layout = layout.bind(make_tensors(layout, 2 * NUM_OBJECTS))
    num_bytes = NUM_OBJECTS * OBJECT_BYTES
    with ExitStack() as stack:
        master = stack.enter_context(LocalMaster())
        stack.enter_context(LocalOwner(master.address, 512 << 20))
        config = MooncakeConfig(master_address=master.address)
        store = stack.enter_context(MooncakeStore(config))
        staging = StagingBuffer(4 * num_bytes, device=torch.device("cpu"))
        linker = stack.enter_context(
            Linker(layout, store, staging, LinkerConfig(namespace="bench", part_bytes=64 << 20))
        )
        bench = Bench(store, linker, staging)
        rounds = [bench.round(number) for number in range(ROUNDS + 2)][2:]
    print(
        f"{NUM_OBJECTS} objects of {OBJECT_BYTES >> 20} MiB, remote owner, TCP loopback, "
        f"{ROUNDS} rounds, every byte compared"
    )
    calls = {
        "save: store calls": [one.put for one in rounds],
        "batch_put_from": [one.raw_put for one in rounds],
        "load: store calls": [one.get for one in rounds],
        "batch_get_into": [one.raw_get for one in rounds],
        "save: pack (torch, CPU)": [one.pack for one in rounds],
        "load: unpack (torch, CPU)": [one.unpack for one in rounds],
    }
    rows = [
        {
            "call": name,
            "median ms": statistics.median(times),
            "GB/s": num_bytes / statistics.median(times) / 1e6,
            "p90 ms": sorted(times)[len(times) * 9 // 10],
        }
        for name, times in calls.items()
    ]
    put = statistics.median(one.raw_put / one.put for one in rounds)
    get = statistics.median(one.raw_get / one.get for one in rounds)
    bars = [
        Bar("put_rate_over_mooncake", put, 0.9, at_least=True),
        Bar("get_rate_over_mooncake", get, 0.9, at_least=True),
    ]
    return report("transport", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
