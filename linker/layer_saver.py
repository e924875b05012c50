"""The work of the layer-wise saves' thread: layer groups through kernels and staging, then puts."""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from kvferry.errors import StagingTimeout
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.linker.layer_plan import GroupPart, Piece, Rows, cut, merge
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.layer_staging import StagedPart, acquire, leaves_room
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.mover import count_stored
from kvferry.linker.plan import SpacePlan, stride_bytes
from kvferry.linker.ranges import Range, of_layers, of_plans, ranged
from kvferry.linker.seal import Seal, ends_of, wait
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome, Store
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended
from kvferry.linker.wire import Wire


class LayerSaver:
    """Carries out layer-wise saves, one at a time, in the thread that calls it.

    This thread packs each layer group once the model has written it, into objects that stand whole
    in up to half of staging: so the pages are free as soon as the last layer is packed. Only then
    do wire threads put the objects. Nothing is reserved in the store while the model computes,
    since a master or owner that is lost meanwhile would give the memory to others unnoticed. What
    staging has no room for is packed and put once all layers are written.

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
        self._layout = layout = next(iter(packers.values())).layout
        self._seal = seal
        # What any other transfer of this linker needs at once, of whatever index space.
        strides = [stride_bytes(layout, it, trailer=seal is not None) for it in layout.spaces]
        self._others_bytes = max(part_bytes, *strides)

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
        self._rows: dict[str, Rows] = {}
        self._ids: dict[str, PageIds] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._packs: list[Fence] = []  # behind each launch

    @ranged(lambda run: of_plans("save", run._save.plans, "layers"))
    def carry_out(self) -> None:
        """Do everything, and let go of everything."""
        save = self._save
        try:
            missing = self._missing()
            if missing:
                first = self._written(0)
                parts = self._prepare(missing)
                early = self._reserve(parts)
                behind = self._pack_early(early, first)
                self._pack_late(parts[len(early) :], behind)
                wait(self._packs[-1])
                save.timings.pack_us += sum(fence.device_us or 0.0 for fence in self._packs)
                save.mark_packed()
                while self._staged:
                    self._retire()
            save.mark_packed()
        finally:
            with contextlib.ExitStack() as rest:  # all of it, whatever one of them raises
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
        save.progress.failures.update(found.spoilt)
        return [plan for plan in plans if plan.keys]

    def _prepare(self, plans: list[SpacePlan]) -> list[GroupPart]:
        """Upload page ids, and return the parts: rows whose objects are put in one call."""
        saver = self._saver
        self._rows = merge([tuple(plans)], [None])
        with saver.lane.work(Fence()):
            for space, rows in self._rows.items():
                self._ids[space] = PageIds.upload(saver._layout, rows.plan.page_ids, unique=False)
                if saver._seal is not None:
                    self._sums[space] = saver._seal.zeros(len(rows))
        whole = ((0, saver._layout.num_layers),)
        num_wires = saver._wire.num_threads
        (parts,) = cut(saver._layout, self._rows, whole, saver._part_bytes, num_wires)
        return parts

    def _reserve(self, parts: Iterable[GroupPart]) -> list[StagedPart]:
        """Hold spans for the first parts, as far as there is room now without harm to others.

        These spans are held while the model computes, which may itself wait for a load: so half of
        staging, in one piece with room for any part, is left to others.
        """
        staging = self._saver._staging
        early: list[StagedPart] = []
        for part in parts:
            try:
                span = staging.acquire(part.staging_bytes, 0.0)
            except StagingTimeout:
                break
            if not leaves_room([*(item.span for item in early), span], self._saver._others_bytes):
                span.release()
                break
            early.append(_staged(part, span))
            self._staged.append(early[-1])
        return early

    # ---- bytes ----

    @ranged(lambda run, group: of_layers("wait", run._save.groups[group]))
    def _written(self, group: int) -> Fence:
        """Wait for the model to write a layer group.

        Raises:
            Ended: the save is over.
        """
        save, begin_s = self._save, time.perf_counter()
        fence: Fence | None = None
        while fence is None:
            fence = save.wait_written(group, save.left_s)
            save.check_going()
        save.timings.model_us += _us_since(begin_s)
        return fence

    def _pack_early(self, early: list[StagedPart], first: Fence) -> Fence:
        """Pack what is reserved, group by group as the model writes them, and put it.

        Returns:
            The fence behind the last group's writes.
        """
        groups, behind = self._save.groups, first
        for group, layers in enumerate(groups):
            behind = self._written(group) if group else first
            for item in early:
                self._launch(item, range(*layers), behind)
        for item in early:
            item.call = self._saver._wire.call(partial(self._put, item))
        return behind

    def _pack_late(self, parts: Iterable[GroupPart], behind: Fence) -> None:
        """Pack and put the other parts, one after another, as spans come free."""
        saver, save = self._saver, self._save
        for part in parts:
            begin_s = time.perf_counter()
            item = _staged(part, self._acquire(part.staging_bytes))
            save.timings.staging_us += _us_since(begin_s)
            self._staged.append(item)
            self._launch(item, range(saver._layout.num_layers), behind)
            item.call = saver._wire.call(partial(self._put, item))

    @ranged(lambda run, item, layers, _: run._range_of(item, layers))
    def _launch(self, item: StagedPart, layers: range, behind: Fence) -> None:
        """Pack some layers of a part into its span."""
        saver, part, span = self._saver, item.part, item.span
        with self._save.touching_pages() as touched:
            with saver.lane.work(behind) as fences:
                for piece in part.pieces:
                    if not self._layer_bytes(piece.space, layers):
                        continue
                    saver._packers[piece.space].pack(
                        self._ids[piece.space][piece.first_row : piece.end_row],
                        span.tensor[piece.base_bytes :],
                        stride_bytes=piece.stride_bytes,
                        layers=layers,
                        sums=self._sums_of(piece),
                        backend=saver._backend,
                    )
            touched.extend(fences)
        item.fence = fences[-1]
        self._packs.append(item.fence)
        if saver._trace is not None:
            described = self._range_of(item, layers)
            saver._trace.add_fence("pack", described.what, item.fence, bytes=described.num_bytes)

    def _range_of(self, item: StagedPart, layers: range) -> Range:
        moved = [
            (piece.num_rows, self._layer_bytes(piece.space, layers)) for piece in item.part.pieces
        ]
        return Range(
            "pack",
            f"layers {layers.start}..{layers.stop - 1}",
            sum(num_rows * num_bytes for num_rows, num_bytes in moved),
            sum(num_rows for num_rows, num_bytes in moved if num_bytes),
        )

    def _layer_bytes(self, space: str, layers: range) -> int:
        offsets = self._saver._layout.layer_offsets[space]
        return offsets[layers.stop] - offsets[layers.start]

    @ranged(lambda run, item: of_plans("wire", run._plans_of(item), "objects"))
    def _put(self, item: StagedPart) -> dict[str, ObjectResult]:
        """Put a part's objects; in a wire thread."""
        saver, part, save = self._saver, item.part, self._save
        wait(item.fence)
        save.check_going()
        self._write_ends(item)
        keys, addresses, sizes = [], [], []
        for piece, plan in zip(part.pieces, self._plans_of(item), strict=True):
            keys += plan.keys
            addresses += piece.addresses(item.span.address)
            sizes += [piece.range_bytes] * piece.num_rows
        begin_s = time.perf_counter()
        again = (Outcome.NO_SPACE, Outcome.FAILED)
        try:
            results = item.attempts.twice(saver._store.put, keys, addresses, sizes, again=again)
        finally:
            if saver._trace is not None:
                end_s = time.perf_counter()
                saver._trace.add("wire", "objects", begin_s, end_s, bytes=sum(sizes))
        return dict(zip(keys, results, strict=True))

    def _write_ends(self, item: StagedPart) -> None:
        """Put the trailers behind the payloads; every layer's sum is known."""
        seal = self._saver._seal
        if seal is None:
            return
        begin_s = time.perf_counter()
        for piece, plan in zip(item.part.pieces, self._plans_of(item), strict=True):
            behind, count = piece.base_bytes + plan.object_bytes, piece.num_rows
            ends = ends_of(item.span.tensor, count, piece.stride_bytes, behind, plan.end_bytes)
            sums = self._sums_of(piece)
            assert sums is not None
            seal.write(ends, plan, plan.keys, sums)
        item.seal_us = _us_since(begin_s)

    def _plans_of(self, item: StagedPart) -> list[SpacePlan]:
        """Return the plan of each of a part's pieces."""
        return [
            plan._replace(
                keys=plan.keys[piece.first_row : piece.end_row],
                page_ids=plan.page_ids[piece.first_row : piece.end_row],
            )
            for piece in item.part.pieces
            for plan in (self._rows[piece.space].plan,)
        ]

    def _sums_of(self, piece: Piece) -> torch.Tensor | None:
        if self._saver._seal is None:
            return None
        return self._sums[piece.space][piece.first_row : piece.end_row]

    def _retire(self) -> None:
        """Wait for the oldest part's store call, note what came of it, and let its span go."""
        item, save = self._staged[0], self._save
        assert item.call is not None
        try:
            results: dict[str, ObjectResult] = item.call.result()
        finally:
            save.timings.wire_us += item.attempts.wire_us
            save.timings.seal_us += item.seal_us
        for plan in self._plans_of(item):
            own = [results[key] for key in plan.keys]
            count_stored(save, self._saver._existence, plan, own)
        item.release()
        self._staged.popleft()
        save.check_going()

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


def _staged(part: GroupPart, span: Span) -> StagedPart:
    rows = [range(piece.first_row, piece.end_row) for piece in part.pieces]
    return StagedPart(part, span, rows)


def _us_since(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1e6
