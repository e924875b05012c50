"""A linker over a small hybrid layout on a cluster, and what must hold after every fault."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cluster import Cluster, wait_until
from forms import TIMEOUT_S, WHOLE, End, Form, Moving, PageIds
from hooked import Hooked

from kvferry.causes import cause_of
from kvferry.errors import TransferFailed
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.transfer import TransferResult
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    make_tensors,
    pages_of,
    write_telling,
)

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
GROUPS = ((0, 1), (1, 3), (3, 5))
"""Three layer groups: the first and the last hold bytes of `full`, the last ends every object."""

_numbers = itertools.count()


class Bed:
    """Pools, a store with hooks, a linker; pages are handed out fresh, and all others watched.

    Attributes:
        cluster: what the store is a client of.
        store: the linker's.
        layout: bound to pools full of poison.
        staging: of the linker.
        linker: that is tested.
        thread_names: of the linker's threads.
    """

    def __init__(
        self,
        cluster: Cluster,
        device: torch.device,
        *,
        store: MooncakeStore | None = None,
        namespace: str = "",
        staging_bytes: int = 1 << 20,
        **settings: Any,
    ) -> None:
        """Make a linker.

        Args:
            cluster: to run on.
            device: of the pools.
            store: a client of its own; the cluster's by default.
            namespace: of its keys; fresh by default, so that no test meets another's objects.
            staging_bytes: size of the staging buffer.
            settings: of `LinkerConfig`, other than ordinary.
        """
        self.cluster = cluster
        self.store = Hooked(store or cluster.store)
        plain = CacheLayout.from_description(HYBRID)
        self.layout = plain.bind(make_tensors(plain, NUM_PAGES, device))
        self.staging = StagingBuffer(staging_bytes, device=device)
        settings = {
            "namespace": namespace or f"fault-{next(_numbers)}",
            "lookup_ttl_s": 0.0,
            "miss_ttl_s": 0.0,
            "transfer_timeout_s": TIMEOUT_S,
            "groups": GROUPS,
            "wait_timeout_s": 2 * TIMEOUT_S,
            **settings,
        }
        others = set(threading.enumerate())
        self.linker = Linker(self.layout, self.store, self.staging, LinkerConfig(**settings))
        self.thread_names = [t.name for t in threading.enumerate() if t not in others]
        # Of the store; more than none only where another test has failed.
        self._num_open_gets = self.store.store.num_open_gets
        self._num_open_puts = self.store.store.num_open_puts
        self._num_handed_out = 0
        self._keys = itertools.count()
        self._moved: list[Moving] = []
        self._sources: list[int] = []  # tagged by their own ids
        self._targets: dict[int, int] = {}  # page to the tag that it may come to hold

    # ---- pages and keys ----

    def keys(self, count: int) -> list[str]:
        """Return keys that were not used yet."""
        return [f"page-{next(self._keys)}" for _ in range(count)]

    def sources(self, count: int) -> list[int]:
        """Fill fresh pages of every space with telling bytes."""
        pages = self._fresh(count)
        for space in self.layout.spaces:
            write_telling(self.layout, space, pages, pages)
        self._sources += pages
        return pages

    def targets(self, tags: Sequence[int]) -> list[int]:
        """Hand out fresh pages, poisoned, for a load of what was saved from pages `tags`."""
        pages = self._fresh(len(tags))
        self._targets.update(zip(pages, tags, strict=True))
        return pages

    def ids(self, pages: Sequence[int]) -> PageIds:
        """Return page ids of every space."""
        return {space: list(pages) for space in self.layout.spaces}

    def object_keys(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of all objects of these page keys."""
        return [
            key for space in self.layout.spaces for key in self.linker.keys.object_keys(keys, space)
        ]

    def saved(self, count: int) -> tuple[list[str], list[int]]:
        """Save fresh pages, whole, before the fault; return their keys and pages."""
        keys, pages = self.keys(count), self.sources(count)
        assert self.save(WHOLE, keys, pages).result().failures == {}
        return keys, pages

    # ---- transfers ----

    def save(
        self, form: Form, keys: Sequence[str], pages: Sequence[int], *, written: bool = True
    ) -> Moving:
        """Begin a save of pages of every space; see `Form.save`."""
        self._moved.append(form.save(self.linker, keys, self.ids(pages), written=written))
        return self._moved[-1]

    def load(self, form: Form, keys: Sequence[str], pages: Sequence[int]) -> Moving:
        """Begin a load into pages of every space; see `Form.load`."""
        self._moved.append(form.load(self.linker, keys, self.ids(pages)))
        return self._moved[-1]

    # ---- looking ----

    def check_loaded(self, pages: Sequence[int]) -> None:
        """Compare pages with what they were to be loaded with."""
        for space in self.layout.spaces:
            check_telling(self.layout, space, pages, [self._targets[page] for page in pages])

    def check_poisoned(self, pages: Sequence[int]) -> None:
        """Check that nothing was written to pages."""
        for space in self.layout.spaces:
            self.check_poisoned_in(space, pages)

    def check_poisoned_in(self, space: str, pages: Sequence[int]) -> None:
        """Check that nothing was written to pages of one space."""
        check_poison(self.layout, space, [page for page in range(NUM_PAGES) if page not in pages])

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages of every space with poison again."""
        for space in self.layout.spaces:
            for _, rows in self._rows(space):
                size = rows.element_size()
                word = int.from_bytes(bytes([POISON] * size), "little", signed=size > 1)
                rows[list(pages)] = word

    def check_counted(self) -> None:
        """Check that the linker has counted just what its callers were told."""
        now = self.linker.stats.snapshot()
        for kind in ("save", "load"):
            ends = [end for moved in self._moved if moved.kind == kind for end in moved.end()]
            failed = [end for end in ends if isinstance(end, TransferFailed)]
            assert now["transfers"][kind] == {
                "done": len(ends) - len(failed),
                "failed": len(failed),
            }
            assert now["failures"][kind] == Counter(cause for end in ends for cause in words(end))

    def check_pages(self) -> None:
        """Sources are as they were, targets hold what they should or poison, all others poison."""
        for space in self.layout.spaces:
            check_telling(self.layout, space, self._sources, self._sources)
            check_poison(self.layout, space, [*self._sources, *self._targets])
            for page, tag in self._targets.items():
                self._check_landed_or_not(space, page, tag)

    def check_after(self, form: Form) -> None:
        """Check what must hold after every fault, its end included; see the parts.

        Nothing is at work any more, so every span, session and thread is as before the fault, and
        the next transfers succeed.
        """
        self.store.before.clear()
        self.check_pages()
        keys, pages = self.keys(4), self.sources(4)
        for save_form in (form, WHOLE):
            assert self.save(save_form, keys, pages).result().failures == {}
        assert self.linker.lookup(keys) == [1, 2, 3, 4]
        for load_form in (form, WHOLE):
            targets = self.targets(pages)
            self.load(load_form, keys, targets).result()
            self.check_loaded(targets)
        self.check_counted()
        self.check_pages()
        self.check_nothing_held()
        alive = [thread.name for thread in threading.enumerate()]
        for name in self.thread_names:
            assert name in alive, f"thread {name} is gone"

    def check_nothing_held(self) -> None:
        """Every byte of staging is free, within the time that late calls may take; no session."""
        wait_until(lambda: self.staging.num_free_bytes == self.staging.num_bytes, 10.0)
        assert self.staging.num_held_bytes == 0
        real = self.store.store
        wait_until(lambda: real.num_open_gets <= self._num_open_gets, 5.0)
        wait_until(lambda: real.num_open_puts <= self._num_open_puts, 5.0)

    def close(self) -> None:
        """Close the linker, within a bound; no thread of it stays."""
        self.store.before.clear()
        begin_s = time.monotonic()
        self.linker.close(20.0)
        assert time.monotonic() - begin_s < 20.0

    def _fresh(self, count: int) -> list[int]:
        first = self._num_handed_out
        self._num_handed_out += count
        assert self._num_handed_out <= NUM_PAGES
        # Out of order, with the first and the last page among them.
        return [page * 23 % NUM_PAGES for page in range(first, first + count)]

    def _check_landed_or_not(self, space: str, page: int, tag: int) -> None:
        for where, rows in self._rows(space):
            got, wanted = (rows[each].contiguous().view(torch.uint8) for each in (page, tag))
            assert torch.equal(got, wanted) or bool((got == POISON).all()), f"{where} page {page}"

    def _rows(self, space: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Give each buffer of a space: what it is, and its pages as integers."""
        for buffer in self.layout.buffers[space]:
            assert buffer.tensor is not None
            name = f"{buffer.pool.name} layer {buffer.layer_id}"
            yield name, pages_of(buffer.pool, buffer.tensor)


def words(end: End) -> list[str]:
    """Return the causes that a transfer's end tells: its own, or those of a save's objects."""
    if isinstance(end, TransferFailed):
        return [end.cause]
    return [cause_of(reason) for reason in end.failures.values()]


def reasons(end: End) -> dict[str, str]:
    """Return what a transfer's end says about single objects: key to reason."""
    return end.causes if isinstance(end, TransferFailed) else end.failures


def succeeded(end: End) -> TransferResult:
    """Return a result that must not be a failure."""
    if isinstance(end, TransferFailed):
        raise end
    return end
