"""The public face: save pages under keys, ask which prefixes exist, load them back."""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from kvferry.errors import ArgumentError, KVFerryError, StoreUnavailable, TransferFailed
from kvferry.kernels.pack import TAILS, Packer
from kvferry.layout import CacheLayout
from kvferry.linker.keys import KeyScheme, check_page_keys
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.mover import Mover
from kvferry.linker.plan import SpaceIds, plan_transfer, stride_bytes
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.streams import fence_of_caller
from kvferry.linker.transfer import Ended, Transfer
from kvferry.restore import restorable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkerConfig:
    """Settings of a linker.

    Attributes:
        namespace: first part of every key; keeps deployments in one store apart.
        part_bytes: how much of a transfer is in staging at once. Larger transfers stream through
            in parts of this size; each part is one store call.
        transfer_timeout_s: deadline of a transfer, queueing included.
        lookup_ttl_s: how long an answer about existence is remembered. Under half the store's
            lease, which a positive answer has renewed.
        miss_ttl_s: how long a key that failed to load counts as missing.
        max_queued: transfers that may wait in each direction; more are refused.
        integrity: whether objects carry a trailer with a checksum, and loads verify it before a
            byte reaches the pools. The same on all that share objects.
        backend: how pages are packed; see `Packer.pack`.
    """

    namespace: str = "kvferry"
    part_bytes: int = 64 << 20
    transfer_timeout_s: float = 30.0
    lookup_ttl_s: float = 1.0
    miss_ttl_s: float = 5.0
    max_queued: int = 1024
    integrity: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("part_bytes", "transfer_timeout_s", "max_queued"):
            if getattr(self, name) <= 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}, wanted a positive number")
        for name in ("lookup_ttl_s", "miss_ttl_s"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}, wanted 0 or more seconds")


