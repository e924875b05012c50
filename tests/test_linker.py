"""Save, lookup and load through a real Mooncake store; faults injected where it can't show them."""

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from linker_bed import HYBRID, Bed, ids, keys

from kvferry.errors import ArgumentError, StoreUnavailable, TransferFailed
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.eviction import evict
from kvferry.linker.linker import Linker
from kvferry.linker.plan import stride_bytes
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome
from kvferry.linker.streams import Fence
from kvferry.linker.transfer import Ended, Transfer
from kvferry.pools import PoolTensors
from kvferry.testing import check_poison, check_telling, make_tensors, write_telling

pytestmark = pytest.mark.mooncake


def test_saved_pages_come_back_byte_for_byte(bed: Bed) -> None:
    linker = bed.linker()
    assert linker.lookup(keys(8)) == []
    saved = linker.save(keys(8), bed.fill(0, 8)).result()
    assert saved.num_objects == 24
    assert saved.num_bytes == 8 * sum(bed.layout.object_bytes.values())
    assert (saved.num_existing, saved.failures) == (0, {})
    assert linker.lookup(keys(8)) == list(range(1, 9))
    loaded = linker.load(keys(8), ids(bed, 32, 8)).result()
    assert loaded.num_objects == 24
    assert loaded.num_bytes == saved.num_bytes
    bed.check(32, range(8))
    bed.check(0, range(8))
    for space in bed.layout.spaces:
        check_poison(bed.layout, space, [*range(8), *range(32, 40)])
    for one in (saved, loaded):
        assert one.timings.wire_us > 0
        assert one.timings.total_us >= one.timings.wire_us
    assert saved.timings.pack_us > 0
    assert loaded.timings.unpack_us > 0


def test_transfers_larger_than_staging_stream_through_it(bed: Bed) -> None:
    smallest = max(stride_bytes(bed.layout, space, trailer=True) for space in bed.layout.spaces)
    linker = bed.linker(staging_bytes=smallest)
    linker.save(keys(30), bed.fill(0, 30)).result()
    assert max(size for name, size in bed.store.calls if name == "put") < 30
    linker.load(keys(30), ids(bed, 32, 30)).result()
    bed.check(32, range(30))


@pytest.mark.parametrize(("part_pages", "num_parts"), [(None, 4), (4, 6), (1000, 1)])
def test_a_part_is_a_quarter_of_staging_unless_told(
    bed: Bed, part_pages: int | None, num_parts: int
) -> None:
    stride = stride_bytes(bed.layout, "full", trailer=True)
    part_bytes = None if part_pages is None else part_pages * stride
    linker = bed.linker(staging_bytes=24 * stride, part_bytes=part_bytes)
    pages = {"full": bed.fill(0, 24)["full"]}
    bed.store.calls.clear()
    linker.save(keys(24), pages).result()
    assert [size for name, size in bed.store.calls if name == "put"] == [
        24 // num_parts
    ] * num_parts


def test_staging_that_cannot_hold_an_object_is_refused(bed: Bed) -> None:
    with pytest.raises(ArgumentError, match=r"staging has 512 bytes, wanted at least 6336.*full"):
        bed.linker(staging_bytes=512)


def test_only_what_is_missing_is_written(bed: Bed) -> None:
    linker = bed.linker()
    linker.save(keys(4), {"full": bed.fill(0, 8)["full"][:4]}).result()
    bed.store.calls.clear()
    again = linker.save(keys(6), {"full": list(range(6))}).result()
    assert (again.num_objects, again.num_existing) == (2, 4)
    assert [size for name, size in bed.store.calls if name == "put"] == [2]


def test_lookup_is_sparse_over_spaces(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 6)
    page_ids = {
        "full": [0, 1, 2, 3, 4, -1],
        "swa": [-1, 1, 2, 3, 4, 5],  # a window of two pages
        "state": [-1, -1, 2, -1, 4, 5],
    }
    saved = linker.save(keys(6), page_ids).result()
    assert saved.num_objects == 5 + 5 + 3
    assert linker.lookup(keys(6)) == [3, 5]
    assert linker.lookup(keys(4)) == [3]
    assert linker.lookup([]) == []
    # What a prefix of three pages needs, into other pages.
    linker.load(
        keys(3), {"full": [40, 41, 42], "swa": [-1, 41, 42], "state": [-1, -1, 42]}
    ).result()
    check_telling(bed.layout, "full", [40, 41, 42], [0, 1, 2])
    check_telling(bed.layout, "swa", [41, 42], [1, 2])
    check_telling(bed.layout, "state", [42], [2])
    check_poison(bed.layout, "state", [*range(6), 42])


