"""A hybrid layout with telling pages, and linkers over a store whose calls a test can break."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.eviction import evict
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome
from kvferry.linker.trace import Trace
from kvferry.testing import check_telling, make_tensors, poison, write_telling
from kvferry.trailer import stored_bytes

HYBRID: dict[str, Any] = {
    "page_size": 4,
    "num_layers": 5,
    "window_tokens": 8,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [4, 64], "dtype": "bfloat16",
         "layers": [0, 2, 4]},
        {"name": "scale", "index": "full", "rows": "token", "row_shape": [3], "dtype": "uint8",
         "layers": [0, 2, 4]},
        {"name": "swa_k", "index": "swa", "rows": "token", "row_shape": [2, 64],
         "dtype": "bfloat16", "layers": [1]},
        {"name": "ssm", "index": "state", "rows": "page", "row_shape": [70, 33],
         "dtype": "float32", "layers": [3]},
    ],
}  # fmt: skip
NUM_PAGES = 64
_names = itertools.count()


HOOKED = ("exists", "put", "get", "put_session", "get_session", "write", "read", "finish")


class Faulty:
    """A real store, or a session of one, whose calls a test can delay, answer itself, or break."""

    def __init__(
        self,
        real: Any,
        before: dict[str, Callable[..., Any]] | None = None,
        calls: list[tuple[str, int]] | None = None,
    ) -> None:
        self.opened: list[Any] = []  # the real sessions
        self.store = real
        self.before: dict[str, Callable[..., Any]] = {} if before is None else before
        self.calls: list[tuple[str, int]] = [] if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.store, name)
        if name not in HOOKED:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, len(arguments[0]) if arguments else 0))
            answer = self.before[name](*arguments) if name in self.before else None
            answer = real(*arguments, **options) if answer is None else answer
            if name.endswith("_session"):
                self.opened.append(answer)
                return Faulty(answer, self.before, self.calls)
            return answer

        return call


class Bed:
    """A layout with pools, a store that can fail, and linkers over them."""

    def __init__(self, store: MooncakeStore, device: torch.device) -> None:
        plain = CacheLayout.from_description(HYBRID)
        self.layout = plain.bind(make_tensors(plain, NUM_PAGES, device))
        self.store = Faulty(store)
        self.linkers: list[Linker] = []

    def linker(
        self,
        staging_bytes: int = 1 << 20,
        *,
        trace: Trace | None = None,
        layout: CacheLayout | None = None,
        **settings: Any,
    ) -> Linker:
        assert self.layout.device is not None
        memory = "cpu" if self.layout.device.type == "cpu" else "pinned"
        staging = StagingBuffer(staging_bytes, device=self.layout.device, memory=memory)
        settings = {"namespace": f"test-linker-{next(_names)}", "lookup_ttl_s": 0.0, **settings}
        config = LinkerConfig(**settings)
        linker = Linker(layout or self.layout, self.store, staging, config, trace=trace)
        self.linkers.append(linker)
        return self.linkers[-1]

    def fill(self, first: int, count: int) -> dict[str, list[int]]:
        """Write telling pages `first ..` of every space, tagged by their id."""
        pages = list(range(first, first + count))
        for space in self.layout.spaces:
            write_telling(self.layout, space, pages, pages)
        return dict.fromkeys(self.layout.spaces, pages)

    def write(
        self, space: str, pages: Sequence[int], tags: Sequence[int], layer: int | None = None
    ) -> None:
        """Write telling pages, of one layer or all."""
        layers = None if layer is None else [layer]
        write_telling(self.layout, space, pages, tags, layers=layers)

    def poison(self) -> None:
        """Forget what all pages hold."""
        poison(self.layout)

    def page(self, pool: str, layer: int, page: int) -> torch.Tensor:
        """One page of a pool, as bytes `[rows, row_bytes]`."""
        (found,) = (one for one in self.layout.pools if one.name == pool)
        (buffer,) = (
            one
            for one in self.layout.buffers[found.space]
            if one.pool.name == pool and one.layer_id == layer
        )
        assert buffer.tensor is not None
        rows = self.layout.page_size if found.rows == "token" else 1
        return buffer.tensor[page * rows : (page + 1) * rows].view(torch.uint8).view(rows, -1)

    def corrupt(self, linker: Linker, page_key: str, space: str, layer: int) -> str:
        """Change one byte of a layer of a stored object; return its key."""
        (key,) = linker.keys.object_keys([page_key], space)
        size = stored_bytes(self.layout.object_bytes[space], self.layout.num_layers)
        staging = StagingBuffer(size, device=torch.device("cpu"))
        staging.register(self.store.store)
        try:
            (got,) = self.store.store.get([key], [staging.address], [size])
            assert got.outcome is Outcome.FETCHED
            staging.tensor[self.layout.layer_offsets[space][layer] + 5] ^= 0x10
            evict(self.store.store, [key])
            (put,) = self.store.store.put([key], [staging.address], [size])
            assert put.outcome is Outcome.STORED
        finally:
            staging.unregister()
        return key

    def check(self, first: int, tags: Sequence[int]) -> None:
        """Compare pages `first ..` of every space with what was saved under these tags."""
        for space in self.layout.spaces:
            check_telling(self.layout, space, list(range(first, first + len(tags))), tags)


def ids(bed: Bed, first: int, count: int) -> dict[str, list[int]]:
    return {space: list(range(first, first + count)) for space in bed.layout.spaces}


def keys(count: int) -> list[str]:
    return [f"page-{index}" for index in range(count)]
