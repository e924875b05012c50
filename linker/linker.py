"""The public face: save pages under keys, ask which prefixes exist, load them back."""

import atexit
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from kvferry.errors import ArgumentError, KVFerryError, StoreUnavailable, TransferFailed
from kvferry.groups import check_groups
from kvferry.kernels.pack import TAILS, Packer
from kvferry.layout import CacheLayout
from kvferry.linker.counter_sets import WAITS, CounterSets
from kvferry.linker.keys import KeyScheme, check_page_keys
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.layer_loader import LayerLoader
from kvferry.linker.layer_plan import Tail, groups_for, merge
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.layer_saver import LayerSaver
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.mover import Mover
from kvferry.linker.plan import SpaceIds, SpacePlan, plan_transfer, stride_bytes
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.stats import Stats
from kvferry.linker.store import Store
from kvferry.linker.streams import Lane, fence_of_caller
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended, Transfer
from kvferry.linker.wire import Wire
from kvferry.linker.worker import JobT, Worker
from kvferry.restore import restorable

log = logging.getLogger(__name__)

_LAST_S = 5.0
"""What a thread whose transfer was just failed has to come to its end."""


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
        groups: layers that travel together in layer-wise transfers, `[first, end)` ranges; chosen
            by their sizes if None, see `kvferry.groups`.
        compute_us_per_layer: time of a layer's compute, and
        wire_gb_per_s: rate of the store, 1e9 bytes a second: if both are known, they too tell how
            many layers should travel together.
        fetch_ahead: parts that a layer-wise load fetches beyond the one that is unpacked.
        wire_threads: threads that sit in store calls, for each direction of layer-wise transfers.
        wait: how `LayerLoad.wait_layer` waits: `host`, `event`, `device`, or `auto`; see `waits`.
        wait_timeout_s: longest wait for one layer; then the load fails.
        num_counters: layer-wise loads that may be in flight at once.
    """

    namespace: str = "kvferry"
    part_bytes: int = 64 << 20
    transfer_timeout_s: float = 30.0
    lookup_ttl_s: float = 1.0
    miss_ttl_s: float = 5.0
    max_queued: int = 1024
    integrity: bool = True
    backend: str = "auto"
    groups: tuple[tuple[int, int], ...] | None = None
    compute_us_per_layer: float | None = None
    wire_gb_per_s: float | None = None
    fetch_ahead: int = 2
    wire_threads: int = 2
    wait: str = "auto"
    wait_timeout_s: float = 10.0
    num_counters: int = 4

    def __post_init__(self) -> None:
        for name in (
            "part_bytes", "transfer_timeout_s", "max_queued", "compute_us_per_layer",
            "wire_gb_per_s", "wire_threads", "wait_timeout_s", "num_counters",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ArgumentError(f"{name} is {value}, wanted a positive number")
        for name in ("lookup_ttl_s", "miss_ttl_s", "fetch_ahead"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}, wanted 0 or more")
        if self.wait not in WAITS:
            raise ArgumentError(f"wait is {self.wait!r}, wanted one of {WAITS}")


class Linker:
    """Moves pages between a layout's pools and a store. A context manager that closes itself.

    Threads of its own do the work, in the order of the calls: `kvferry-save` and `kvferry-load`,
    and for layer-wise transfers `kvferry-save-layers` and `kvferry-load-layers`, with a few for
    their store calls. Callers only check, plan and enqueue. Safe from any thread.

    Attributes:
        layout: bound to the pools.
        config: the settings.
        keys: makes the object keys.
        stats: counters of what its transfers came to.
    """

    def __init__(
        self,
        layout: CacheLayout,
        store: Store,
        staging: StagingBuffer,
        config: LinkerConfig | None = None,
        *,
        trace: Trace | None = None,
    ) -> None:
        """Register the staging buffer with the store and start the threads.

        On a GPU this waits for the device, once.

        Args:
            layout: bound to tensors.
            store: connected. The caller owns it and closes it after the linker.
            staging: for this linker's transfers alone. The caller owns its memory; it is
                registered here and unregistered by `close`.
            config: settings.
            trace: where a timeline of the transfers is recorded; none by default.

        Raises:
            ArgumentError: the layout is not bound, staging cannot hold one object, groups do not
                cover the layers, or the wait would be wrong here.
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
        if self.config.groups is not None:
            check_groups(self.config.groups, layout.num_layers)
        self.keys = KeyScheme.of(layout, self.config.namespace)
        self.stats = Stats()
        self._store = store
        self._staging = staging
        self._trace = trace
        self._existence = ExistenceCache(self.config.lookup_ttl_s, self.config.miss_ttl_s)
        self._can_be_cut = False  # not known yet
        self._closing = threading.Event()
        self._accepting = threading.Lock()
        lanes = [Lane(layout.device) for _ in range(2)]
        self._counters = CounterSets(
            self.config.num_counters,
            layout.num_layers,
            layout.device,
            lanes[1].stream,
            kind=self.config.wait,
            timeout_s=self.config.wait_timeout_s,
        )
        staging.register(store)
        self._start_threads(*lanes)
        atexit.register(self.close)

    def _start_threads(self, save_lane: Lane, load_lane: Lane) -> None:
        config, staging = self.config, self._staging
        packers = {space: Packer(self.layout, space) for space in self.layout.spaces}
        part_bytes = min(config.part_bytes, staging.num_bytes)
        shared = (self._store, staging, packers, self._existence)
        self._whole: dict[str, Worker[Transfer]] = {}
        for kind in ("save", "load"):
            mover = Mover(
                *shared,
                part_bytes,
                config.backend,
                integrity=config.integrity,
                trace=self._trace,
            )
            self._whole[kind] = Worker(
                f"kvferry-{kind}", partial(self._carry_out, mover), mover.lane.adopt_device
            )
        self._wires = [
            Wire(f"kvferry-{kind}-wire", config.wire_threads, lane.adopt_device)
            for kind, lane in (("save", save_lane), ("load", load_lane))
        ]
        saver = LayerSaver(
            *shared,
            save_lane,
            self._wires[0],
            part_bytes=part_bytes,
            backend=config.backend,
            integrity=config.integrity,
            trace=self._trace,
        )
        loader = LayerLoader(
            *shared,
            load_lane,
            self._wires[1],
            part_bytes=part_bytes,
            fetch_ahead=config.fetch_ahead,
            backend=config.backend,
            integrity=config.integrity,
            trace=self._trace,
        )
        self._layer_saves: Worker[LayerSave] = Worker(
            "kvferry-save-layers", partial(self._carry_out, saver), save_lane.adopt_device
        )
        self._layer_loads: Worker[LayerLoad] = Worker(
            "kvferry-load-layers", partial(self._carry_out_load, loader), load_lane.adopt_device
        )

    @property
    def _workers(self) -> "tuple[Worker[Transfer] | Worker[LayerSave] | Worker[LayerLoad], ...]":
        return (*self._whole.values(), self._layer_saves, self._layer_loads)

    @overload
    def save(
        self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: Literal[False] = False
    ) -> Transfer: ...

    @overload
    def save(
        self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: Literal[True]
    ) -> LayerSave: ...

    def save(self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: bool = False) -> Transfer:
        """Store pages; those that the store has already are not written again.

        The pack is ordered behind all work that the calling thread's current stream has been given
        so far. The pages must not be written again before `Transfer.wait_packed`.

        Args:
            keys: a key for each page of the prefix, each once.
            page_ids: integers `[len(keys)]`, or a mapping of index space to such; -1 where a key
                has no page in that space. On the host, or (at the cost of a wait) on the device.
            layerwise: the pages are not written yet: each layer group leaves once the handle's
                `layer_written` has said so, ordered behind the stream of that call.

        Returns:
            A handle; its result tells which objects failed.

        Raises:
            ArgumentError: an argument is wrong; nothing was enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        plans, plan_us = self._plan("save", keys, page_ids)
        assert self.layout.device is not None
        caller = fence_of_caller(self.layout.device)
        if not layerwise:
            transfer = Transfer("save", plans, caller, self.config.transfer_timeout_s, plan_us)
            transfer.on_end.append(self.stats.ended)
            self._enqueue(self._whole["save"], transfer)
            return transfer
        save = LayerSave("save", plans, caller, self.config.transfer_timeout_s, plan_us)
        groups = groups_for(
            self.layout,
            merge([plans], [None]),
            self.config.groups,
            self.config.compute_us_per_layer,
            self.config.wire_gb_per_s,
        )
        save.prepare(groups, self.layout.num_layers, self.layout.device)
        save.on_end.append(self.stats.ended)
        self._enqueue(self._layer_saves, save)
        return save

    @overload
    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        layerwise: Literal[False] = False,
    ) -> Transfer: ...

    @overload
    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        layerwise: Literal[True],
    ) -> LayerLoad: ...

    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        layerwise: bool = False,
    ) -> Transfer | LayerLoad:
        """Fetch pages into the pools, whole and verified, or fail.

        The unpack is ordered behind all work that the calling thread's current stream has been
        given so far. The pages must not be read or written until the result is there.

        Args:
            keys: as in `save`, in any order.
            page_ids: destinations, as in `save`; no page twice.
            tail_tokens: how many tokens of the last key's page are wanted, 0 .. page_size; all of
                them by default. States are always whole.
            tail: what becomes of that page's other tokens: `zero`, or `keep` what is there.
            layerwise: return a load that is yet to be started, whose layers may be used as they
                arrive; see `LayerLoad`.

        Returns:
            A handle; its result raises `TransferFailed` if any object could not be had.

        Raises:
            ArgumentError: an argument is wrong, or pages cannot be cut by tokens; nothing was
                enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        request = LoadRequest(keys, page_ids, tail_tokens, tail)
        if layerwise:
            return self.load_batch([request])
        transfer = self._load_of(request)
        self._enqueue(self._whole["load"], transfer)
        return transfer

    def load_batch(self, requests: Sequence[LoadRequest]) -> LayerLoad:
        """Prepare a layer-wise load of several requests, each with a verdict of its own.

        They travel together: a layer counts as there once it is there for all of them. Requests
        may share keys, but not pages.

        Args:
            requests: at least one.

        Returns:
            The load; it begins with `LayerLoad.start`.

        Raises:
            ArgumentError: an argument is wrong; nothing has happened.
        """
        if not requests:
            raise ArgumentError("requests are empty, wanted at least one")
        transfers = tuple(self._load_of(request) for request in requests)
        rows = merge(
            [transfer.plans for transfer in transfers], [transfer.tail for transfer in transfers]
        )
        groups = groups_for(
            self.layout,
            rows,
            self.config.groups,
            self.config.compute_us_per_layer,
            self.config.wire_gb_per_s,
        )
        assert self.layout.device is not None
        return LayerLoad(transfers, rows, groups, self.layout.device, self._begin_load, self._trace)

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

        Transfers that are not done when `timeout_s` has passed fail. A layer-wise save whose layers
        are not all written by then counts among them.

        Raises:
            TransferFailed: a thread is still inside a store call; staging stays registered, since
                the call may still use it.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            self._closing.set()
        for worker in self._workers:
            worker.close()
        stuck = [
            worker
            for worker in self._workers
            if not worker.join(max(0.0, deadline - time.monotonic()))
        ]
        atexit.unregister(self.close)
        if stuck:
            for worker in stuck:
                worker.fail_all("the linker was closed")
            # One that only waited for the model ends now; one in a store call does not.
            stuck = [worker for worker in stuck if not worker.join(_LAST_S)]
        if stuck:
            names = ", ".join(worker.name for worker in stuck)
            raise TransferFailed(
                f"{names} still at work {timeout_s:g} s after close", cause="closed"
            )
        for wire in self._wires:
            wire.close()
        self._counters.close()
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

    def _plan(
        self, kind: str, keys: Sequence[str], page_ids: SpaceIds
    ) -> tuple[tuple[SpacePlan, ...], float]:
        """Return the plans of a transfer, and how many microseconds they took."""
        begin = time.perf_counter()
        plans = plan_transfer(
            self.layout,
            self.keys,
            keys,
            page_ids,
            unique=kind == "load",
            trailer=self.config.integrity,
        )
        return plans, (time.perf_counter() - begin) * 1e6

    def _load_of(self, request: LoadRequest) -> Transfer:
        """Check a request, and return its handle."""
        if request.tail not in TAILS:
            raise ArgumentError(f"tail is {request.tail!r}, wanted one of {tuple(TAILS)}")
        page_size = self.layout.page_size
        tokens = request.tail_tokens
        if tokens is not None and not 0 <= tokens <= page_size:
            raise ArgumentError(f"tail_tokens is {tokens}, wanted 0 .. {page_size}")
        tail: Tail | None = None
        if tokens is not None and tokens < page_size:
            self._check_cut()
            tail = (tokens, request.tail)
        plans, plan_us = self._plan("load", request.keys, request.page_ids)
        assert self.layout.device is not None
        caller = fence_of_caller(self.layout.device)
        load = Transfer("load", plans, caller, self.config.transfer_timeout_s, plan_us, tail)
        load.on_end.append(self.stats.ended)
        return load

    def _begin_load(self, load: LayerLoad) -> None:
        """Give a load its counters, and enqueue it."""
        taken = self._counters.take(self.config.wait_timeout_s)
        load.attach(taken)
        try:
            self._enqueue(self._layer_loads, load)
        except TransferFailed as error:
            load.fail(error)
            self._counters.give_back(taken)
            raise

    def _enqueue(self, worker: Worker[JobT], job: JobT) -> None:
        with self._accepting:
            if self._closing.is_set():
                raise TransferFailed("transfer refused: the linker is closed", cause="closed")
            if worker.num_waiting >= self.config.max_queued:
                raise TransferFailed(
                    f"transfer refused: {self.config.max_queued} transfers wait already",
                    cause="busy",
                )
            worker.put(job)

    # ---- in the workers' threads ----

    def _carry_out(self, mover: "Mover | LayerSaver", transfer: Any) -> None:
        transfer.timings.queue_us = transfer.age_us
        with _ending(transfer, transfer.kind):
            transfer.check_going()
            mover.move(transfer)

    def _carry_out_load(self, loader: LayerLoader, load: LayerLoad) -> None:
        load.timings.queue_us = load.transfers[0].age_us
        try:
            with _ending(load, "load"):
                loader.move(load)
        finally:
            # Whoever waits gets through in any case, and only then are the counters another's.
            load.let_through()
            self._counters.give_back(load.counter_set)


@contextmanager
def _ending(job: Transfer | LayerLoad, kind: str) -> Iterator[None]:
    """End a job badly if the body raises; the thread that carries it out goes on."""
    try:
        yield
    except Ended:
        log.info("%r was given up", job)
    except TransferFailed as error:
        job.fail(error)
    except KVFerryError as error:
        job.fail(TransferFailed(f"{kind} failed: {error}"))
    except Exception as error:
        log.exception("%r failed unexpectedly", job)
        job.fail(TransferFailed(f"{kind} failed: {error!r}"))
