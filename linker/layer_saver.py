"""The work of the layer-wise saves' thread: layer groups through kernels, staging and store."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from functools import partial

import torch

from kvferry.errors import TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.linker.attempts import RETRY_DELAY_S, reason_of
from kvferry.linker.layer_plan import GroupPart, Piece, Rows, cut, merge
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.layer_staging import StagedPart, acquire
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import of_layers, of_part, of_plans, ranged
from kvferry.linker.seal import Seal, ends_of, wait
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome, PutSession, Store
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended
from kvferry.linker.wire import Wire


class LayerSaver:
    """Carries out layer-wise saves, one at a time, in the thread that calls it.

    This thread packs each layer group once the model has written it; wire threads write it into the
    objects of a put session. The session begins with the first group, so that only the model's own
    time counts against its age.

    Attributes:
        lane: the stream that its kernels run on.
    """

    def __init__(
        self,
        store: Store,
        staging: StagingBuffer,
        packers: Mapping[str, Packer],
        existence: ExistenceCache,
        lane: Lane,
        seal: Seal | None,
        wire: Wire,
        *,
        part_bytes: int,
        backend: str,
        trace: Trace | None,
    ) -> None:
        self.lane = lane
        self._store = store
        self._staging = staging
        self._packers = packers
        self._existence = existence
        self._wire = wire
        self._part_bytes = part_bytes
        self._backend = backend
        self._trace = trace
        self._layout = next(iter(packers.values())).layout
        self._seal = seal

    def move(self, save: LayerSave) -> None:
        """Carry out a save and end its handle.

        Raises:
            Ended: it was given up meanwhile.
            KVFerryError: it failed; the caller ends the handle.
        """
        _Run(self, save).carry_out()


class _Run:
    """One save being carried out."""

    def __init__(self, saver: LayerSaver, save: LayerSave) -> None:
        self._saver = saver
        self._save = save
        self._staged: deque[StagedPart] = deque()
        self._session: PutSession | None = None
        self._keys: list[str] = []  # of the session
        self._rows: dict[str, Rows] = {}
        self._ids: dict[str, PageIds] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._failures: dict[str, str] = {}
        self._last_pack = Fence()

    @ranged(lambda run: of_plans("save", run._save.plans, "layers"))
    def carry_out(self) -> None:
        """Do everything, and let go of everything."""
        save = self._save
        try:
            missing = self._missing()
            if missing:
                first = self._written(0)
                missing = self._open(missing)
            if missing:
                self._prepare(missing)
                parts = cut(self._saver._layout, self._rows, save.groups, self._saver._part_bytes)
                for group, of_group in enumerate(parts):
                    behind = self._written(group) if group else first
                    for part in of_group:
                        self._pack(part, behind)
                wait(self._last_pack)
                save.mark_packed()
                while self._staged:
                    self._retire()
                self._finish()
            save.mark_packed()
            save.progress.failures.update(self._failures)
        finally:
            with contextlib.ExitStack() as rest:  # all of it, whatever one of them raises
                if self._session is not None:
                    rest.callback(self._session.abort)  # does nothing once it was finished
                for item in self._staged:
                    rest.callback(item.release)
        save.finish()

    # ---- which objects ----

    def _missing(self) -> list[SpacePlan]:
        """Return the plans of what the store does not have yet."""
        save, begin_s = self._save, time.perf_counter()
        keys = [key for plan in save.plans for key in plan.keys]
        found = self._saver._existence.before_save(self._saver._store, keys)
        missing = iter(found.missing)
        plans = [plan.select([next(missing) for _ in plan.keys]) for plan in save.plans]
        save.timings.lookup_us += _us_since(begin_s)
        save.progress.num_existing += sum(found.exists)
        self._failures.update(found.spoilt)
        return [plan for plan in plans if plan.keys]

    def _open(self, plans: list[SpacePlan]) -> list[SpacePlan]:
        """Begin the put session; return the plans of the objects that may be written."""
        save = self._save
        keys = self._keys = [key for plan in plans for key in plan.keys]
        sizes = [size for plan in plans for size in plan.sizes]
        results: list[ObjectResult] = []
        for attempt in range(2):
            save.check_going()
            self._session = self._saver._store.put_session(keys, sizes)
            results = self._session.start_results()
            full = any(result.outcome is Outcome.NO_SPACE for result in results)
            if not full or attempt:
                break
            self._session.abort()  # nothing is written yet, so all of it may be tried again
            time.sleep(RETRY_DELAY_S)
        for key, result in zip(keys, results, strict=True):
            if result.outcome is Outcome.EXISTS:
                save.progress.num_existing += 1
            elif result.outcome is not Outcome.STORED:
                self._failures[key] = reason_of(result)
        self._saver._existence.mark_stored(
            key
            for key, result in zip(keys, results, strict=True)
            if result.outcome is Outcome.EXISTS
        )
        opened = iter(result.outcome is Outcome.STORED for result in results)
        selected = [plan.select([next(opened) for _ in plan.keys]) for plan in plans]
        return [plan for plan in selected if plan.keys]

    def _prepare(self, plans: list[SpacePlan]) -> None:
        saver = self._saver
        self._rows = merge([tuple(plans)], [None])
        with saver.lane.work(Fence()):
            for space, rows in self._rows.items():
                self._ids[space] = PageIds.upload(saver._layout, rows.plan.page_ids, unique=False)
                if saver._seal is not None:
                    self._sums[space] = saver._seal.zeros(len(rows))

    def _finish(self) -> None:
        """End the session, and note what became of each object."""
        assert self._session is not None
        progress, stored = self._save.progress, []
        for plan, results in self._finals():
            for key, result in zip(plan.keys, results, strict=True):
                if result.outcome is Outcome.STORED:
                    progress.num_objects += 1
                    progress.num_bytes += plan.object_bytes
                    stored.append(key)
                else:
                    self._failures.setdefault(key, reason_of(result))
        self._saver._existence.mark_stored(stored)

    def _finals(self) -> list[tuple[SpacePlan, list[ObjectResult]]]:
        assert self._session is not None
        begin_s = time.perf_counter()
        finals = self._session.finish()
        self._save.timings.wire_us += _us_since(begin_s)
        of_key = dict(zip(self._keys, finals, strict=True))
        return [
            (rows.plan, [of_key[key] for key in rows.plan.keys]) for rows in self._rows.values()
        ]

    # ---- bytes ----

    @ranged(lambda run, group: of_layers("wait", run._save.groups[group]))
    def _written(self, group: int) -> Fence:
        """Wait for the model to write a layer group.

        Raises:
            Ended: the save is over.
            TransferFailed: the session is too old to wait any longer.
        """
        save, begin_s = self._save, time.perf_counter()
        while True:
            while self._staged and self._is_sent(self._staged[0]):
                self._retire()
            left_s = save.left_s if self._session is None else self._session.left_s
            fence = save.wait_written(group, left_s)
            save.check_going()
            if fence is not None:
                save.timings.model_us += _us_since(begin_s)
                return fence
            if self._session is not None and self._session.left_s <= 0:
                first, end = save.groups[group]
                raise TransferFailed(
                    f"save failed: layers {first}..{end - 1} were not written while the put session"
                    " was young enough",
                    cause="session too old",
                )

    def _pack(self, part: GroupPart, behind: Fence) -> None:
        """Pack a part, and hand it to the wire."""
        saver, save, begin_s = self._saver, self._save, time.perf_counter()
        span = self._acquire(part.staging_bytes)
        save.timings.staging_us += _us_since(begin_s)
        rows = [range(piece.first_row, piece.end_row) for piece in part.pieces]
        item = StagedPart(part, span, rows)
        self._staged.append(item)
        self._launch(item, behind)
        item.call = saver._wire.call(partial(self._send, item))

    @ranged(lambda _, item, behind: of_part("pack", item.part, item.rows))
    def _launch(self, item: StagedPart, behind: Fence) -> None:
        """Pack a part into its span."""
        saver, part, span = self._saver, item.part, item.span
        with self._save.touching_pages() as touched:
            with saver.lane.work(behind) as fences:
                for piece in part.pieces:
                    saver._packers[piece.space].pack(
                        self._ids[piece.space][piece.first_row : piece.end_row],
                        span.tensor[piece.base_bytes :],
                        stride_bytes=piece.stride_bytes,
                        layers=range(part.first_layer, part.end_layer),
                        origin_bytes=piece.origin_bytes,
                        sums=self._sums_of(piece),
                        backend=saver._backend,
                    )
            touched.extend(fences)
        item.fence = self._last_pack = fences[-1]
        if saver._trace is not None:
            saver._trace.add_fence("pack", part.name, item.fence, bytes=part.num_bytes)

    @ranged(lambda _, item: of_part("wire", item.part, item.rows))
    def _send(self, item: StagedPart) -> dict[str, ObjectResult]:
        """Write a part's ranges into their objects; in a wire thread."""
        assert self._session is not None
        part, save = item.part, self._save
        wait(item.fence)
        save.check_going()
        self._write_ends(item)
        keys, addresses, sizes, offsets = [], [], [], []
        for piece in part.pieces:
            plan_keys = self._rows[piece.space].plan.keys
            for row, address in enumerate(piece.addresses(item.span.address), piece.first_row):
                if plan_keys[row] not in self._failures:
                    keys.append(plan_keys[row])
                    addresses.append(address)
                    sizes.append(piece.range_bytes)
                    offsets.append(piece.origin_bytes)
        if not keys:
            return {}
        begin_s = time.perf_counter()
        try:
            results = item.attempts.twice(
                self._session.write, keys, addresses, sizes, offsets, again=(Outcome.FAILED,)
            )
        finally:
            if self._saver._trace is not None:
                self._saver._trace.add(
                    "wire", part.name, begin_s, time.perf_counter(), bytes=sum(sizes)
                )
        return dict(zip(keys, results, strict=True))

    def _write_ends(self, item: StagedPart) -> None:
        """Put the trailers behind the last bytes of the objects; every layer's sum is known."""
        seal = self._saver._seal
        if seal is None:
            return
        begin_s = time.perf_counter()
        for piece in item.part.pieces:
            if piece.has_end:
                plan = self._rows[piece.space].plan
                keys = plan.keys[piece.first_row : piece.end_row]
                behind = piece.base_bytes + plan.object_bytes - piece.origin_bytes
                ends = ends_of(
                    item.span.tensor, len(keys), piece.stride_bytes, behind, plan.end_bytes
                )
                sums = self._sums_of(piece)
                assert sums is not None
                seal.write(ends, plan, keys, sums)
        item.seal_us = _us_since(begin_s)

    def _sums_of(self, piece: Piece) -> torch.Tensor | None:
        if self._saver._seal is None:
            return None
        return self._sums[piece.space][piece.first_row : piece.end_row]

    def _retire(self) -> None:
        """Wait for the oldest part's store call, and let its span go."""
        item = self._staged[0]
        assert item.call is not None
        try:
            results: dict[str, ObjectResult] = item.call.result()
        finally:
            timings = self._save.timings
            timings.pack_us += item.fence.device_us or 0.0
            timings.wire_us += item.attempts.wire_us
            timings.seal_us += item.seal_us
        for key, result in results.items():
            if result.outcome is not Outcome.STORED:
                self._failures.setdefault(key, reason_of(result))
        item.release()
        self._staged.popleft()
        self._save.check_going()

    @staticmethod
    def _is_sent(item: StagedPart) -> bool:
        return item.call is not None and item.call.done()

    def _acquire(self, num_bytes: int) -> Span:
        save = self._save
        span = acquire(
            self._saver._staging,
            num_bytes,
            lambda: 0.0 if save.done() else save.left_s,
            self._make_room,
        )
        if span is None:
            save.check_going()
            raise Ended
        return span

    def _make_room(self) -> bool:
        if not self._staged:
            return False
        self._retire()
        return True


def _us_since(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1e6
