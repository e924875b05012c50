"""The threads of a linker: what each does, how transfers reach them, and how they end."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kvferry.errors import KVFerryError, TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.counter_sets import CounterSet, CounterSets
from kvferry.linker.direct import DirectSaver, direct_saver
from kvferry.linker.holdings import Holdings
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.layer_loader import LayerLoader
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.layer_saver import LayerSaver
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.mover import Mover
from kvferry.linker.seal import Seal
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.streams import Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended, Transfer, without_frames
from kvferry.linker.wire import Wire
from kvferry.linker.worker import JobT, Worker

log = logging.getLogger(__name__)

_LAST_S = 5.0
"""What a thread whose transfer was just failed has to come to its end."""

_UNWRITTEN_S = 0.5
"""What a model has to write the rest of a save's layers; mostly it is the one who closes."""

AnyWorker = Worker[Transfer] | Worker[LayerSave] | Worker[LayerLoad]


class Crew:
    """Four threads with a queue each, and the wire threads of the two that go layer by layer.

    `kvferry-save` and `kvferry-load` move whole objects; `kvferry-save-layers` and
    `kvferry-load-layers` go layer by layer, apart from them, so that a save that waits for the
    model holds up no other transfer. Safe from any thread.

    Attributes:
        workers: the four.
    """

    def __init__(
        self,
        layout: CacheLayout,
        store: Store,
        staging: StagingBuffer,
        existence: ExistenceCache,
        config: LinkerConfig,
        trace: Trace | None,
        sharing: SharedReads | None = None,
    ) -> None:
        """Start the threads; on a GPU this waits for the device, once. `staging` is registered."""
        assert layout.device is not None
        self._config = config
        self._closing = False
        self._accepting = threading.Lock()
        packers = {
            space: Packer(layout, space, max_programs=config.max_programs)
            for space in layout.spaces
        }
        part_bytes = min(config.part_bytes or staging.num_bytes // 4, staging.num_bytes)
        save_lane, load_lane = Lane(layout.device), Lane(layout.device)
        self._counters = CounterSets(
            config.num_counters,
            layout.num_layers,
            layout.device,
            load_lane.stream,
            kind=config.wait,
            timeout_s=config.wait_timeout_s,
        )
        num_loading = config.wire_threads if sharing is None else 1  # in an order that ranks share
        wires = [
            Wire(f"kvferry-{kind}-wire", num_threads, lane.adopt_device)
            for kind, num_threads, lane in (
                ("save", config.wire_threads, save_lane),
                ("load", num_loading, load_lane),
            )
        ]

        def means(lane: Lane) -> dict[str, Any]:
            return {
                "store": store,
                "staging": staging,
                "packers": packers,
                "existence": existence,
                "lane": lane,
                "seal": Seal(packers, lane, config.backend) if config.integrity else None,
                "part_bytes": part_bytes,
                "backend": config.backend,
                "trace": trace,
            }

        saver = LayerSaver(**means(save_lane), wire=wires[0])
        loader = LayerLoader(
            **means(load_lane),
            wire=wires[1],
            fetch_ahead=config.fetch_ahead,
            sharing=sharing,
        )
        direct = direct_saver(layout, store, existence, config, part_bytes=part_bytes, trace=trace)
        self._holdings = Holdings(staging, wires, self._counters, direct, sharing)
        # What the threads run knows nothing of the crew, so that it goes when the linker does.
        with ExitStack() as undo:
            undo.callback(self._holdings.leave)

            def worker(name: str, carry_out: Callable[[JobT], None], lane: Lane) -> "Worker[JobT]":
                made = Worker(f"kvferry-{name}", carry_out, lane.adopt_device, self._holdings)
                undo.callback(made.close)
                return made

            self._whole: dict[str, Worker[Transfer]] = {}
            for kind in ("save", "load"):
                mover = Mover(**means(Lane(layout.device)))
                self._whole[kind] = worker(
                    kind, partial(_carry_out_whole, direct, mover), mover.lane
                )
            self._layer_saves: Worker[LayerSave] = worker(
                "save-layers", partial(_carry_out, saver), save_lane
            )
            self._layer_loads: Worker[LayerLoad] = worker(
                "load-layers", partial(_carry_out_load, self._counters, loader), load_lane
            )
            undo.pop_all()

    @property
    def workers(self) -> "tuple[AnyWorker, ...]":
        """The threads that carry transfers out."""
        return (*self._whole.values(), self._layer_saves, self._layer_loads)

    # Each of these raises TransferFailed: the crew is closed, or too many transfers wait.

    def whole(self, transfer: Transfer) -> None:
        """Enqueue a save or load of whole objects."""
        self._enqueue(self._whole[transfer.kind], transfer)

    def layer_save(self, save: LayerSave) -> None:
        """Enqueue a layer-wise save."""
        self._enqueue(self._layer_saves, save)

    def layer_load(self, load: LayerLoad) -> None:
        """Give a layer-wise load its counters, and enqueue it."""
        taken: CounterSet | None = None
        try:
            taken = self._counters.take(self._config.wait_timeout_s)
            load.attach(taken)
            self._enqueue(self._layer_loads, load)
        except TransferFailed as error:
            load.fail(error)  # also one without counters: its handles end
            if taken is not None:
                self._counters.give_back(taken)
            raise

    @property
    def is_closed(self) -> bool:
        """Whether transfers are refused."""
        return self._closing

    def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        """Finish what was enqueued, end the threads, let go of what they hold. Idempotent.

        Called by one of the threads, when a transfer ends, it does not wait for them.

        Args:
            timeout_s: how long transfers have; saves whose layers are not all written have 0.5 s.
            abandon: whoever closes is leaving in a hurry, will write no layer any more, and does
                not want what is being loaded: saves that lack layers, and loads, fail at once, and
                `timeout_s` is kept to.

        Raises:
            TransferFailed: a thread is still inside a store call. The last one lets go.
        """
        last_s = min(_LAST_S, timeout_s / 8) if abandon else _LAST_S
        limit_s = last_s if abandon else None
        deadline = time.monotonic() + (timeout_s - last_s if abandon else timeout_s)
        with self._accepting:
            self._closing = True
        for worker in self.workers:
            worker.close()
        if any(worker.is_current for worker in self.workers):
            self._holdings.leave()
            return
        if abandon:
            self._whole["load"].fail_all("the linker was closed", limit_s=limit_s)
            self._layer_loads.fail_all("the linker was closed", limit_s=limit_s)
        if not self._layer_saves.join(0.0 if abandon else min(_UNWRITTEN_S, timeout_s)):
            self._layer_saves.fail_all(
                "the linker was closed, and not all layers are written",
                chosen=lambda save: not save.is_written,
                limit_s=limit_s,
            )
        stuck = self._still_at_work(deadline)
        for worker in stuck:
            worker.fail_all("the linker was closed", limit_s=limit_s)
        # One that only waited for the model ends now; one in a store call does not.
        stuck = stuck and self._still_at_work(time.monotonic() + last_s)
        if stuck:
            self._holdings.leave()
            names = ", ".join(worker.name for worker in stuck)
            raise TransferFailed(
                f"{names} still at work {timeout_s:g} s after close", cause="closed"
            )
        self._holdings.let_go()

    def leave(self) -> None:
        """Finish what was enqueued, with nobody waiting; the last thread lets go of the rest.

        For a linker that was dropped: takes no lock that another thread may hold.
        """
        self._closing = True
        self._holdings.is_left = True
        for worker in self.workers:
            worker.leave()

    def _still_at_work(self, deadline: float) -> "list[AnyWorker]":
        """Wait for the threads' ends; return those that have not ended by the deadline."""
        return [
            worker
            for worker in self.workers
            if not worker.join(max(0.0, deadline - time.monotonic()))
        ]

    def _enqueue(self, worker: Worker[JobT], job: JobT) -> None:
        with self._accepting:
            if self._closing:
                raise TransferFailed("transfer refused: the linker is closed", cause="closed")
            if worker.num_waiting >= self._config.max_queued:
                raise TransferFailed(
                    f"transfer refused: {self._config.max_queued} transfers wait already",
                    cause="busy",
                )
            worker.put(job)


# ---- in the workers' threads ----


def _carry_out_whole(direct: DirectSaver | None, mover: Mover, transfer: Transfer) -> None:
    if transfer.kind == "save" and direct is not None and direct.takes(transfer):
        _carry_out(direct, transfer)
    else:
        _carry_out(mover, transfer)


def _carry_out(mover: Mover | LayerSaver | DirectSaver, transfer: Any) -> None:
    transfer.timings.queue_us = transfer.age_us
    with _ending(transfer, transfer.kind):
        transfer.check_going()
        mover.move(transfer)


def _carry_out_load(counters: CounterSets, loader: LayerLoader, load: LayerLoad) -> None:
    load.timings.queue_us = load.transfers[0].age_us
    try:
        with _ending(load, "load"):
            loader.move(load)
    finally:
        # Whoever waits gets through in any case, and only then are the counters another's.
        load.let_through()
        counters.give_back(load.counter_set)


@contextmanager
def _ending(job: Transfer | LayerLoad, kind: str) -> Iterator[None]:
    """End a job badly if the body raises; the thread that carries it out goes on."""
    try:
        yield
    except Ended:
        log.info("%r was given up", job)
    except TransferFailed as error:
        without_frames(error)  # else the handle would keep the threads' staging and store
        job.fail(error)
    except KVFerryError as error:
        job.fail(TransferFailed(f"{kind} failed: {error}"))
    except Exception as error:
        log.exception("%r failed unexpectedly", job)
        job.fail(TransferFailed(f"{kind} failed: {error!r}"))
