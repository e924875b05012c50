"""The threads of a linker: what each does, how transfers reach them, and how they end."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvferry.errors import KVFerryError, TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.counter_sets import CounterSet, CounterSets
from kvferry.linker.direct import DirectSaver, direct_saver
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
from kvferry.linker.transfer import Ended, Transfer
from kvferry.linker.wire import Wire
from kvferry.linker.worker import JobT, Worker

log = logging.getLogger(__name__)

_LAST_S = 5.0
"""What a thread whose transfer was just failed has to come to its end."""


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
        self._closing = threading.Event()
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
        self._wires = [
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

        saver = LayerSaver(**means(save_lane), wire=self._wires[0])
        loader = LayerLoader(
            **means(load_lane),
            wire=self._wires[1],
            fetch_ahead=config.fetch_ahead,
            sharing=sharing,
        )
        self._direct = direct_saver(
            layout, store, existence, config, part_bytes=part_bytes, trace=trace
        )
        self._whole: dict[str, Worker[Transfer]] = {}
        for kind in ("save", "load"):
            mover = Mover(**means(Lane(layout.device)))
            self._whole[kind] = Worker(
                f"kvferry-{kind}", partial(self._carry_out_whole, mover), mover.lane.adopt_device
            )
        self._layer_saves: Worker[LayerSave] = Worker(
            "kvferry-save-layers", partial(self._carry_out, saver), save_lane.adopt_device
        )
        self._layer_loads: Worker[LayerLoad] = Worker(
            "kvferry-load-layers", partial(self._carry_out_load, loader), load_lane.adopt_device
        )

    @property
    def workers(self) -> "tuple[Worker[Transfer] | Worker[LayerSave] | Worker[LayerLoad], ...]":
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

    def close(self, timeout_s: float) -> None:
        """Finish what was enqueued, and end the threads. Idempotent.

        Raises:
            TransferFailed: a thread is still inside a store call.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            self._closing.set()
        for worker in self.workers:
            worker.close()
        stuck = [
            worker
            for worker in self.workers
            if not worker.join(max(0.0, deadline - time.monotonic()))
        ]
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
        if self._direct is not None:
            self._direct.close()

    def _enqueue(self, worker: Worker[JobT], job: JobT) -> None:
        with self._accepting:
            if self._closing.is_set():
                raise TransferFailed("transfer refused: the linker is closed", cause="closed")
            if worker.num_waiting >= self._config.max_queued:
                raise TransferFailed(
                    f"transfer refused: {self._config.max_queued} transfers wait already",
                    cause="busy",
                )
            worker.put(job)

    # ---- in the workers' threads ----

    def _carry_out_whole(self, mover: Mover, transfer: Transfer) -> None:
        direct = self._direct
        if transfer.kind == "save" and direct is not None and direct.takes(transfer):
            self._carry_out(direct, transfer)
        else:
            self._carry_out(mover, transfer)

    def _carry_out(self, mover: Mover | LayerSaver | DirectSaver, transfer: Any) -> None:
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
