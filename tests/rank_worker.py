"""One rank of a small engine in a process of its own: pools, a store, loads, told what to do."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from linker_bed import Faulty
from rank_processes import LIMIT_S, join

from kvferry.errors import StoreUnavailable, TransferFailed
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.peers import Peers
from kvferry.linker.sglang_loads import Loads
from kvferry.linker.sglang_offloads import Offloads
from kvferry.linker.sglang_ranks import Ranks as Place
from kvferry.linker.sglang_transfers import Pages
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome
from kvferry.linker.streams import Fence
from kvferry.testing import check_telling, make_tensors, poison, write_telling

NUM_PAGES = 40
GROUPS = ((0, 1), (1, 3), (3, 6))


def _pool(name: str, space: str, rows: str, shape: Sequence[int]) -> dict[str, Any]:
    """A pool of every layer."""
    layers = list(range(6))
    return {"name": name, "index": space, "rows": rows, "row_shape": list(shape),
            "dtype": "uint8", "layers": layers}  # fmt: skip


LATENT = _pool("latent", "full", "token", [192])
KINDS: dict[str, list[dict[str, Any]]] = {
    "mha": [_pool("k", "full", "token", [2, 64]), _pool("v", "full", "token", [2, 32])],
    "mla": [LATENT],
    "mla+mamba": [LATENT, _pool("ssm", "state", "page", [70, 3])],
}
"""Kinds of models; a latent row is equal on all ranks, heads and states are each rank's own."""


