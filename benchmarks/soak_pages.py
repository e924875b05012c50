"""The pages of a soak's pools: who has which, what they must hold, and that nobody else writes."""

import random
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from soak_tally import Tally

from kvferry import CacheLayout
from kvferry.testing import POISON, pages_of

Ids = dict[str, list[int]]
"""Page ids by index space."""


class Pages:
    """Lends pages of a bound layout; takes them back poisoned, some after a time of watching."""

    def __init__(self, layout: CacheLayout, tally: Tally) -> None:
        self.layout = layout
        self._tally = tally
        self._lock = threading.Lock()
        self._free: Ids = {
            space: random.sample(range(count), count) for space, count in layout.num_pages.items()
        }
        self._watched: list[tuple[float, Ids, str]] = []

    def lend(self, counts: Mapping[str, int]) -> Ids | None:
        """Return poisoned pages that nobody else has; None while there are too few."""
        self.check_watched()
        with self._lock:
            if any(len(self._free[space]) < count for space, count in counts.items()):
                return None
            return {
                space: [self._free[space].pop() for _ in range(count)]
                for space, count in counts.items()
            }

    def take_back(self, ids: Ids, what: str, watch_s: float = 0.0) -> None:
        """Poison pages whose transfer has ended, and watch them before they are lent again.

        Args:
            ids: pages that were lent.
            what: who had them, for the report if somebody still writes them.
            watch_s: how long to keep them aside; they must still hold poison then.
        """
        for space, pages in ids.items():
            _fill(self.layout, space, pages)
        with self._lock:
            self._watched.append((time.monotonic() + watch_s, ids, what))

    def check_watched(self, *, everything: bool = False) -> None:
        """Check the pages whose time of watching is over, and free them."""
        now = time.monotonic()
        with self._lock:
            due = [entry for entry in self._watched if everything or entry[0] <= now]
            self._watched = [entry for entry in self._watched if entry not in due]
        for until, ids, what in due:
            for space, pages in ids.items():
                touched = _touched(self.layout, space, pages)
                if touched:
                    self._tally.found(
                        "wrong bytes",
                        f"pages {touched} of {space!r} were written after the end of {what}, "
                        f"watched for {now - until:+.1f} s past their time",
                    )
                    _fill(self.layout, space, pages)
            with self._lock:
                for space, pages in ids.items():
                    self._free[space] += pages


def _views(layout: CacheLayout, space: str) -> list[torch.Tensor]:
    views = []
    for buffer in layout.buffers[space]:
        assert buffer.tensor is not None
        views.append(pages_of(buffer.pool, buffer.tensor))
    return views


def _poison_like(pages: torch.Tensor) -> torch.Tensor:
    byte = torch.full((pages.element_size(),), POISON, dtype=torch.uint8)
    return byte.view(pages.dtype)[0]


def _fill(layout: CacheLayout, space: str, page_ids: Sequence[int]) -> None:
    ids = torch.tensor(page_ids, dtype=torch.int64)
    for pages in _views(layout, space):
        pages[ids] = _poison_like(pages)


def _touched(layout: CacheLayout, space: str, page_ids: Sequence[int]) -> list[int]:
    ids = torch.tensor(page_ids, dtype=torch.int64)
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for pages in _views(layout, space):
        bad |= (pages[ids] != _poison_like(pages)).flatten(1).any(dim=1)
    return [page for page, is_bad in zip(page_ids, bad.tolist(), strict=True) if is_bad]
