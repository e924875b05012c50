"""The work of one direction's thread: a transfer's parts through kernels, staging and store."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from kvferry.arguments import shown
from kvferry.errors import TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.linker.attempts import Attempts, reason_of
from kvferry.linker.layer_staging import acquire
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.memory import flush_gpudirect
from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import of_plans, ranged
from kvferry.linker.seal import Seal, ends_of, wait
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome, Store
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended, Transfer

_KERNELS = {"save": "pack", "load": "unpack"}


@dataclass
class _Staged:
    """A part in staging, the fence after its kernels, and what became of its store calls."""

    part: SpacePlan
    ids: PageIds
    span: Span
    fence: Fence
    sums: torch.Tensor | None = None
    attempts: Attempts = field(default_factory=Attempts)


class Mover:
    """Carries out transfers, one at a time, in the thread that calls it.

    While a part is on the wire the next one is being packed (or the last one unpacked) on the
    lane. A span is released only when neither kernel nor store can touch it any more.

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
        *,
        part_bytes: int,
        backend: str,
        trace: Trace | None,
    ) -> None:
        self._store = store
        self._staging = staging
        self._packers = packers
        self._existence = existence
        self._part_bytes = part_bytes
        self._backend = backend
        self.lane = lane
        self._seal = seal
        self._trace = trace

    @ranged(lambda _, transfer: of_plans(transfer.kind, transfer.plans))
    def move(self, transfer: Transfer) -> None:
        """Carry out a transfer and end its handle.

        Raises:
            Ended: it was given up meanwhile.
            KVFerryError: it failed; the caller ends the handle.
        """
        staged: deque[_Staged] = deque()
        try:
            if transfer.kind == "save":
                self._save(transfer, staged)
            else:
                self._load(transfer, staged)
        finally:
            with ExitStack() as rest:  # all of it, whatever one of them raises
                for item in staged:
                    rest.callback(self._release, item)
        transfer.finish()

    def _save(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        for plan in transfer.plans:
            begin = time.perf_counter()
            found = self._existence.before_save(self._store, plan.keys)
            transfer.timings.lookup_us += _us_since(begin)
            transfer.progress.num_existing += sum(found.exists)
            transfer.progress.failures.update(found.spoilt)
            missing = plan.select(found.missing)
            for part, ids in self._parts(missing, unique=False):
                span = self._span(transfer, part, lambda: self._put(transfer, staged), staged)
                staged.append(_Staged(part, ids, span, Fence()))
                self._launch(transfer, staged[-1])
                if len(staged) > 1:
                    self._put(transfer, staged)
        for item in staged:
            wait(item.fence)
        transfer.mark_packed()
        while staged:
            self._put(transfer, staged)

    def _put(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        """Send the oldest staged part and let its span go."""
        item = staged[0]
        wait(item.fence)
        transfer.timings.pack_us += item.fence.device_us or 0.0
        transfer.check_going()
        if self._seal is not None and item.sums is not None:
            begin = time.perf_counter()
            part = item.part
            ends = ends_of(
                item.span.tensor,
                len(part.keys),
                part.stride_bytes,
                part.object_bytes,
                part.end_bytes,
            )
            self._seal.write(ends, part, part.keys, item.sums)
            transfer.timings.seal_us += _us_since(begin)
        again = (Outcome.NO_SPACE, Outcome.FAILED)
        results = self._call(transfer, self._store.put, item, again)
        count_stored(transfer, self._existence, item.part, results)
        self._release(staged.popleft())

    def _load(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        for plan in transfer.plans:
            for part, ids in self._parts(plan, unique=True):
                span = self._span(transfer, part, lambda: self._retire(transfer, staged), staged)
                staged.append(_Staged(part, ids, span, Fence()))
                self._get(transfer, staged[-1])
                self._launch(transfer, staged[-1])
                transfer.progress.num_objects += len(part.keys)
                transfer.progress.num_bytes += part.num_bytes
                while len(staged) > 1 and staged[0].fence.is_passed():
                    self._retire(transfer, staged)
        while staged:
            self._retire(transfer, staged)

    def _get(self, transfer: Transfer, item: _Staged) -> None:
        """Fetch a part and verify it, or fail the transfer.

        Raises:
            TransferFailed: an object could not be had, or is not what it should be.
        """
        causes = self._fetch(transfer, item)
        if not causes:
            causes = self._verify(transfer, item)
            if causes:  # once more: it may have been evicted while it was read
                causes = self._fetch(transfer, item) or self._verify(transfer, item)
        if causes:
            self._existence.mark_faults(causes)
            first = next(iter(causes))
            raise TransferFailed(
                f"load failed: {len(causes)} of {len(item.part.keys)} objects could not be had, "
                f"the first {shown(first)}: {causes[first]}",
                causes,
            )

    def _fetch(self, transfer: Transfer, item: _Staged) -> dict[str, str]:
        transfer.check_going()
        again = (Outcome.MISSING, Outcome.LEASE_EXPIRED, Outcome.FAILED)
        results = self._call(transfer, self._store.get, item, again)
        return {
            key: reason_of(result)
            for key, result in zip(item.part.keys, results, strict=True)
            if result.outcome is not Outcome.FETCHED
        }

    def _verify(self, transfer: Transfer, item: _Staged) -> dict[str, str]:
        if self._staging.memory == "device":
            flush_gpudirect(self._staging.tensor.device)
        if self._seal is None:
            return {}
        begin = time.perf_counter()
        faults = self._seal.verify(item.part, item.span).faults
        transfer.timings.seal_us += _us_since(begin)
        return faults

    def _retire(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        """Wait for the oldest part's unpack and let its span go."""
        item = staged[0]
        wait(item.fence)
        transfer.timings.unpack_us += item.fence.device_us or 0.0
        self._release(staged.popleft())

    def _parts(self, plan: SpacePlan, *, unique: bool) -> Iterator[tuple[SpacePlan, PageIds]]:
        """Yield a plan's parts with their page ids, which are uploaded once for all of them."""
        if not plan.keys:
            return
        with self.lane.work(Fence()):
            ids = PageIds.upload(self._packers[plan.space].layout, plan.page_ids, unique=unique)
        yield from plan.parts_and_ids(ids, self._part_bytes)

    def _span(
        self,
        transfer: Transfer,
        part: SpacePlan,
        make_room: Callable[[], None],
        staged: deque[_Staged],
    ) -> Span:
        """Hold a span for a part; while holding others, give those up rather than wait.

        Two threads that each held a span and waited for a second could wait for each other.
        """
        begin = time.perf_counter()

        def give_one_up() -> bool:
            if staged:
                make_room()
            return bool(staged)

        span = acquire(
            self._staging,
            part.staging_bytes,
            lambda: 0.0 if transfer.done() else transfer.left_s,
            give_one_up,
        )
        if span is None:
            transfer.check_going()
            raise Ended
        transfer.timings.staging_us += _us_since(begin)
        return span

    @ranged(lambda _, transfer, item: of_plans(_KERNELS[transfer.kind], [item.part], "objects"))
    def _launch(self, transfer: Transfer, item: _Staged) -> None:
        """Pack or unpack a part that holds its span."""
        part, packer, objects = item.part, self._packers[item.part.space], item.span.tensor
        loading = transfer.kind == "load"
        with transfer.touching_pages() as touched:
            with self.lane.work(transfer.caller) as fences:
                if not loading:
                    item.sums = self._seal.zeros(len(part.keys)) if self._seal else None
                    packer.pack(
                        item.ids,
                        objects,
                        stride_bytes=part.stride_bytes,
                        sums=item.sums,
                        backend=self._backend,
                    )
                else:
                    cut = transfer.tail is not None and part.holds_last and part.space != "state"
                    tokens, tail = transfer.tail if cut and transfer.tail else (None, "zero")
                    packer.unpack(
                        item.ids,
                        objects,
                        stride_bytes=part.stride_bytes,
                        tail_tokens=tokens,
                        tail=tail,
                        backend=self._backend,
                    )
            touched.extend(fences)
        item.fence = fences[-1]
        if self._trace is not None:
            lane = _KERNELS[transfer.kind]
            self._trace.add_fence(lane, "objects", item.fence, bytes=part.num_bytes)

    @ranged(lambda _, transfer, call, item, again: of_plans("wire", [item.part], "objects"))
    def _call(
        self,
        transfer: Transfer,
        call: Callable[..., list[ObjectResult]],
        item: _Staged,
        again: Collection[Outcome],
    ) -> list[ObjectResult]:
        """Call the store for a part, and once more for what another try may better."""
        part, begin_s = item.part, time.perf_counter()
        before_us = item.attempts.wire_us
        try:
            return item.attempts.twice(
                call, part.keys, part.addresses(item.span.address), part.sizes, again=again
            )
        finally:
            transfer.timings.wire_us += item.attempts.wire_us - before_us
            if self._trace is not None:
                self._trace.add(
                    "wire", "objects", begin_s, time.perf_counter(), bytes=part.num_bytes
                )

    def _release(self, item: _Staged) -> None:
        wait(item.fence)
        item.span.release(after_s=item.attempts.drain_s)


def count_stored(
    transfer: Transfer,
    existence: ExistenceCache,
    part: SpacePlan,
    results: Sequence[ObjectResult],
) -> int:
    """Enter what came of a part's put; return how many objects this save has stored."""
    progress, known, num_stored = transfer.progress, [], 0
    for key, result in zip(part.keys, results, strict=True):
        if result.outcome is Outcome.STORED:
            num_stored += 1
            known.append(key)
        elif result.outcome is Outcome.EXISTS:
            progress.num_existing += 1
            known.append(key)
        else:
            progress.failures[key] = reason_of(result)
    progress.num_objects += num_stored
    progress.num_bytes += num_stored * part.object_bytes
    existence.mark_stored(known)
    return num_stored


def _us_since(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e6
