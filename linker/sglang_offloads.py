"""Offloads for SGLang: pages to the store, with verdicts strictly in the order of the calls."""

import logging
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvferry.arguments import shown
from kvferry.errors import TransferFailed
from kvferry.linker.linker import Linker
from kvferry.linker.sglang_jobs import Job, Opener
from kvferry.linker.sglang_ranks import Ranks
from kvferry.linker.sglang_transfers import Pages
from kvferry.linker.streams import Fence
from kvferry.linker.transfer import Transfer, without_frames

log = logging.getLogger(__name__)


class Offload(Job[Transfer]):
    """One offload, from `Offloads.put` until its verdict is taken.

    Attributes:
        pages: what is to be stored.
    """

    def __init__(self, pages: Pages, behind: Sequence[Fence]) -> None:
        super().__init__(behind)
        self.pages = pages

    def done(self) -> bool:
        """Whether there is a verdict; never waits."""
        if self.error is not None:
            return True
        return self.is_begun and (self.handle is None or self.handle.done())

    def verdict(self) -> str:
        """Return why not all of it is stored, empty if all is; it is done."""
        if self.error is not None:
            return str(self.error)
        if self.handle is None:
            return ""
        try:
            failures = self.handle.result(0.0).failures
        except TransferFailed as error:
            without_frames(error)
            return str(error)
        if not failures:
            return ""
        key, reason = next(iter(failures.items()))
        return f"{len(failures)} objects were not stored, the first {shown(key)}: {reason}"


class Offloads:
    """Queued and running offloads. For the scheduler's thread alone."""

    def __init__(self, linker: Linker, ranks: Ranks, replicated: frozenset[str]) -> None:
        """Start the thread that begins saves.

        Args:
            linker: that saves.
            ranks: which rank this is.
            replicated: index spaces that all tensor-parallel ranks hold alike: each stores a part.
        """
        self._linker = linker
        self._ranks = ranks
        self._replicated = replicated
        self._waiting: deque[Offload] = deque()
        assert linker.layout.device is not None
        self._opener: Opener[Offload] = Opener(
            "kvferry-sglang-offloads", linker.layout.device, self._begin
        )

    def put(self, pages: Pages, behind: Sequence[Fence]) -> None:
        """Queue an offload.

        Args:
            pages: they must stay as they are until the verdict is there.
            behind: points in streams behind which they hold what is to be stored.
        """
        offload = Offload(pages, behind)
        self._waiting.append(offload)
        self._opener.put(offload)

    @property
    def num_completed(self) -> int:
        """How many of the oldest have a verdict, up to the first that has none."""
        count = 0
        for offload in self._waiting:
            if not offload.done():
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Take the oldest one's verdict: whether all of it is stored.

        Raises:
            IndexError: it has none yet.
        """
        if not self._waiting or not self._waiting[0].done():
            raise IndexError("no offload has completed, wanted num_completed_offloads() above 0")
        reason = self._waiting.popleft().verdict()
        if reason:
            log.warning("offload failed: %s", reason)
        return not reason

    def reset(self, reason: str) -> None:
        """End all of them, and forget their verdicts; no page is read any more."""
        for offload in self._waiting:
            offload.give_up(reason, "cancelled")
        self._waiting.clear()

    def leave(self) -> None:
        """End the thread, for whoever was dropped; does not wait."""
        self._opener.leave()

    def close(self, timeout_s: float) -> None:
        """End all of them, and the thread."""
        self.reset("the linker is closed")
        self._opener.close(timeout_s)

    def _begin(self, offload: Offload) -> None:
        """In the thread of offloads."""
        keys, page_ids = offload.pages.keys, offload.pages.on_host()
        if self._ranks.replica[1] > 1:
            mine = np.asarray(self._ranks.writes(keys))
            for space in self._replicated & set(page_ids):
                page_ids[space] = np.where(mine, page_ids[space], -1)
        if all((row == -1).all() for row in page_ids.values()):
            offload.begin(lambda: None)
        else:
            offload.begin(lambda: self._linker.save(keys, page_ids))