class Worker:
    """A rank. Its methods are called by name, with the same arguments on all ranks or others."""

    def __init__(self, rank: int, size: int, master_address: str) -> None:
        self.rank = rank
        self.size = size
        self.store = Faulty(MooncakeStore(MooncakeConfig(master_address)))
        self.layout: CacheLayout
        self.linker: Linker
        self.loads: Loads
        self.offloads: Offloads
        self.shared: SharedReads | None = None

    def join(self, port: int) -> None:
        """Come together with the other ranks."""
        join(self.rank, self.size, port)

    def engine(
        self,
        kind: str,
        namespace: str,
        *,
        tp: tuple[int, int] | None = None,
        share: bool = False,
        timeout_s: float = 15.0,
        **settings: Any,
    ) -> None:
        """Make pools of a kind, full of poison, and a linker; `tp` is this rank's place.

        Args:
            kind: of `KINDS`.
            namespace: of the keys.
            tp: (rank, size); this rank among all by default.
            share: whether reads are shared.
            timeout_s: how long ranks wait for each other then.
            settings: of `LinkerConfig`, and cp and pp.
        """
        self.close()
        places = {name: tuple(settings.pop(name)) for name in ("cp", "pp") if name in settings}
        place = Place(tp=tuple(tp or (self.rank, self.size)), **places)
        described = {"page_size": 4, "num_layers": 6, "pools": KINDS[kind]}
        layers = (0, 6) if place.pp[1] > 1 else None  # the toy's stages are alike
        plain = CacheLayout.from_description(
            described, identity=ModelIdentity("toy", tp=place.tp, layers=layers, **places)
        )
        self.layout = plain.bind(make_tensors(plain, NUM_PAGES))
        replicated = frozenset({"full"} if kind != "mha" else ())
        staging = StagingBuffer(1 << 20, device=torch.device("cpu"))
        peers = Peers(range(self.size), torch.device("cpu"), timeout_s=timeout_s) if share else None
        self.shared = SharedReads(peers, staging, replicated) if peers is not None else None
        config = LinkerConfig(
            namespace=namespace, replicated=replicated, groups=GROUPS, part_bytes=10_000,
            lookup_ttl_s=0.0, miss_ttl_s=0.0, **settings,
        )  # fmt: skip
        self.linker = Linker(self.layout, self.store, staging, config, sharing=self.shared)
        self.loads = Loads(self.linker)
        self.offloads = Offloads(self.linker, place, replicated)
        self.store.before.clear()
        self.store.calls.clear()
        self.read_keys: dict[str, int] = {}

    def close(self) -> None:
        """End the engine, if there is one."""
        if hasattr(self, "linker"):
            self.loads.close(10)
            self.offloads.close(10)
            self.linker.close(10)
            del self.linker

    # ---- pages ----

    def _pages(self, keys: Sequence[str], pages: Sequence[int]) -> Pages:
        spaces = self.layout.spaces
        every = list(range(len(keys)))
        ids = {space: torch.tensor(pages) for space in spaces}
        return Pages(list(keys), dict.fromkeys(spaces, every), ids, Fence())

    def _tags(self, space: str, pages: Sequence[int], rank: int | None = None) -> list[int]:
        """What pages tell: the same on all ranks, or a rank's own."""
        rank = self.rank if rank is None else rank
        own = 0 if space in self.linker.config.replicated else 1000 * (rank + 1)
        return [own + page for page in pages]

    def object_keys(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """The objects of page keys, by space."""
        return {space: self.linker.keys.object_keys(keys, space) for space in self.layout.spaces}

    # ---- transfers, as SGLang has them done ----

    def offload(self, keys: Sequence[str], pages: Sequence[int]) -> tuple[bool, list[str]]:
        """Write pages and offload them; whether all are stored, and which objects were put."""
        for space in self.layout.spaces:
            write_telling(self.layout, space, pages, self._tags(space, pages))
        put: list[str] = []
        before = self.store.before.get("put")

        def seen(keys: Sequence[str], *rest: Any) -> Any:
            put.extend(keys)
            return before(keys, *rest) if before else None

        self.store.before["put"] = seen
        self.offloads.put(self._pages(keys, pages), [])
        self._until(lambda: self.offloads.num_completed == 1)
        return self.offloads.pop(), put

    def lookup(self, keys: Sequence[str]) -> list[int]:
        """Prefixes that could be loaded."""
        return self.linker.lookup(keys)

    def load(
        self, keys: Sequence[str], pages: Sequence[int], *, cancel_at: int | None = None
    ) -> str:
        """Load pages; why it failed, empty if it did not.

        Args:
            keys: of the pages.
            pages: destinations.
            cancel_at: the layer before which the load is given up.
        """
        poison(self.layout)
        self.loads.queue("rid", self._pages(keys, pages))
        index = self.loads.start(lambda: [])
        batch = self.loads.running(index)
        assert batch is not None
        for layer in range(self.layout.num_layers):
            if layer == cancel_at:
                batch.give_up("load was cancelled", "cancelled")
            batch.wait_layer(layer, LIMIT_S)
        error = self.loads.finish(index)
        return "" if error is None else str(error)

    def timed_load(self, *arguments: Any, **options: Any) -> tuple[str, float]:
        """As `load`; with the seconds that it took."""
        begin_s = time.monotonic()
        return self.load(*arguments, **options), time.monotonic() - begin_s

    def refused_load(self, keys: Sequence[str], pages: Sequence[int]) -> str:
        """A load that is given up before it has begun."""
        self.loads.queue("rid", self._pages(keys, pages))
        held, self.linker.load_batch = self.linker.load_batch, _given_up  # type: ignore[assignment]
        try:
            index = self.loads.start(lambda: [])
            error = self.loads.finish(index)
        finally:
            self.linker.load_batch = held  # type: ignore[method-assign]
        return str(error)

    def check(self, pages: Sequence[int], saved: Sequence[int]) -> None:
        """See that pages hold what was saved from others."""
        for space in self.layout.spaces:
            check_telling(self.layout, space, list(pages), self._tags(space, saved))

    def check_of(self, rank: int, pages: Sequence[int], saved: Sequence[int]) -> None:
        """See that pages hold what a rank has saved."""
        for space in self.layout.spaces:
            check_telling(self.layout, space, list(pages), self._tags(space, saved, rank))

    # ---- the store ----

    def count_reads(self) -> None:
        """Count, from now on, how many bytes of each object the store is asked for."""
        self.read_keys = {}

        def seen(
            keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *_: Any
        ) -> None:
            for key, size in zip(keys, sizes, strict=True):
                self.read_keys[key] = self.read_keys.get(key, 0) + size

        self.store.before["read"] = self.store.before["get"] = seen

    def reads(self) -> dict[str, int]:
        """Bytes that the store was asked for since `count_reads`, by object."""
        return dict(self.read_keys)

    def counts(self) -> dict[str, int]:
        """Of shared reads."""
        assert self.shared is not None
        return vars(self.shared.counts)

    def num_told(self) -> int:
        """Keys in the store under the ranks' group, this moment."""
        assert self.shared is not None
        return int(self.shared._peers._store.num_keys())

    def is_lost(self) -> bool:
        """Whether reads are not shared any more."""
        assert self.shared is not None
        return self.shared.is_lost

    def at_call(
        self, name: str, number: int, what: str, *, delay_s: float = 0.0, keep: bool = False
    ) -> None:
        """Break the store's `number`-th call of a name, counted from 0.

        Args:
            name: `read`, `get`, `put`.
            number: which.
            what: `fail` (all its objects), `raise`, `corrupt` (a byte, behind the call), `delay`,
                `die` (kills this process), `stop` (freezes it).
            delay_s: how long.
            keep: break the later ones too.
        """
        calls = itertools.count()

        def hook(*columns: Any) -> list[ObjectResult] | None:
            at = next(calls)
            if at < number or (at > number and not keep):
                return None
            if what == "fail":
                return [ObjectResult(Outcome.FAILED, "TRANSFER_FAIL") for _ in columns[0]]
            if what == "raise":
                raise StoreUnavailable("the master cannot be reached")
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "delay":
                time.sleep(delay_s)
            if what == "corrupt":
                results: list[ObjectResult] = self.store.opened[-1].read(*columns)
                staging = self.linker._staging
                staging.tensor[columns[1][0] - staging.address] ^= 1
                return results
            return None

        self.store.before[name] = hook

    def heal(self) -> None:
        """Let all calls through again."""
        self.store.before.clear()

    def num_threads(self) -> int:
        """Threads of wires of loads."""
        return sum("load-wire" in thread.name for thread in threading.enumerate())

    def _until(self, is_true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not is_true():
            assert time.monotonic() < until_s, "it took too long"
            time.sleep(0.002)


def _given_up(*_: Any, **__: Any) -> Any:
    raise TransferFailed("transfer refused: given up by the test", cause="cancelled")


def sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add mappings up."""
    total: dict[str, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total