def test_lookups_are_remembered_and_ask_in_one_call(bed: Bed) -> None:
    linker = bed.linker(lookup_ttl_s=0.5)
    linker.save(keys(4), bed.fill(0, 4)).result()
    bed.store.calls.clear()
    for _ in range(50):
        assert linker.lookup(keys(4)) == [1, 2, 3, 4]
    assert bed.store.calls == []  # the save itself told
    assert linker.lookup(keys(5)) == [1, 2, 3, 4]
    assert bed.store.calls == [("exists", 3)]
    time.sleep(0.6)
    evict(bed.store.store, linker.keys.object_keys(["page-2"], "full"))
    assert linker.lookup(keys(4)) == [1, 2]


def test_a_load_that_misses_an_object_fails_whole_and_is_remembered(bed: Bed) -> None:
    linker = bed.linker(miss_ttl_s=0.6)
    linker.save(keys(4), bed.fill(0, 4)).result()
    (gone,) = linker.keys.object_keys(["page-1"], "swa")
    evict(bed.store.store, [gone])
    bed.store.calls.clear()
    load = linker.load(keys(4), ids(bed, 32, 4))
    with pytest.raises(TransferFailed, match="1 of 4 objects") as caught:
        load.result()
    assert caught.value.causes == {gone: "missing (OBJECT_NOT_FOUND)"}
    assert load.done()
    assert [size for name, size in bed.store.calls if name == "get"] == [4, 4, 1]  # one retry
    check_poison(bed.layout, "swa", range(4))
    linker.save(keys(4), ids(bed, 0, 4)).result()
    linker.load(keys(4), ids(bed, 32, 4)).result()
    bed.check(32, range(4))


