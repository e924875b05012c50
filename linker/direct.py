"""Saves straight from the pools, where a page lies there as its object does: in one piece.

So it is in layouts that keep a page's layers side by side, as some of vLLM's do. Nothing is packed
then, and no staging is used: the store reads the pools' own memory, which must be registered with
it. That memory cannot carry an object's trailer, so this is for linkers without `integrity`.

Loads never go this way. What arrives in staging can be thrown away; what a late or failed transfer
writes into a pool cannot.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from kvferry.errors import StoreError
from kvferry.layout import CacheLayout
from kvferry.linker.attempts import Attempts
from kvferry.linker.config import LinkerConfig
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.mover import count_stored
from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import of_plans, ranged
from kvferry.linker.store import Outcome, Store
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PageRows:
    """Where the pages of an index space lie, each in one piece, in object order.

    Attributes:
        address: of page 0.
        stride_bytes: from one page to the next.
        memory: the allocations that hold them: first byte and length.
    """

    address: int
    stride_bytes: int
    memory: frozenset[tuple[int, int]]


def page_rows(layout: CacheLayout, space: str) -> PageRows | None:
    """Return where a space's pages lie in one piece each; None where they do not.

    Args:
        layout: bound to tensors.
        space: one of its index spaces.
    """
    segments = layout.segments(space)
    first = segments[0]
    base = first.address - first.object_offset
    memory = set()
    for segment in segments:
        in_one_piece = segment.count == 1 or (
            segment.pool_pitch_bytes == segment.object_pitch_bytes == segment.part_bytes
        )
        if (
            not in_one_piece
            or segment.address - base != segment.object_offset
            or segment.page_stride_bytes != first.page_stride_bytes
            or segment.tensor is None
        ):
            return None
        storage = segment.tensor.untyped_storage()
        memory.add((storage.data_ptr(), storage.nbytes()))
    return PageRows(base, first.page_stride_bytes, frozenset(memory))


def direct_rows(layout: CacheLayout, config: LinkerConfig) -> dict[str, PageRows]:
    """Return the spaces whose saves are to go straight from the pools."""
    if config.direct == "never" or config.integrity:
        return {}
    long_enough = [
        space for space in layout.spaces if layout.object_bytes[space] >= config.min_direct_bytes
    ]
    found = {space: page_rows(layout, space) for space in long_enough}
    return {space: rows for space, rows in found.items() if rows is not None}


class PoolMemory:
    """Pools' memory, registered with a store once for all linkers that share it."""

    _lock: ClassVar = threading.Lock()
    _users: ClassVar[WeakKeyDictionary[Any, Counter[tuple[int, int]]]] = WeakKeyDictionary()

    def __init__(self, store: Store, rows: Mapping[str, PageRows]) -> None:
        """Register what is not registered yet.

        Raises:
            StoreError: the store refused.
        """
        self._store = store
        self._held: list[tuple[int, int]] = []
        try:
            for memory in sorted({piece for each in rows.values() for piece in each.memory}):
                self._hold(memory)
        except StoreError:
            self.release()
            raise

    def release(self) -> None:
        """Take back what nobody else uses. Idempotent."""
        while self._held:
            memory = self._held.pop()
            with self._lock:
                users = self._users[self._store]
                users[memory] -= 1
                if not users[memory]:
                    self._store.unregister(memory[0])

    def _hold(self, memory: tuple[int, int]) -> None:
        with self._lock:
            users = self._users.setdefault(self._store, Counter())
            if not users[memory]:
                self._store.register(*memory)
            users[memory] += 1
        self._held.append(memory)


class DirectSaver:
    """Carries saves out without packing, one at a time, in the thread that calls it.

    The store reads the pages while `touching_pages` guards them: who cancels waits for the call.

    Attributes:
        rows: by index space, where pages lie in one piece.
    """

    def __init__(
        self,
        store: Store,
        existence: ExistenceCache,
        rows: Mapping[str, PageRows],
        *,
        part_bytes: int,
        trace: Trace | None,
    ) -> None:
        """Register the pools' memory.

        Raises:
            StoreError: the store refused.
        """
        self.rows = rows
        self._memory = PoolMemory(store, rows)
        self._store = store
        self._existence = existence
        self._part_bytes = part_bytes
        self._trace = trace

    def close(self) -> None:
        """Take the registration back; nothing may be in flight."""
        self._memory.release()

    def takes(self, transfer: Transfer) -> bool:
        """Whether a save can go this way: all of its pages lie in one piece."""
        return all(plan.space in self.rows for plan in transfer.plans)

    @ranged(lambda _, transfer: of_plans(transfer.kind, transfer.plans))
    def move(self, transfer: Transfer) -> None:
        """Carry out a save and end its handle.

        Raises:
            Ended: it was given up meanwhile.
            KVFerryError: it failed; the caller ends the handle.
        """
        if not transfer.caller.wait(transfer.left_s):
            transfer.check_going()
        for plan in transfer.plans:
            begin_s = time.perf_counter()
            found = self._existence.before_save(self._store, plan.keys)
            transfer.timings.lookup_us += (time.perf_counter() - begin_s) * 1e6
            transfer.progress.num_existing += sum(found.exists)
            transfer.progress.failures.update(found.spoilt)
            missing = plan.select(found.missing)
            for part in missing.parts(self._part_bytes):
                transfer.check_going()
                self._put(transfer, part)
        transfer.mark_packed()
        transfer.finish()

    @ranged(lambda _, transfer, part: of_plans("wire", [part], "objects"))
    def _put(self, transfer: Transfer, part: SpacePlan) -> None:
        rows = self.rows[part.space]
        addresses = (rows.address + part.page_ids * rows.stride_bytes).tolist()
        attempts, begin_s = Attempts(), time.perf_counter()
        with transfer.touching_pages():
            results = attempts.twice(
                self._store.put,
                part.keys,
                addresses,
                part.sizes,
                again=(Outcome.NO_SPACE, Outcome.FAILED),
            )
        transfer.timings.wire_us += attempts.wire_us
        transfer.progress.num_direct += count_stored(transfer, self._existence, part, results)
        if self._trace is not None:
            self._trace.add("wire", "direct", begin_s, time.perf_counter(), bytes=part.num_bytes)


def direct_saver(
    layout: CacheLayout,
    store: Store,
    existence: ExistenceCache,
    config: LinkerConfig,
    *,
    part_bytes: int,
    trace: Trace | None,
) -> DirectSaver | None:
    """Return what carries out saves without packing; None where nothing can go that way.

    Pools that the store cannot register, as those in the virtual memory of some allocators, are
    packed.
    """
    rows = direct_rows(layout, config)
    if not rows:
        return None
    try:
        return DirectSaver(store, existence, rows, part_bytes=part_bytes, trace=trace)
    except StoreError as error:
        log.warning("pools are packed, not sent as they lie: %s", error)
        return None
