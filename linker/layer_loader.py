"""The work of the layer-wise loads' thread: layer groups through store, staging and kernels."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from functools import partial

from kvferry.errors import StoreClosed, StoreError, StoreUnavailable, TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.linker.attempts import Attempts, reason_of
from kvferry.linker.layer_batch import Batch
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.layer_plan import GroupPart, cut
from kvferry.linker.layer_staging import StagedPart, acquire
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.memory import flush_gpudirect
from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import of_part, of_plans, of_rows, ranged
from kvferry.linker.seal import Checked, Seal, wait
from kvferry.linker.shared_reads import SharedLoad, SharedReads
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.store import FETCHED, GetSession, ObjectResult, Outcome, Store, all_are
from kvferry.linker.streams import Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended
from kvferry.linker.wire import Wire


class LayerLoader:
    """Carries out layer-wise loads, one batch at a time, in the thread that calls it.

    Wire threads fetch a few parts ahead; this thread unpacks what has come, raises the counters of
    the groups that are complete, and at the end verifies every object. A key that cannot be read by
    ranges is fetched whole, once: that is also the one retry that a load has.

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
        fetch_ahead: int,
        backend: str,
        trace: Trace | None,
        sharing: SharedReads | None = None,
    ) -> None:
        self.lane = lane
        self._store = store
        self._staging = staging
        self._packers = packers
        self._existence = existence
        self._wire = wire
        self._part_bytes = part_bytes
        self._fetch_ahead = fetch_ahead
        # Two for each thread, so that one is unpacked while the next is on the wire.
        self._first_parts = 1 if sharing is not None else 2 * wire.num_threads
        self._backend = backend
        self._trace = trace
        self._layout = next(iter(packers.values())).layout
        self._seal = seal
        self._sharing = sharing

    def move(self, load: LayerLoad) -> None:
        """Carry out a load and end its handles.

        Raises:
            Ended: all of its requests were given up meanwhile.
            KVFerryError: it failed; the caller ends the handles.
        """
        if self._sharing is None or load.number is None:
            _Run(self, load, self._store).carry_out()
            return
        with self._sharing.begin(load.number, self._store, lambda: load.going) as store:
            _Run(self, load, store).carry_out()