def test_a_failed_key_counts_as_missing_for_a_while(bed: Bed) -> None:
    linker = bed.linker(miss_ttl_s=0.6)
    linker.save(keys(3), bed.fill(0, 3)).result()
    answers = iter([[ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")] * 3] * 2)
    bed.store.before["get"] = lambda *_: next(answers, None)
    with pytest.raises(TransferFailed, match=r"failed \(TRANSFER_FAIL\)"):
        linker.load(keys(3), {"full": [32, 33, 34]}, partial=True).result()
    assert linker.lookup(keys(3)) == []
    time.sleep(0.7)
    assert linker.lookup(keys(3)) == [1, 2, 3]


def test_one_failure_is_tried_again(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 3)
    for name, outcome in (("put", Outcome.NO_SPACE), ("get", Outcome.LEASE_EXPIRED)):
        turns = itertools.count()

        def once(
            names: Sequence[str],
            *_: Any,
            turns: Iterator[int] = turns,
            outcome: Outcome = outcome,
        ) -> list[ObjectResult] | None:
            return [ObjectResult(outcome)] * len(names) if next(turns) == 0 else None

        bed.store.before[name] = once
    saved = linker.save(keys(3), {"full": [0, 1, 2]}).result()
    assert saved.num_objects == 3
    linker.load(keys(3), {"full": [40, 41, 42]}, partial=True).result()
    check_telling(bed.layout, "full", [40, 41, 42], [0, 1, 2])
    assert [name for name, _ in bed.store.calls] == ["exists", "put", "put", "get", "get"]


def test_an_object_of_another_size_never_reaches_the_pools(bed: Bed) -> None:
    linker = bed.linker()
    linker.save(keys(3), bed.fill(0, 3)).result()
    (victim,) = linker.keys.object_keys(["page-1"], "full")
    evict(bed.store.store, [victim])
    staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
    staging.register(bed.store.store)
    for num_bytes in (bed.layout.object_bytes["full"] - 16, bed.layout.object_bytes["full"] + 16):
        results = bed.store.store.put([victim], [staging.address], [num_bytes])
        assert results[0].outcome is Outcome.STORED
        with pytest.raises(TransferFailed) as caught:
            linker.load(keys(3), {"full": [32, 33, 34]}, partial=True).result()
        assert caught.value.causes[victim].startswith("wrong size")
        check_poison(bed.layout, "full", range(3))
        evict(bed.store.store, [victim])
    staging.unregister()


def test_tokens_first_and_heads_first_are_never_mixed_up(bed: Bed) -> None:
    """Pages of equal shape that mean other things: neither finds what the other has stored."""
    shape, tensors = (6, 8, 8, 16), []

    def linker(token_axis: int) -> Linker:
        tensors.append(torch.zeros(shape, dtype=torch.bfloat16, device=bed.layout.device))
        pool = PoolTensors("k", "full", "page", {0: tensors[-1]}, token_axis=token_axis)
        layout = CacheLayout.from_tensors([pool], page_size=8, num_layers=1)
        return bed.linker(layout=layout, namespace=namespace)

    namespace = f"axes-{time.monotonic_ns()}"
    tokens_first, heads_first = linker(0), linker(1)
    tensors[0].copy_(torch.arange(math.prod(shape)).view(shape) % 251)
    assert tokens_first.save(keys(2), [0, 1]).result().num_objects == 2
    assert tokens_first.lookup(keys(2)) == [1, 2]
    assert heads_first.lookup(keys(2)) == []
    with pytest.raises(TransferFailed) as caught:
        heads_first.load(keys(2), [2, 3]).result()
    assert caught.value.cause == "missing"
    assert not tensors[1].any()


def test_stages_that_are_cut_in_other_places_never_meet(bed: Bed) -> None:
    """Rank 1 of 3 with layers 20..39, and with 21..40: as many layers, but not the same ones."""
    namespace, linkers = f"stages-{time.monotonic_ns()}", []
    for first in (20, 21):
        identity = ModelIdentity("m", pp=(1, 3), layers=(first, first + 20))
        plain = CacheLayout.from_description(HYBRID, identity=identity)
        layout = plain.bind(make_tensors(plain, 4, bed.layout.device or "cpu"))
        linkers.append(bed.linker(layout=layout, namespace=namespace))
    one, other = linkers
    pages = {space: [0, 1] for space in one.layout.spaces}
    for space in one.layout.spaces:
        write_telling(one.layout, space, [0, 1], [0, 1])
    assert one.save(keys(2), pages).result().num_objects == 2 * len(pages)
    assert one.lookup(keys(2)) == [1, 2]
    assert other.lookup(keys(2)) == []
    with pytest.raises(TransferFailed):
        other.load(keys(2), pages).result()
    for space in other.layout.spaces:
        check_poison(other.layout, space, [])


def test_many_transfers_at_once_from_many_threads(bed: Bed) -> None:
    smallest = max(stride_bytes(bed.layout, space, trailer=True) for space in bed.layout.spaces)
    linker = bed.linker(staging_bytes=3 * smallest)
    bed.fill(0, 32)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine = [f"{number}-{page}" for page in range(4)]
            sources, targets = (
                range(4 * number, 4 * number + 4),
                range(32 + 4 * number, 36 + 4 * number),
            )
            for turn in range(3):
                names = [f"{key}-{turn}" for key in mine]
                linker.save(names, {key: list(sources) for key in bed.layout.spaces}).result()
                linker.load(names, {key: list(targets) for key in bed.layout.spaces}).result()
                for space in bed.layout.spaces:
                    check_telling(bed.layout, space, list(targets), list(sources))
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert faults == []


def test_several_in_flight_end_in_order(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 16)
    saves = [linker.save([f"p{page}"], {"full": [page]}) for page in range(16)]
    saves[-1].result()
    assert all(save.done() for save in saves)
    loads = [linker.load([f"p{page}"], {"full": [32 + page]}, partial=True) for page in range(16)]
    loads[-1].result()
    assert all(load.done() for load in loads)
    check_telling(bed.layout, "full", list(range(32, 48)), list(range(16)))


def test_past_its_deadline_a_transfer_fails_and_touches_no_page(bed: Bed) -> None:
    linker = bed.linker(transfer_timeout_s=0.3)
    linker.save(keys(2), bed.fill(0, 2)).result()
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        entered.set()
        assert leave.wait(20)

    bed.store.before["get"] = hang
    load = linker.load(keys(2), ids(bed, 32, 2))
    assert entered.wait(5)
    with pytest.raises(TimeoutError, match=r"load still in flight after 0\.05 s"):
        load.result(0.05)
    assert "in flight" in repr(load)
    begin = time.monotonic()
    with pytest.raises(TransferFailed, match=r"load not done within 0\.3 s"):
        load.result()
    assert time.monotonic() - begin < 5
    leave.set()
    bed.store.before.clear()
    # A later load runs behind it; by then the late one would have unpacked.
    linker.load(keys(1), {"full": [40]}, partial=True).result()
    check_poison(bed.layout, "full", [0, 1, 40])
    check_poison(bed.layout, "state", [0, 1])
    assert "failed" in repr(load)


def test_a_cancelled_transfer_touches_no_page(bed: Bed) -> None:
    linker = bed.linker()
    linker.save(keys(2), bed.fill(0, 2)).result()
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        entered.set()
        assert leave.wait(20)

    bed.store.before["get"] = hang
    running = linker.load(keys(1), {"full": [32]}, partial=True)
    queued = linker.load(keys(2)[1:], {"full": [33]}, partial=True)
    assert entered.wait(5)
    assert queued.cancel()
    assert running.cancel()
    assert not running.cancel()
    leave.set()
    bed.store.before.clear()
    for load in (running, queued):
        with pytest.raises(TransferFailed, match="load was cancelled"):
            load.result()
    linker.load(keys(1), {"full": [40]}, partial=True).result()
    check_poison(bed.layout, "full", [0, 1, 40])


def test_pages_are_free_once_packed_even_while_the_wire_is_busy(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 2)
    leave = threading.Event()
    bed.store.before["put"] = lambda *_: leave.wait(20) and None
    save = linker.save(keys(2), {"full": [0, 1]})
    assert save.wait_packed(10)
    assert not save.done()
    write_telling(bed.layout, "full", [0, 1], [50, 51])
    leave.set()
    save.result()
    linker.load(keys(2), {"full": [32, 33]}, partial=True).result()
    check_telling(bed.layout, "full", [32, 33], [0, 1])


def test_an_outage_is_a_miss_for_lookups_and_a_failure_for_transfers(bed: Bed) -> None:
    linker = bed.linker()
    linker.save(keys(2), bed.fill(0, 2)).result()

    def down(*_: Any) -> None:
        raise StoreUnavailable("master 10.0.0.1:50051 cannot be reached", code=-900)

    bed.store.before.update(exists=down, put=down, get=down)
    assert linker.lookup(keys(2)) == []
    for transfer in (
        linker.save(["x"], {"full": [0]}),
        linker.load(keys(1), {"full": [32]}, partial=True),
    ):
        with pytest.raises(TransferFailed, match=r"10\.0\.0\.1:50051 cannot be reached"):
            transfer.result()
    bed.store.before.clear()
    assert linker.lookup(keys(2)) == [1, 2]
    linker.load(keys(2), ids(bed, 32, 2)).result()
    bed.check(32, range(2))


def test_what_is_remembered_counts_for_nothing_during_an_outage(bed: Bed) -> None:
    linker = bed.linker(lookup_ttl_s=60.0)
    linker.save(keys(2), bed.fill(0, 2)).result()
    assert linker.lookup(keys(2)) == [1, 2]
    bed.store.available = False
    assert linker.lookup(keys(2)) == []
    bed.store.available = True
    assert linker.lookup(keys(2)) == [1, 2]


def test_pages_that_are_not_trusted_are_missing_until_written_anew(bed: Bed) -> None:
    linker = bed.linker()
    linker.save(keys(3), bed.fill(0, 3)).result()
    linker.distrust(keys(3)[2:])
    assert linker.lookup(keys(3)) == [1, 2]
    for space in bed.layout.spaces:
        evict(bed.store, linker.keys.object_keys(keys(3)[2:], space))
    linker.save(keys(3), ids(bed, 0, 3)).result()
    assert linker.lookup(keys(3)) == [1, 2, 3]


def test_a_bug_in_the_worker_fails_one_transfer_and_not_the_next(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    linker = bed.linker()
    bed.fill(0, 2)
    bed.store.before["put"] = lambda *_: 1 // 0
    with pytest.raises(TransferFailed, match="ZeroDivisionError"):
        linker.save(keys(2), {"full": [0, 1]}).result()
    assert "failed unexpectedly" in caplog.text
    bed.store.before.clear()
    assert linker.save(keys(2), {"full": [0, 1]}).result().num_objects == 2


def test_what_could_not_be_stored_is_told_by_object(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 2)
    bed.store.before["put"] = lambda names, *_: (
        [ObjectResult(Outcome.NO_SPACE, "NO_AVAILABLE_HANDLE")] * len(names)
    )
    saved = linker.save(keys(2), {"full": [0, 1]}).result()
    assert saved.num_objects == 0
    assert set(saved.failures.values()) == {"no space (NO_AVAILABLE_HANDLE)"}
    assert set(saved.failures) == set(linker.keys.object_keys(keys(2), "full"))


def test_the_span_of_a_slow_failed_call_is_kept_back(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.linker import patience

    monkeypatch.setattr(patience, "SLOW_S", 0.05)
    monkeypatch.setattr(patience, "DRAIN_S", 1.0)
    linker = bed.linker(staging_bytes=1 << 16, transfer_timeout_s=5)
    linker.save(keys(2), bed.fill(0, 2)).result()
    staging = linker._staging

    def slow(names: Sequence[str], *_: Any) -> list[ObjectResult]:
        time.sleep(0.1)
        return [ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")] * len(names)

    bed.store.before["get"] = slow
    with pytest.raises(TransferFailed):
        linker.load(keys(2), {"full": [32, 33]}, partial=True).result()
    assert staging.num_free_bytes < staging.num_bytes
    assert bed.store.calls.count(("get", 2)) == 1  # no second try on top of a late transfer
    bed.store.before.clear()
    time.sleep(1.1)
    staging.acquire(staging.num_bytes, 0).release()


def test_close_finishes_what_was_enqueued(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 8)
    saves = [linker.save([f"p{page}"], {"full": [page]}) for page in range(8)]
    linker.close(30)
    assert all(save.result().num_objects == 1 for save in saves)
    linker.close(30)
    for call in (linker.save, linker.load):
        with pytest.raises(TransferFailed, match="the linker is closed"):
            call(keys(1), ids(bed, 0, 1))
    assert not [one.name for one in linker._crew.workers if one.is_alive]
    # The registration is gone: the same memory can be registered again.
    linker._staging.register(bed.store.store)
    linker._staging.unregister()


def test_close_has_a_bound(bed: Bed) -> None:
    linker = bed.linker()
    bed.fill(0, 2)
    leave = threading.Event()
    bed.store.before["put"] = lambda *_: leave.wait(20) and None
    first = linker.save(keys(1), {"full": [0]})
    second = linker.save(["q"], {"full": [1]})
    with pytest.raises(TransferFailed, match=r"kvferry-save still at work 0\.2 s after close"):
        linker.close(0.2)
    for save in (first, second):
        with pytest.raises(TransferFailed, match="the linker was closed"):
            save.result()
    leave.set()
    linker.close(10)


def test_too_many_waiting_transfers_are_refused(bed: Bed) -> None:
    linker = bed.linker(max_queued=2)
    bed.fill(0, 4)
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        entered.set()
        assert leave.wait(20)

    bed.store.before["put"] = hang
    saves = [linker.save(["p0"], {"full": [0]})]
    assert entered.wait(5)
    saves += [linker.save([f"p{page}"], {"full": [page]}) for page in (1, 2)]
    with pytest.raises(TransferFailed, match="2 transfers wait already"):
        linker.save(["p3"], {"full": [3]})
    leave.set()
    for save in saves:
        save.result()


def test_nothing_to_do_is_done(bed: Bed) -> None:
    linker = bed.linker()
    assert linker.save([], {}).result().num_objects == 0
    assert linker.load([], {"full": []}, partial=True).result().num_objects == 0


@pytest.mark.parametrize(
    "settings",
    [{"part_bytes": 0}, {"transfer_timeout_s": -1}, {"max_queued": 0}, {"lookup_ttl_s": -1}],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        LinkerConfig(**settings)


def test_an_unbound_layout_is_refused(bed: Bed) -> None:
    with pytest.raises(ArgumentError, match="not bound"):
        Linker(
            CacheLayout.from_description(HYBRID),
            bed.store,
            StagingBuffer(1 << 16, device=torch.device("cpu")),
        )


class Starving:
    """A lock that who waits for it with a limit gets last, as a thread may that is unlucky."""

    def __init__(self) -> None:
        self.real = threading.Lock()
        self.asked, self.others_are_done = threading.Event(), threading.Event()

    def acquire(self, timeout: float) -> bool:
        self.asked.set()
        self.others_are_done.wait(10)
        return self.real.acquire(timeout=timeout)

    def release(self) -> None:
        self.real.release()

    def __enter__(self) -> None:
        self.real.acquire()

    def __exit__(self, *_: object) -> None:
        self.real.release()


def test_who_gives_up_is_not_overtaken_by_the_worker() -> None:
    going = Transfer("load", (), Fence(), 10.0, 0.0)
    lock = going._touching = Starving()  # type: ignore[assignment]
    canceller = threading.Thread(target=going.cancel)
    with going.touching_pages():
        canceller.start()
        assert lock.asked.wait(10)
    with pytest.raises(Ended), going.touching_pages():
        pass  # one more touch, behind the call that gave it up
    going.finish()  # and what lacks bytes does not end well
    assert not going.is_over
    lock.others_are_done.set()
    canceller.join(10)
    with pytest.raises(TransferFailed, match="cancelled"):
        going.result()