class Linker:
    """Moves pages between a layout's pools and a store. A context manager that closes itself.

    Two threads of its own, `kvferry-save` and `kvferry-load`, do the work, in the order of the
    calls; callers only check, plan and enqueue. Safe from any thread.

    Attributes:
        layout: bound to the pools.
        config: the settings.
        keys: makes the object keys.
    """

    def __init__(
        self,
        layout: CacheLayout,
        store: Store,
        staging: StagingBuffer,
        config: LinkerConfig | None = None,
    ) -> None:
        """Register the staging buffer with the store and start the threads.

        Args:
            layout: bound to tensors.
            store: connected. The caller owns it and closes it after the linker.
            staging: for this linker's transfers alone. The caller owns its memory; it is
                registered here and unregistered by `close`.
            config: settings.

        Raises:
            ArgumentError: the layout is not bound, or staging cannot hold one object.
            StoreError: the store refused the registration.
        """
        if layout.device is None:
            raise ArgumentError("layout is not bound to tensors: call layout.bind(tensors) first")
        self.layout = layout
        self.config = config or LinkerConfig()
        for space in layout.spaces:
            needed = stride_bytes(layout, space, trailer=self.config.integrity)
            if needed > staging.num_bytes:
                raise ArgumentError(
                    f"staging has {staging.num_bytes} bytes, wanted at least {needed}: one object "
                    f"of index space {space!r}"
                )
        self.keys = KeyScheme.of(layout, self.config.namespace)
        self._store = store
        self._staging = staging
        self._existence = ExistenceCache(self.config.lookup_ttl_s, self.config.miss_ttl_s)
        self._can_be_cut = False  # not known yet
        self._closing = threading.Event()
        self._accepting = threading.Lock()
        staging.register(store)
        packers = {space: Packer(layout, space) for space in layout.spaces}
        self._queues: dict[str, queue.Queue[Transfer | None]] = {}
        self._threads: list[threading.Thread] = []
        for kind in ("save", "load"):
            mover = Mover(
                store,
                staging,
                packers,
                self._existence,
                min(self.config.part_bytes, staging.num_bytes),
                self.config.backend,
                integrity=self.config.integrity,
            )
            todo: queue.Queue[Transfer | None] = queue.Queue()
            thread = threading.Thread(
                target=self._work, args=(mover, todo), name=f"kvferry-{kind}", daemon=True
            )
            self._queues[kind] = todo
            self._threads.append(thread)
            thread.start()
        atexit.register(self.close)

    def save(self, keys: Sequence[str], page_ids: SpaceIds) -> Transfer:
        """Store pages; those that the store has already are not written again.

        The pack is ordered behind all work that the calling thread's current stream has been given
        so far. The pages must not be written again before `Transfer.wait_packed`.

        Args:
            keys: a key for each page of the prefix, each once.
            page_ids: integers `[len(keys)]`, or a mapping of index space to such; -1 where a key
                has no page in that space. On the host, or (at the cost of a wait) on the device.

        Returns:
            A handle; its result tells which objects failed.

        Raises:
            ArgumentError: an argument is wrong; nothing was enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        return self._enqueue("save", keys, page_ids)

    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
    ) -> Transfer:
        """Fetch pages into the pools, whole and verified, or fail.

        The unpack is ordered behind all work that the calling thread's current stream has been
        given so far. The pages must not be read or written until the result is there.

        Args:
            keys: as in `save`, in any order.
            page_ids: destinations, as in `save`; no page twice.
            tail_tokens: how many tokens of the last key's page are wanted, 0 .. page_size; all of
                them by default. States are always whole.
            tail: what becomes of that page's other tokens: `zero`, or `keep` what is there.

        Returns:
            A handle; its result raises `TransferFailed` if any object could not be had.

        Raises:
            ArgumentError: an argument is wrong, or pages cannot be cut by tokens; nothing was
                enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        if tail not in TAILS:
            raise ArgumentError(f"tail is {tail!r}, wanted one of {tuple(TAILS)}")
        if tail_tokens is not None and not 0 <= tail_tokens <= self.layout.page_size:
            raise ArgumentError(
                f"tail_tokens is {tail_tokens}, wanted 0 .. {self.layout.page_size}"
            )
        if tail_tokens is not None and tail_tokens < self.layout.page_size:
            self._check_cut()
            return self._enqueue("load", keys, page_ids, (tail_tokens, tail))
        return self._enqueue("load", keys, page_ids)

    def lookup(self, keys: Sequence[str]) -> list[int]:
        """Return every prefix length, in pages, that could be loaded now; ascending, without 0.

        Cheap enough for every scheduling pass: answers are remembered for `lookup_ttl_s`, and the
        unknown ones are asked in one call. While the store cannot be reached nothing exists.

        Args:
            keys: the prefix's page keys, in order.

        Raises:
            ArgumentError: a key is not usable, or occurs twice.
        """
        page_keys = check_page_keys(keys)
        if not page_keys:
            return []
        rows = {space: self.keys.object_keys(page_keys, space) for space in self.layout.spaces}
        try:
            exists = self._existence.ask(self._store, [key for row in rows.values() for key in row])
        except StoreUnavailable as error:
            log.debug("lookup of %d pages: %s", len(page_keys), error)
            return []
        table = np.asarray(exists, dtype=bool).reshape(len(rows), len(page_keys))
        return restorable(
            dict(zip(rows, table, strict=True)), window_pages=self.layout.window_pages
        )

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what was enqueued, end the threads, take back the registration. Idempotent.

        Transfers that are not done when `timeout_s` has passed fail.

        Raises:
            TransferFailed: a thread is still inside a store call; staging stays registered, since
                the call may still use it.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            first = not self._closing.is_set()
            self._closing.set()
        if first:
            for todo in self._queues.values():
                todo.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            for todo in self._queues.values():
                _fail_all(todo, "the linker was closed")
            raise TransferFailed(f"{', '.join(stuck)} still at work {timeout_s:g} s after close")
        self._staging.unregister()

    def __enter__(self) -> "Linker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_cut(self) -> None:
        """Refuse, once and for all, layouts whose pages cannot be cut by tokens."""
        if not self._can_be_cut:
            for space in self.layout.spaces:
                if space != "state":
                    self.layout.segments(space, by_token=True)
            self._can_be_cut = True

    def _enqueue(
        self,
        kind: str,
        keys: Sequence[str],
        page_ids: SpaceIds,
        tail: tuple[int, str] | None = None,
    ) -> Transfer:
        begin = time.perf_counter()
        plans = plan_transfer(
            self.layout,
            self.keys,
            keys,
            page_ids,
            unique=kind == "load",
            trailer=self.config.integrity,
        )
        assert self.layout.device is not None
        caller = fence_of_caller(self.layout.device)
        plan_us = (time.perf_counter() - begin) * 1e6
        transfer = Transfer(kind, plans, caller, self.config.transfer_timeout_s, plan_us, tail)
        with self._accepting:
            if self._closing.is_set():
                raise TransferFailed(f"{kind} refused: the linker is closed")
            if self._queues[kind].qsize() >= self.config.max_queued:
                raise TransferFailed(
                    f"{kind} refused: {self.config.max_queued} transfers wait already"
                )
            self._queues[kind].put(transfer)
        return transfer

    def _work(self, mover: Mover, todo: "queue.Queue[Transfer | None]") -> None:
        mover.lane.adopt_device()
        while (transfer := todo.get()) is not None:
            transfer.timings.queue_us = transfer.age_us
            try:
                transfer.check_going()
                mover.move(transfer)
            except Ended:
                log.info("%r was given up", transfer)
            except TransferFailed as error:
                transfer.fail(error)
            except KVFerryError as error:
                transfer.fail(TransferFailed(f"{transfer.kind} failed: {error}"))
            except Exception as error:  # the thread lives on, and the handle delivers it
                log.exception("%r failed unexpectedly", transfer)
                transfer.fail(TransferFailed(f"{transfer.kind} failed: {error!r}"))


def _fail_all(todo: "queue.Queue[Transfer | None]", reason: str) -> None:
    while True:
        try:
            transfer = todo.get_nowait()
        except queue.Empty:
            todo.put(None)
            return
        if transfer is not None:
            transfer.fail(TransferFailed(reason))