class _Run:
    """One load being carried out."""

    def __init__(self, loader: LayerLoader, load: LayerLoad, store: Store | SharedLoad) -> None:
        self._loader = loader
        self._load = load
        self._store = store
        self._batch = Batch(
            load, loader._packers, loader._seal, loader.lane, loader._backend, loader._trace
        )
        self._fetching: deque[StagedPart] = deque()  # handed to the wire, in order
        self._landing: deque[StagedPart] = deque()  # unpack launched
        self._parts_left = [0] * len(load.groups)
        self._next_group = 0
        self._session: GetSession | None = None
        self._causes: dict[str, str] = {}  # objects that cannot be had, not told yet

    @ranged(lambda run: of_rows("load", run._load.rows))
    def carry_out(self) -> None:
        """Do everything, and let go of everything."""
        load, loader = self._load, self._loader
        parts = list(
            cut(
                loader._layout,
                load.rows,
                load.groups,
                loader._part_bytes,
                first_parts=loader._first_parts,
            )
        )
        self._parts_left = [len(of_group) for of_group in parts]
        try:
            self._open()
            for part in (part for of_group in parts for part in of_group):
                self._fetch(part)
                ahead = loader._fetch_ahead if part.group else loader._first_parts
                while len(self._fetching) > ahead or self._is_first_there():
                    self._land()
            too_long = self._too_long()  # while the last parts are on the wire
            while self._fetching:
                self._land()
            while self._batch.lacking:
                self._rescue()
            self._tell_causes()
            self._signal()
            while self._landing:
                self._retire()
            begin_s = time.perf_counter()
            faults = too_long | self._batch.faults()
            load.timings.seal_us += _us_since(begin_s)
            if faults:
                self._fail_rows(faults)
            self._batch.finish()
        finally:
            with contextlib.ExitStack() as rest:  # all of it, whatever one of them raises
                if self._session is not None:
                    rest.callback(self._session.close)
                for item in (*self._fetching, *self._landing):
                    rest.callback(item.release)

    def _open(self) -> None:
        """Hold the objects readable; what cannot be held so is fetched whole."""
        batch = self._batch
        try:
            self._session = self._store.get_session(batch.keys)
        except (StoreUnavailable, StoreClosed):
            raise
        except StoreError:  # this Mooncake has no sessions, or refused this one
            batch.lack(batch.keys)
            return
        results = self._session.start_results()
        if not all_are(results, FETCHED):
            batch.lack(
                {
                    key
                    for key, result in zip(batch.keys, results, strict=True)
                    if result.outcome is not Outcome.FETCHED
                }
            )

    def _too_long(self) -> dict[str, str]:
        """Return what has more bytes than its object should: object key to reason.

        Ranges do not tell: they read what belongs to the object, and that may be right.
        """
        if self._session is None:
            return {}
        plans = [rows.plan for rows in self._load.rows.values()]
        sizes = {key: plan.size_bytes for plan in plans for key in plan.keys}
        longer = self._session.longer(list(sizes), list(sizes.values()))
        reason = reason_of(ObjectResult(Outcome.WRONG_SIZE))
        return {key: reason for key, is_longer in zip(sizes, longer, strict=True) if is_longer}

    def _fetch(self, part: GroupPart) -> None:
        """Hand a part to the wire, unless none of its rows is wanted that way any more."""
        rows = self._batch.open_rows(part)
        if not any(rows):
            self._done_with(part)
            return
        if part.group > 0 == self._next_group:
            self._let_first_pass()
        begin_s = time.perf_counter()
        span = self._acquire(part.staging_bytes)
        self._load.timings.staging_us += _us_since(begin_s)
        item = StagedPart(part, span, rows=rows)  # some may be closed by now: unpacking looks again
        self._fetching.append(item)
        item.call = self._loader._wire.call(partial(self._read, item))

    def _let_first_pass(self) -> None:
        """Hand the first group over before another is fetched: it is what a step waits for."""
        while self._fetching and self._fetching[0].part.group == 0:
            self._land()

    def _is_first_there(self) -> bool:
        """Whether the first group waits to be unpacked: a step waits for it, the wire does not."""
        if self._next_group or not self._fetching:
            return False
        item = self._fetching[0]
        return item.part.group == 0 and item.call is not None and item.call.done()

    @ranged(lambda _, item: of_part("wire", item.part, item.rows))
    def _read(self, item: StagedPart) -> list[ObjectResult]:
        """Fetch the open rows' ranges of a part; in a wire thread."""
        assert self._session is not None
        part, begin_s = item.part, time.perf_counter()
        keys, addresses, sizes, offsets = [], [], [], []
        for piece, wanted in zip(part.pieces, item.rows, strict=True):
            plan_keys = self._load.rows[piece.space].plan.keys
            base = piece.addresses(item.span.address)
            if len(wanted) == piece.num_rows:
                keys += plan_keys[piece.first_row : piece.end_row]
                addresses += base
            else:
                keys += [plan_keys[row] for row in wanted]
                addresses += [base[row - piece.first_row] for row in wanted]
            sizes += [piece.range_bytes] * len(wanted)
            offsets += [piece.origin_bytes] * len(wanted)
        try:
            # No second try by ranges: that is what the whole object is for.
            return item.attempts.twice(
                self._session.read, keys, addresses, sizes, offsets, again=()
            )
        finally:
            if self._loader._trace is not None:
                self._loader._trace.add(
                    "wire", part.name, begin_s, time.perf_counter(), bytes=sum(sizes)
                )

    def _land(self) -> None:
        """Unpack the oldest part that is on the wire, once it is there."""
        self._check_going()
        item = self._fetching[0]
        assert item.call is not None
        if not item.call.done():
            item.call.exception()
            self._check_going()
        results = item.call.result()
        self._load.timings.wire_us += item.attempts.wire_us
        self._flush()
        item.fence = self._batch.unpack(item.part, item.rows, item.span, results)
        self._landing.append(self._fetching.popleft())
        self._done_with(item.part)
        while self._landing and self._landing[0].fence.is_passed():
            self._retire()
        # Where reads are shared, later: in an order that does not depend on how threads take turns.
        if self._batch.lacking and self._store is self._loader._store:
            while self._rescue(waits=False) and self._causes:  # all that fail, to be told together
                pass
        self._signal()

    def _retire(self) -> None:
        """Give the oldest unpacked part's span back, once its unpack is through."""
        item = self._landing[0]
        wait(item.fence)
        self._load.timings.unpack_us += item.fence.device_us or 0.0
        item.release()
        self._landing.popleft()

    def _done_with(self, part: GroupPart) -> None:
        self._parts_left[part.group] -= 1

    def _signal(self) -> None:
        """Raise the counters of every group that is there, in order."""
        load = self._load
        assert load.step is not None
        taken = load.counter_set
        while self._next_group < len(load.groups):
            first, end = load.groups[self._next_group]
            is_there = not self._parts_left[self._next_group] and not self._causes
            if not is_there or self._batch.lacks_before(end):
                return
            with self._loader.lane.work(load.behind) as fences:
                taken.counters.signal(load.step, first, end)
            if taken.events is not None:
                taken.events.enqueued(load.step, first, end, fences[-1])
            self._next_group += 1
        load.complete = True

    def _rescue(self, *, waits: bool = True) -> bool:
        """Fetch the objects whole that could not be read by ranges, as many as fit; if any."""
        plan, rows = self._batch.next_lacking(self._loader._part_bytes)
        if plan is None:
            return False
        span = self._acquire(plan.staging_bytes) if waits else self._try_acquire(plan.staging_bytes)
        if span is None:
            return False
        attempts = Attempts()
        try:
            checked, causes = self._fetch_whole(plan, span, attempts)
            self._causes |= causes
            wait(self._batch.unpack_whole(plan, rows, span, checked, causes))
        finally:
            self._load.timings.wire_us += attempts.wire_us
            span.release(after_s=attempts.drain_s)
        if attempts.drain_s or not self._batch.lacking:  # a slow failure would be slow again
            self._tell_causes()
        return True

    @ranged(lambda _, plan, span, attempts: of_plans("wire", [plan], "objects"))
    def _fetch_whole(
        self, plan: SpacePlan, span: Span, attempts: Attempts
    ) -> tuple[Checked | None, dict[str, str]]:
        """Return what verifying found, and why objects cannot be had."""
        self._check_going()
        results = attempts.twice(
            self._store.get, plan.keys, plan.addresses(span.address), plan.sizes, again=()
        )
        causes = {
            key: reason_of(result)
            for key, result in zip(plan.keys, results, strict=True)
            if result.outcome is not Outcome.FETCHED
        }
        self._flush()
        if self._loader._seal is None:
            return None, causes
        checked = self._loader._seal.verify(plan, span)
        return checked, {**checked.faults, **causes}

    def _tell_causes(self) -> None:
        """Fail the requests whose objects could not be had, each with all of its causes."""
        causes, self._causes = self._causes, {}
        if causes:
            self._fail_rows(causes)

    def _fail_rows(self, causes: dict[str, str]) -> None:
        """Fail the requests that need objects which cannot be had."""
        self._loader._existence.mark_faults(causes)
        self._batch.fail(causes)
        self._check_going()

    def _check_going(self) -> None:
        """Go on only while a request may come to a good end.

        Raises:
            Ended: none may.
        """
        load = self._load
        if load.step is not None and load.step.cause is not None:
            load.fail(TransferFailed(f"load failed: {load.step.cause}", cause="deadline"))
        if load.done():
            raise Ended

    def _left_s(self) -> float:
        load = self._load
        if not load.going:
            return 0.0
        return max(transfer.left_s for transfer in load.transfers if not transfer.is_over)

    def _acquire(self, num_bytes: int) -> Span:
        span = acquire(self._loader._staging, num_bytes, self._left_s, self._make_room)
        if span is None:
            self._check_going()
            raise Ended
        return span

    def _try_acquire(self, num_bytes: int) -> Span | None:
        with contextlib.suppress(TimeoutError):
            return self._loader._staging.acquire(num_bytes, 0.0)
        return None

    def _make_room(self) -> bool:
        if self._landing:
            self._retire()
        elif self._fetching:
            self._land()
        else:
            return False
        return True

    def _flush(self) -> None:
        if self._loader._staging.memory == "device":
            flush_gpudirect(self._loader._staging.tensor.device)


def _us_since(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1e6
