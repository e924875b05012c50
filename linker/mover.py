"""The work of one direction's thread: a transfer's parts through kernels, staging and store."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import nvtx
import torch

from kvferry.errors import StagingTimeout, TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.memory import flush_gpudirect
from kvferry.linker.plan import SpacePlan
from kvferry.linker.seal import Seal, wait
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome, Store
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.transfer import Transfer

StoreCall = Callable[[list[str], list[int], list[int]], list[ObjectResult]]

RETRY_DELAY_S = 0.05
"""Before the one retry: a full store evicts in the background, every 10 ms."""

SLOW_CALL_S = 1.0
"""A failed call that took longer may have left its transfer running."""

DRAIN_S = 60.0
"""How long such a transfer can still land: Mooncake gives one 30 to 60 s."""


@dataclass
class _Staged:
    """A part in staging, the fence after its kernels, and how long a late transfer may still land.

    A store call that failed may have left work behind that reads or writes the span: a call that
    ran into the transport's own time limit returns while its transfer goes on.
    """

    part: SpacePlan
    span: Span
    fence: Fence
    sums: torch.Tensor | None = None
    drain_s: float = 0.0


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
        part_bytes: int,
        backend: str,
        *,
        integrity: bool,
    ) -> None:
        self._store = store
        self._staging = staging
        self._packers = packers
        self._existence = existence
        self._part_bytes = part_bytes
        self._backend = backend
        layout = next(iter(packers.values())).layout
        assert layout.device is not None
        self.lane = Lane(layout.device)
        self._seal = Seal(layout, self.lane, backend) if integrity else None

    def move(self, transfer: Transfer) -> None:
        """Carry out a transfer and end its handle.

        Raises:
            Ended: it was given up meanwhile.
            KVFerryError: it failed; the caller ends the handle.
        """
        staged: deque[_Staged] = deque()
        with nvtx.annotate(transfer.kind, domain="kvferry"):
            try:
                if transfer.kind == "save":
                    self._save(transfer, staged)
                else:
                    self._load(transfer, staged)
            finally:
                while staged:
                    self._release(staged.popleft())
        transfer.finish()

    def _save(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        for plan in transfer.plans:
            begin = time.perf_counter()
            exists = self._store.exists(plan.keys)
            transfer.timings.lookup_us += _us_since(begin)
            transfer.progress.num_existing += sum(exists)
            missing = plan.select([not there for there in exists])
            for part in missing.parts(self._part_bytes):
                span = self._span(transfer, part, lambda: self._put(transfer, staged), staged)
                staged.append(_Staged(part, span, Fence()))
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
            self._seal.write(item.part, item.span, item.sums)
            transfer.timings.seal_us += _us_since(begin)
        begin = time.perf_counter()
        put = partial(self._store.put, absent=True)  # `_save` has just asked
        results = self._twice(put, item, (Outcome.NO_SPACE, Outcome.FAILED))
        transfer.timings.wire_us += _us_since(begin)
        progress, stored = transfer.progress, []
        for key, result in zip(item.part.keys, results, strict=True):
            if result.outcome is Outcome.STORED:
                progress.num_objects += 1
                progress.num_bytes += item.part.object_bytes
                stored.append(key)
            elif result.outcome is Outcome.EXISTS:
                progress.num_existing += 1
                stored.append(key)
            else:
                progress.failures[key] = _reason(result)
        self._existence.mark_stored(stored)
        self._release(staged.popleft())

    def _load(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        for plan in transfer.plans:
            for part in plan.parts(self._part_bytes):
                span = self._span(transfer, part, lambda: self._retire(transfer, staged), staged)
                staged.append(_Staged(part, span, Fence()))
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
            self._existence.mark_failed(causes)
            first = next(iter(causes))
            raise TransferFailed(
                f"load failed: {len(causes)} of {len(item.part.keys)} objects could not be had, "
                f"the first {first}: {causes[first]}",
                causes,
            )

    def _fetch(self, transfer: Transfer, item: _Staged) -> dict[str, str]:
        transfer.check_going()
        begin = time.perf_counter()
        again = (Outcome.MISSING, Outcome.LEASE_EXPIRED, Outcome.FAILED)
        results = self._twice(self._store.get, item, again)
        transfer.timings.wire_us += _us_since(begin)
        return {
            key: _reason(result)
            for key, result in zip(item.part.keys, results, strict=True)
            if result.outcome is not Outcome.FETCHED
        }

    def _verify(self, transfer: Transfer, item: _Staged) -> dict[str, str]:
        if self._staging.memory == "device":
            flush_gpudirect(self._staging.tensor.device)
        if self._seal is None:
            return {}
        begin = time.perf_counter()
        faults = self._seal.verify(item.part, item.span)
        transfer.timings.seal_us += _us_since(begin)
        return faults

    def _retire(self, transfer: Transfer, staged: deque[_Staged]) -> None:
        """Wait for the oldest part's unpack and let its span go."""
        item = staged[0]
        wait(item.fence)
        transfer.timings.unpack_us += item.fence.device_us or 0.0
        self._release(staged.popleft())

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
        while True:
            transfer.check_going()
            try:
                wait_s = 0.0 if staged else transfer.left_s
                span = self._staging.acquire(part.staging_bytes, wait_s)
            except StagingTimeout:
                if not staged:
                    raise
                make_room()
            else:
                transfer.timings.staging_us += _us_since(begin)
                return span

    def _launch(self, transfer: Transfer, item: _Staged) -> None:
        """Pack or unpack a part that holds its span."""
        part, packer, objects = item.part, self._packers[item.part.space], item.span.tensor
        loading = transfer.kind == "load"
        with transfer.touching_pages() as touched:
            with self.lane.work(transfer.caller) as fences:
                ids = PageIds.upload(packer.layout, part.page_ids, unique=loading)
                if not loading:
                    item.sums = self._seal.zeros(part) if self._seal else None
                    packer.pack(
                        ids,
                        objects,
                        stride_bytes=part.stride_bytes,
                        sums=item.sums,
                        backend=self._backend,
                    )
                else:
                    cut = transfer.tail is not None and part.holds_last and part.space != "state"
                    tokens, tail = transfer.tail if cut and transfer.tail else (None, "zero")
                    packer.unpack(
                        ids,
                        objects,
                        stride_bytes=part.stride_bytes,
                        tail_tokens=tokens,
                        tail=tail,
                        backend=self._backend,
                    )
            touched.extend(fences)
        item.fence = fences[-1]

    def _twice(
        self,
        call: StoreCall,
        item: _Staged,
        worth_again: tuple[Outcome, ...],
    ) -> list[ObjectResult]:
        """Call the store for a part, and once more for the objects that another try may help."""
        part = item.part
        addresses, sizes = part.addresses(item.span.address), part.sizes
        results = self._timed(call, item, part.keys, addresses, sizes)
        again = [i for i, result in enumerate(results) if result.outcome in worth_again]
        if again and item.drain_s == 0:
            time.sleep(RETRY_DELAY_S)
            fresh = self._timed(
                call,
                item,
                [part.keys[i] for i in again],
                [addresses[i] for i in again],
                [sizes[i] for i in again],
            )
            for i, result in zip(again, fresh, strict=True):
                results[i] = result
        return results

    @staticmethod
    def _timed(
        call: StoreCall, item: _Staged, keys: list[str], addresses: list[int], sizes: list[int]
    ) -> list[ObjectResult]:
        begin = time.monotonic()
        failed = True
        try:
            results = call(keys, addresses, sizes)
            failed = any(result.outcome is Outcome.FAILED for result in results)
        finally:
            if failed and time.monotonic() - begin > SLOW_CALL_S:
                item.drain_s = DRAIN_S
        return results

    def _release(self, item: _Staged) -> None:
        wait(item.fence)
        item.span.release(after_s=item.drain_s)


def _reason(result: ObjectResult) -> str:
    name = f" ({result.code_name})" if result.code_name else ""
    return result.outcome.value + name


def _us_since(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e6
