"""What a soak runs on: a master, a small owner, and engines, each with a client and a linker."""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from soak_pages import Ids, Pages
from soak_tally import Tally

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
from kvferry.testing import make_tensors

HYBRID: dict[str, Any] = {
    "page_size": 4,
    "num_layers": 8,
    "window_tokens": 8,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [2, 64], "dtype": "bfloat16",
         "layers": [0, 2, 4, 6]},
        {"name": "scale", "index": "full", "rows": "token", "row_shape": [3], "dtype": "uint8",
         "layers": [0, 2, 4, 6]},
        {"name": "swa_k", "index": "swa", "rows": "token", "row_shape": [2, 64],
         "dtype": "bfloat16", "layers": [1, 5]},
        {"name": "ssm", "index": "state", "rows": "page", "row_shape": [70, 11],
         "dtype": "float32", "layers": [3, 7]},
    ],
}  # fmt: skip
WINDOW_PAGES = 2
NUM_PAGES = 4096
STATE_EVERY = 4
"""A state is saved behind every page whose number ends a stretch of so many, and the last page."""
NUM_CHAINS = 160
CHAIN_PAGES = 24
SEGMENT_BYTES = 16 << 20
"""Half of what all chains together take, so that the store evicts all the time."""
LEASE_S = 3.0
CLIENT_TTL_S = 4
"""After this the master drops an owner that says nothing; less than a put session may last."""


@dataclass(frozen=True)
class Prefix:
    """Pages 0 .. num_pages - 1 of one chain; a page's content is a function of its key."""

    chain: int
    num_pages: int

    @property
    def keys(self) -> list[str]:
        """The page keys."""
        return [f"chain-{self.chain}-{page}" for page in range(self.num_pages)]

    def wanted(self, *, saving: bool) -> dict[str, list[int]]:
        """Return the pages that a save or a load moves, by index space."""
        pages = range(self.num_pages)
        last = self.num_pages - 1
        if saving:
            states = [page for page in pages if page % STATE_EVERY == STATE_EVERY - 1]
            windows = list(pages)
        else:
            states, windows = [], list(pages[-WINDOW_PAGES:])
        return {"full": list(pages), "swa": windows, "state": sorted({*states, last})}

    def rows(self, ids: Ids, *, saving: bool) -> Ids:
        """Return page ids for each key, -1 where a key has none."""
        rows = {space: [-1] * self.num_pages for space in ids}
        for space, pages in self.wanted(saving=saving).items():
            for page, page_id in zip(pages, ids[space], strict=True):
                rows[space][page] = page_id
        return rows

    def tags(self, space: str, *, saving: bool) -> list[int]:
        """Return what the pages of a space tell, for `kvferry.testing`."""
        return [1 + self.chain * 1000 + page for page in self.wanted(saving=saving)[space]]


@dataclass
class Engine:
    """One client of the store, with its pools and linker.

    Attributes:
        name: in reports.
        store: the client.
        staging: its linker's.
        linker: its linker.
        pages: of its pools.
        hot: page keys that a caller has just looked up, for faults to aim at.
    """

    name: str
    store: MooncakeStore
    staging: StagingBuffer
    linker: Linker
    pages: Pages
    hot: deque[str] = field(default_factory=lambda: deque(maxlen=64))


class Cluster:
    """The processes and engines of a soak; a context manager.

    Attributes:
        master: started, and restarted by faults.
        owner: likewise.
        engines: two, that write the same keys; the second one's transfers have short deadlines.
        bare: one that stores objects without checksums, for somebody else.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._stack = ExitStack()
        flags = [f"--client_ttl={CLIENT_TTL_S}"]
        self.master = LocalMaster(lease_ttl_s=LEASE_S, extra_flags=flags)
        self._stack.enter_context(self.master)
        self.owner = LocalOwner(self.master.address, SEGMENT_BYTES)
        self._stack.enter_context(self.owner)
        self.engines = [
            self._engine(
                "patient",
                1 << 19,
                part_bytes=1 << 16,
                transfer_timeout_s=20.0,
                groups=((0, 1), (1, 3), (3, 4), (4, 8)),
            ),
            self._engine("hasty", 1 << 21, transfer_timeout_s=0.5, wait_timeout_s=2.0),
        ]
        self.bare = self._engine("bare", 1 << 20, transfer_timeout_s=5.0, integrity=False)

    def client(self) -> MooncakeStore:
        """Return one more client, closed with the cluster."""
        config = MooncakeConfig(self.master.address, lease_ttl_s=LEASE_S)
        return self._stack.enter_context(MooncakeStore(config))

    def close(self) -> None:
        """Close linkers, stores, owner and master, in this order."""
        self._stack.close()

    def _engine(self, name: str, staging_bytes: int, **settings: Any) -> Engine:
        plain = CacheLayout.from_description(HYBRID)
        layout = plain.bind(make_tensors(plain, NUM_PAGES))
        store = self.client()
        staging = StagingBuffer(staging_bytes, device=torch.device("cpu"))
        config = LinkerConfig(
            namespace="soak", lookup_ttl_s=0.5, miss_ttl_s=1.0, max_queued=64, **settings
        )
        linker = self._stack.enter_context(Linker(layout, store, staging, config))
        return Engine(name, store, staging, linker, Pages(layout, self._tally))
