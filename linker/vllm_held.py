"""Blocks that saves read, held in vLLM's block pool, and how far the saves have come."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BRIEFLY_S = 0.2
"""For so long blocks that a save holds are worth waiting for, rather than preempting a request."""


class HeldBlocks:
    """References of saves in vLLM's block pool, one save to a number; for the scheduler's thread.

    So neither the end of a block's request, nor preemption, nor a window that has moved on gives it
    to another before the save has read it.
    """

    def __init__(self, num_workers: int, max_share: float) -> None:
        """Begin with none.

        Args:
            num_workers: that must have ended a save before its blocks are free.
            max_share: of all blocks, what saves may hold.
        """
        self._num_workers = num_workers
        self._max_share = max_share
        self._pool: Any = None
        self._num_saves = 0
        self._blocks: dict[int, list[Any]] = {}
        self._begun: dict[int, float] = {}
        self._num_blocks = 0
        self._ended: Counter[int] = Counter()
        self._stored: Counter[int] = Counter()
        self._unstored: set[int] = set()  # whose objects may yet appear in the store

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    @property
    def room(self) -> int:
        """How many more blocks may be held; none before there is a pool."""
        if self._pool is None:
            return 0
        return int(self._max_share * len(self._pool.blocks)) - self._num_blocks

    @property
    def num_unstored(self) -> int:
        """Saves of which a worker may yet bring something to the store."""
        return len(self._unstored)

    @property
    def come_free_soon(self) -> bool:
        """Whether there are any, none of them for long: not while the store is slow."""
        now = time.monotonic()
        return bool(self._blocks) and all(now - at < BRIEFLY_S for at in self._begun.values())

    def hold(self, blocks: Sequence[Any]) -> int:
        """Hold a save's blocks; return the save's number, greater than all before."""
        self._pool.touch(blocks)
        self._num_saves += 1
        self._blocks[self._num_saves] = list(blocks)
        self._begun[self._num_saves] = time.monotonic()
        self._num_blocks += len(blocks)
        self._unstored.add(self._num_saves)
        return self._num_saves

    def drop(self, number: int) -> None:
        """Let go of a save that was never begun."""
        self._free(number)
        self._unstored.discard(number)

    def saves_ended(self, ended: Mapping[int, int]) -> None:
        """Free the blocks of saves that no worker reads any more; `ended` counts workers."""
        self._ended.update(ended)
        for number in [n for n, count in self._ended.items() if count >= self._num_workers]:
            del self._ended[number]
            self._free(number)

    def saves_stored(self, stored: Mapping[int, int]) -> None:
        """Note saves that have ended, good or bad; `stored` counts workers."""
        self._stored.update(stored)
        for number in [n for n, count in self._stored.items() if count >= self._num_workers]:
            del self._stored[number]
            self._unstored.discard(number)

    def _free(self, number: int) -> None:
        self._begun.pop(number, None)
        blocks = self._blocks.pop(number, [])
        self._num_blocks -= len(blocks)
        self._pool.free_blocks(reversed(blocks))  # the end of a prefix is evicted first


@dataclass
class Chosen:
    """Blocks of a step's save.

    Attributes:
        room: how many there may be.
        groups: group to page key to vLLM's block.
    """

    room: int
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, group_id: int, key: str, block: Any) -> bool:
        """Add a block, unless its key is there already; return whether there was room."""
        blocks = self.groups.setdefault(group_id, {})
        if key not in blocks:
            if self.room <= 0:
                return False
            blocks[key] = block
            self.room -= 1
        return True
