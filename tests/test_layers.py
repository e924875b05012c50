"""Layer-wise saves and loads through a real Mooncake store; faults where it can't show them."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linker_bed import Bed, ids, keys

from kvferry.errors import ArgumentError, StoreError, TransferFailed
from kvferry.linker import layer_loader
from kvferry.linker.eviction import evict
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.linker import Linker
from kvferry.linker.plan import stride_bytes
from kvferry.linker.store import ObjectResult, Outcome
from kvferry.linker.trace import Trace
from kvferry.testing import check_poison, check_telling

pytestmark = pytest.mark.mooncake

GROUPS = ((0, 1), (1, 3), (3, 5))
NUM_LAYERS = 5


def saved(bed: Bed, linker: Linker, count: int, first: int = 0) -> None:
    """Save telling pages under `keys(count)`, whole."""
    assert not linker.save(keys(count), bed.fill(first, count)).result().failures


def read_all(load: LayerLoad) -> list[str]:
    return [load.wait_layer(layer).state for layer in range(NUM_LAYERS)]


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.01)


def fail_once(outcome: Outcome, name: str = "") -> Callable[..., list[ObjectResult] | None]:
    """Answer the first call with an outcome for every key."""
    turns = itertools.count()
    return lambda names, *_: (
        [ObjectResult(outcome, name)] * len(names) if next(turns) == 0 else None
    )


# ---- both ways ----


@pytest.mark.parametrize("integrity", [True, False])
def test_layers_come_back_byte_for_byte(bed: Bed, integrity: bool) -> None:
    linker = bed.linker(groups=GROUPS, integrity=integrity)
    save = linker.save(keys(8), bed.fill(0, 8), layerwise=True)
    assert save.groups == GROUPS
    for layer in range(NUM_LAYERS):
        save.layer_written(layer)
    done = save.result()
    assert (done.num_objects, done.num_existing, done.failures) == (24, 0, {})
    assert done.num_bytes == 8 * sum(bed.layout.object_bytes.values())
    load = linker.load(keys(8), ids(bed, 32, 8), layerwise=True).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    (result,) = load.result()
    assert (result.num_objects, result.num_bytes) == (24, done.num_bytes)
    bed.check(32, range(8))
    bed.check(0, range(8))
    for space in bed.layout.spaces:
        check_poison(bed.layout, space, [*range(8), *range(32, 40)])
    for one in (done, result):
        assert one.timings.total_us > 0
        assert one.timings.wire_us > 0
    # Whole and layer-wise transfers read each other's objects.
    linker.load(keys(8), ids(bed, 48, 8)).result()
    bed.check(48, range(8))


def test_an_engine_may_save_after_the_forward(bed: Bed) -> None:
    linker = bed.linker()
    save = linker.save(keys(4), bed.fill(0, 4), layerwise=True)
    save.all_written()
    assert save.result().num_objects == 12
    save.layer_written(2)  # of a save that has ended, ignored
    linker.load(keys(4), ids(bed, 20, 4)).result()
    bed.check(20, range(4))


def test_layers_are_packed_as_they_are_written_and_put_whole_behind_the_last(bed: Bed) -> None:
    trace = Trace()
    linker = bed.linker(groups=GROUPS, trace=trace)
    page_ids = ids(bed, 0, 4)
    save = linker.save(keys(4), page_ids, layerwise=True)
    for layer in range(NUM_LAYERS):
        for space in bed.layout.spaces:
            pages = page_ids[space]
            bed.write(space, pages, pages, layer)
        save.layer_written(layer)
        packed = [group for group in GROUPS if group[1] <= layer + 1]
        wait_until(lambda packed=packed: len(trace.intervals("pack")) == len(packed))
        names = [each.name for each in trace.intervals("pack")]
        assert names == [f"layers {first}..{end - 1}" for first, end in packed]
        if layer < NUM_LAYERS - 1:  # the store has heard of nothing yet, and has nothing reserved
            assert {name for name, _ in bed.store.calls} <= {"exists"}
            assert bed.store.store.num_open_puts == 0
            assert linker.lookup(keys(4)) == []
    assert save.wait_packed()
    bed.poison()  # the pages may be written again now
    assert save.result().num_objects == 12
    linker.load(keys(4), ids(bed, 32, 4)).result()
    bed.check(32, range(4))


@pytest.mark.parametrize("staging_objects", [1, 2, 3, 5])
def test_what_staging_has_no_room_for_follows_the_last_layer(
    bed: Bed, staging_objects: int
) -> None:
    largest = max(stride_bytes(bed.layout, space, trailer=True) for space in bed.layout.spaces)
    linker = bed.linker(staging_objects * largest, groups=GROUPS)
    save = linker.save(keys(8), bed.fill(0, 8), layerwise=True)
    save.layer_written(3)
    time.sleep(0.1)
    staging = linker._staging
    # Half of it stays with others, in one piece, for as long as the model computes.
    assert staging.largest_free_bytes >= min(staging.num_bytes // 2, largest)
    other = linker.save(["other"], ids(bed, 40, 1)).result(10.0)
    assert other.failures == {}
    linker.load(["other"], ids(bed, 50, 1)).result(10.0)
    assert not save.done()
    save.layer_written(NUM_LAYERS - 1)
    assert (save.result().num_objects, save.result().failures) == (24, {})
    linker.load(keys(8), ids(bed, 32, 8)).result()
    bed.check(32, range(8))


def test_a_save_of_small_objects_leaves_room_for_a_large_one(bed: Bed) -> None:
    small, large = (stride_bytes(bed.layout, space, trailer=True) for space in ("full", "state"))
    linker = bed.linker(small + large - 512, groups=GROUPS)
    assert 2 * small < linker._staging.num_bytes  # it would have room for one
    save = linker.save(keys(1), {"full": [0]}, layerwise=True)
    save.layer_written(0)
    time.sleep(0.1)
    assert linker.save(["other"], {"state": [7]}).result(10.0).failures == {}
    save.layer_written(NUM_LAYERS - 1)
    assert save.result().failures == {}


def test_a_layer_is_there_when_its_wait_returns_and_before_the_others(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0)
    saved(bed, linker, 6)
    held = threading.Event()
    turns = itertools.count()
    # The first group comes in two calls, the second in one.
    bed.store.before["read"] = lambda *_: held.wait(20) and None if next(turns) == 3 else None
    load = linker.load(keys(6), ids(bed, 32, 6), layerwise=True).start()
    for layer in range(3):
        assert load.wait_layer(layer).state == "landed"
        for space in bed.layout.spaces:
            check_telling(bed.layout, space, list(range(32, 38)), range(6), layers=range(layer + 1))
    assert not load.done()
    held.set()
    assert load.wait_layer(4).state == "landed"
    load.result()
    bed.check(32, range(6))


def test_the_first_group_has_the_wire_to_itself(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, part_bytes=8_000, wire_threads=2, fetch_ahead=4)
    saved(bed, linker, 4)
    log: list[tuple[str, int]] = []
    reading = threading.Lock()

    def slowly(_: Any, __: Any, ___: Any, offsets: Sequence[int]) -> None:
        with reading:
            log.append(("begin", offsets[0]))
            is_second = len(log) == 2
        time.sleep(0.3 if is_second else 0.02)  # the first one's thread is free meanwhile
        with reading:
            log.append(("end", offsets[0]))

    bed.store.before["read"] = slowly
    load = linker.load(keys(4), ids(bed, 32, 4), layerwise=True).start()
    load.result()
    ends = [place for place, entry in enumerate(log) if entry == ("end", 0)]
    others = [place for place, (what, offset) in enumerate(log) if what == "begin" and offset]
    assert max(ends[:2]) < min(others)  # both parts of layer 0, which `full` alone has
    assert any(log[i][0] == log[i + 1][0] == "begin" for i in range(len(log) - 1))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_groups_parts_and_threads(bed: Bed, data: st.DataObject) -> None:
    inner = data.draw(st.lists(st.integers(1, NUM_LAYERS - 1), unique=True), label="edges")
    edges = [0, *sorted(inner), NUM_LAYERS]
    largest = max(stride_bytes(bed.layout, space, trailer=True) for space in bed.layout.spaces)
    linker = bed.linker(
        staging_bytes=data.draw(st.integers(largest, 6 * largest), label="staging"),
        groups=tuple(itertools.pairwise(edges)),
        part_bytes=data.draw(st.integers(1, 6 * largest), label="part"),
        fetch_ahead=data.draw(st.integers(0, 4), label="ahead"),
        wire_threads=data.draw(st.integers(1, 3), label="threads"),
        integrity=data.draw(st.booleans(), label="integrity"),
    )
    count = data.draw(st.integers(1, 16), label="pages")
    page_ids = {
        space: [
            page if data.draw(st.booleans()) else -1
            for page in data.draw(st.permutations(range(count)))
        ]
        for space in bed.layout.spaces
    }
    bed.poison()
    for space, pages in page_ids.items():
        used = [page for page in pages if page >= 0]
        bed.write(space, used, used)
    save = linker.save(keys(count), page_ids, layerwise=True)
    for layer in data.draw(st.lists(st.integers(0, NUM_LAYERS - 1)).map(sorted), label="said"):
        save.layer_written(layer)
    save.all_written()
    assert not save.result().failures
    others = {
        space: [page + 32 if page >= 0 else -1 for page in pages]
        for space, pages in page_ids.items()
    }
    wanted = [  # keys with a page somewhere
        row for row in range(count) if any(pages[row] >= 0 for pages in others.values())
    ]
    load = linker.load(
        [keys(count)[row] for row in wanted],
        {space: [pages[row] for row in wanted] for space, pages in others.items()},
        partial=True,
        layerwise=True,
    ).start()
    assert set(read_all(load)) == {"landed"}
    load.result()
    for space, pages in others.items():
        there = [page for page in pages if page >= 0]
        check_telling(bed.layout, space, there, [page - 32 for page in there])
        check_poison(bed.layout, space, [*there, *(page - 32 for page in there)])
    linker.close(10)
    assert linker._staging.num_free_bytes == linker._staging.num_bytes


@pytest.mark.interpreter
def test_kernels_move_groups_as_torch_does(bed: Bed) -> None:
    if bed.layout.device != torch.device("cpu"):
        pytest.skip("on a GPU every other test runs the kernels")
    linker = bed.linker(groups=GROUPS, backend="triton")
    save = linker.save(keys(2), bed.fill(0, 2), layerwise=True)
    save.all_written()
    assert not save.result().failures
    other = bed.linker(groups=((0, 2), (2, 5)), namespace=linker.config.namespace)
    load = other.load(keys(2), ids(bed, 8, 2), layerwise=True).start()
    assert set(read_all(load)) == {"landed"}
    load.result()
    bed.check(8, range(2))
    load = linker.load(keys(2), ids(bed, 12, 2), layerwise=True).start()
    load.result()
    bed.check(12, range(2))


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("lookup_ttl_s", [0.0, 60.0])
def test_a_save_of_what_exists_ends_a_remembered_miss(
    bed: Bed, layerwise: bool, lookup_ttl_s: float
) -> None:
    linker = bed.linker(groups=GROUPS, miss_ttl_s=60.0, lookup_ttl_s=lookup_ttl_s)
    saved(bed, linker, 2)
    linker.distrust(keys(2))
    assert linker.lookup(keys(2)) == []
    again: Any = linker.save(keys(2), bed.fill(0, 2), layerwise=layerwise)
    if layerwise:
        again.all_written()
    assert again.result().num_existing == 6
    assert linker.lookup(keys(2)) == [1, 2]


def test_what_another_stores_before_the_session_ends_a_remembered_miss(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, miss_ttl_s=60.0)
    saved(bed, linker, 2)
    linker.distrust(keys(2))
    bed.store.before["exists"] = lambda names: [False] * len(names)  # asked too early
    save = linker.save(keys(2), bed.fill(0, 2), layerwise=True)
    save.all_written()
    assert save.result().num_existing == 6
    del bed.store.before["exists"]
    assert linker.lookup(keys(2)) == [1, 2]


@pytest.mark.parametrize("part_bytes", [1 << 12, 1 << 20])
def test_a_failure_names_every_object_that_cannot_be_had(bed: Bed, part_bytes: int) -> None:
    linker = bed.linker(groups=GROUPS, part_bytes=part_bytes)
    saved(bed, linker, 8)
    gone = [
        *linker.keys.object_keys(keys(8)[1:7], "full"),
        *linker.keys.object_keys(keys(8)[2:3], "swa"),
        *linker.keys.object_keys(keys(8)[7:], "state"),
    ]
    evict(bed.store.store, gone)
    load = linker.load(keys(8), ids(bed, 32, 8), layerwise=True).start()
    assert read_all(load)[0] in ("failed", "landed")
    with pytest.raises(
        TransferFailed, match=f"{len(gone)} of 24 objects could not be had"
    ) as caught:
        load.result()
    assert sorted(caught.value.causes) == sorted(gone)
    assert set(caught.value.causes.values()) == {"missing (OBJECT_NOT_FOUND)"}
    assert linker._existence.ask(bed.store, gone) == [False] * len(gone)


# ---- batches ----


def test_requests_of_a_batch_share_keys_and_have_tails(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    saved(bed, linker, 6)
    full = {"full": [32, 33, 34]}
    requests = [
        LoadRequest(keys(3), full, tail_tokens=1, partial=True),
        LoadRequest(keys(4), {"full": [40, 41, 42, 43]}, partial=True),
        LoadRequest(["page-2", "page-5"], {"full": [50, 51], "state": [50, -1]}, partial=True),
    ]
    load = linker.load_batch(requests).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    assert [one.num_objects for one in load.result()] == [3, 4, 3]
    check_telling(bed.layout, "full", [32, 33, 40, 41, 42, 43, 50, 51], [0, 1, 0, 1, 2, 3, 2, 5])
    check_telling(bed.layout, "state", [50], [2])
    check_poison(bed.layout, "state", [*range(6), 50])
    for pool, layer in itertools.product(("k", "scale"), (0, 2, 4)):
        page = bed.page(pool, layer, 34)
        assert torch.equal(page[0], bed.page(pool, layer, 2)[0])
        assert not page[1:].any()


def test_each_request_has_its_own_verdict(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, miss_ttl_s=5)
    saved(bed, linker, 4)
    (gone,) = linker.keys.object_keys(["page-3"], "swa")
    evict(bed.store.store, [gone])
    load = linker.load_batch(
        [LoadRequest(keys(3), ids(bed, 32, 3)), LoadRequest(keys(4), ids(bed, 40, 4))]
    ).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    with pytest.raises(TransferFailed, match="1 of 12 objects"):
        load.result()
    assert load.transfers[0].result().num_objects == 9
    with pytest.raises(TransferFailed) as caught:
        load.transfers[1].result()
    assert caught.value.causes == {gone: "missing (OBJECT_NOT_FOUND)"}
    assert caught.value.cause == "missing"
    bed.check(32, range(3))
    assert linker.lookup(keys(4)) == [1, 2, 3]
    assert linker.stats.snapshot()["failures"]["load"] == {"missing": 1}


def test_one_request_may_be_cancelled(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0)
    saved(bed, linker, 4)
    entered, held = threading.Event(), threading.Event()
    turns = itertools.count()

    def hold(*_: Any) -> None:
        if next(turns) == 1:
            entered.set()
            assert held.wait(20)

    bed.store.before["read"] = hold
    load = linker.load_batch(
        [LoadRequest(keys(2), ids(bed, 32, 2)), LoadRequest(keys(4)[2:], ids(bed, 40, 2))]
    ).start()
    assert entered.wait(10)
    assert load.wait_layer(0).state == "landed"
    assert load.transfers[0].cancel()
    bed.poison()
    held.set()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    load.transfers[1].result()
    for space in bed.layout.spaces:
        # The cancelled one's pages were left alone, and the other's first layer had come before.
        check_poison(bed.layout, space, [40, 41])
        check_telling(bed.layout, space, [40, 41], [2, 3], layers=range(1, 5))


# ---- what cannot be read by ranges ----


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_range_that_fails_makes_its_object_come_whole(bed: Bed, group: int) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0)
    saved(bed, linker, 5)
    turns = itertools.count()
    lost = set(linker.keys.object_keys(["page-1", "page-4"], "full"))

    def lose(names: Sequence[str], *_: Any) -> list[ObjectResult] | None:
        if next(turns) != group:
            return None
        return [
            ObjectResult(Outcome.FAILED, "REPLICA_NOT_IN_LOCAL_MEMORY")
            if name in lost
            else ObjectResult(Outcome.FETCHED)
            for name in names
        ]

    bed.store.before["read"] = lose
    spoil = bed.page("k", 0, 33)
    bed.store.before["get"] = lambda *_: (spoil.fill_(0x77), None)[1]
    load = linker.load(
        ["page-1", "page-4"], {"full": [33, 36]}, partial=True, layerwise=True
    ).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    load.result()
    assert [call for call in bed.store.calls if call[0] == "get"] == [("get", 2)]
    later = range(1 if group else 0, 5)
    check_telling(bed.layout, "full", [33, 36], [1, 4], layers=later)
    if group:  # what had come before was not written again: a forward pass may be at it
        assert (spoil == 0x77).all()


def test_without_sessions_objects_come_whole(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, part_bytes=10_000)
    saved(bed, linker, 6)

    def refuse(*_: Any) -> None:
        raise StoreError("the installed Mooncake has no batch_get_session_start")

    bed.store.before["get_session"] = refuse
    load = linker.load(keys(6), ids(bed, 32, 6), layerwise=True).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    load.result()
    bed.check(32, range(6))
    assert len([name for name, _ in bed.store.calls if name == "get"]) > 3


def test_objects_come_whole_also_through_a_tight_staging(bed: Bed) -> None:
    largest = max(stride_bytes(bed.layout, space, trailer=True) for space in bed.layout.spaces)
    linker = bed.linker(staging_bytes=largest, part_bytes=largest, groups=GROUPS)
    saved(bed, linker, 6)
    bed.store.before["read"] = lambda names, *_: [ObjectResult(Outcome.LEASE_EXPIRED)] * len(names)
    load = linker.load(keys(6), ids(bed, 32, 6), layerwise=True).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    load.result()
    bed.check(32, range(6))


def test_no_layer_is_told_while_rows_of_it_are_lacking(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker = bed.linker(groups=GROUPS)
    saved(bed, linker, 4)
    monkeypatch.setattr(layer_loader._Run, "_try_acquire", lambda *_: None)  # no staging is free
    bed.store.before["read"] = fail_once(Outcome.LEASE_EXPIRED)
    bed.store.before["get"] = lambda *_: time.sleep(0.3)
    load = linker.load(keys(4), ids(bed, 32, 4), layerwise=True).start()
    for layer in range(NUM_LAYERS):
        assert load.wait_layer(layer).state == "landed"
        check_telling(bed.layout, "full", list(range(32, 36)), range(4), layers=range(layer + 1))
    load.result()
    bed.check(32, range(4))


# ---- failures ----


def test_a_corrupted_layer_is_told_at_the_end(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    saved(bed, linker, 4)
    victim = bed.corrupt(linker, "page-2", "full", layer=2)
    load = linker.load_batch(
        [LoadRequest(keys(2), ids(bed, 32, 2)), LoadRequest(keys(4), ids(bed, 40, 4))]
    ).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    load.transfers[0].result()
    with pytest.raises(TransferFailed) as caught:
        load.transfers[1].result()
    assert caught.value.causes == {victim: "corrupted: checksums of layers [2] differ"}
    assert caught.value.cause == "corrupted"
    assert linker.lookup(keys(4)) == [1, 2]


def test_a_load_that_fails_at_some_layer_lets_the_forward_through(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0)
    saved(bed, linker, 3)
    turns = itertools.count()
    failed = ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
    bed.store.before["read"] = lambda names, *_: [failed] * len(names) if next(turns) else None
    bed.store.before["get"] = lambda names, *_: [failed] * len(names)
    load = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    begin_s = time.monotonic()
    states = read_all(load)
    assert time.monotonic() - begin_s < 5
    assert states[0] in ("landed", "failed")  # failed, if all was over before it was asked
    assert states[3:] == ["failed", "failed"]
    with pytest.raises(TransferFailed, match="failed \\(TRANSFER_FAIL\\)"):
        load.result()
    check_telling(bed.layout, "full", [32, 33, 34], range(3), layers=[0])
    bed.store.before.clear()
    again = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    assert read_all(again) == ["landed"] * NUM_LAYERS
    again.result()
    bed.check(32, range(3))


def test_a_late_layer_expires_and_the_load_fails(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0, wait_timeout_s=0.3)
    saved(bed, linker, 3)
    held = threading.Event()
    turns = itertools.count()
    bed.store.before["read"] = lambda *_: held.wait(20) and None if next(turns) == 1 else None
    load = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    assert [load.wait_layer(layer).state for layer in range(3)] == ["landed", "expired", "failed"]
    held.set()
    with pytest.raises(TransferFailed, match="layer 1 of step 1") as caught:
        load.result()
    assert caught.value.cause == "deadline"


def test_no_wait_outlives_the_requests(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, transfer_timeout_s=0.4)
    saved(bed, linker, 3)
    held = threading.Event()
    bed.store.before["read"] = lambda *_: held.wait(20) and None
    load = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    begin_s = time.monotonic()
    assert read_all(load) == ["expired", *["failed"] * 4]
    assert time.monotonic() - begin_s < 2
    with pytest.raises(TransferFailed) as caught:
        load.result()
    assert caught.value.cause == "deadline"
    held.set()
    requests = [LoadRequest([key], ids(bed, 40 + i, 1)) for i, key in enumerate(keys(2))]
    held.clear()
    load = linker.load_batch(requests).start()
    states: list[str] = []
    waiting = threading.Thread(target=lambda: states.extend(read_all(load)))
    waiting.start()
    for transfer in load.transfers:
        assert transfer.cancel()
    waiting.join(2)
    assert states == ["failed"] * NUM_LAYERS
    held.set()


def test_a_cancelled_load_lets_the_forward_through_and_pages_alone(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, fetch_ahead=0)
    saved(bed, linker, 3)
    entered, held = threading.Event(), threading.Event()
    bed.store.before["read"] = lambda *_: (entered.set(), held.wait(20))[1] and None
    load = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    assert entered.wait(10)
    assert load.cancel()
    assert not load.cancel()
    assert read_all(load) == ["failed"] * NUM_LAYERS
    bed.poison()
    held.set()
    with pytest.raises(TransferFailed, match="load was cancelled"):
        load.result()
    bed.store.before.clear()
    linker.load(keys(3), ids(bed, 40, 3), layerwise=True).start().result()
    for space in bed.layout.spaces:
        check_poison(bed.layout, space, range(40, 43))


def test_loads_share_a_few_counters(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, num_counters=2, wait_timeout_s=0.3)
    saved(bed, linker, 3)
    held = threading.Event()
    bed.store.before["read"] = lambda *_: held.wait(20) and None
    loads = [linker.load(keys(3), ids(bed, 32 + 3 * n, 3), layerwise=True) for n in range(3)]
    loads[0].start()
    loads[1].start()
    assert [load.index for load in loads] == [0, 1, None]
    with pytest.raises(TransferFailed, match="2 layer-wise loads are in flight already") as caught:
        loads[2].start()
    assert caught.value.cause == "busy"
    assert loads[2].done()
    with pytest.raises(TransferFailed, match="2 layer-wise loads are in flight already"):
        loads[2].transfers[0].result(0)
    assert linker.stats.snapshot()["failures"]["load"] == {"busy": 1}
    held.set()
    for load in loads[:2]:
        load.result()
    bed.check(32, [0, 1, 2, 0, 1, 2])
    for _ in range(5):
        assert (
            read_all(linker.load(keys(3), ids(bed, 50, 3), layerwise=True).start())
            == ["landed"] * NUM_LAYERS
        )


# ---- saves that do not go well ----


def test_only_what_is_missing_is_packed_and_written(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    saved(bed, linker, 4)
    bed.store.calls.clear()
    save = linker.save(keys(6), bed.fill(0, 6), layerwise=True)
    save.all_written()
    done = save.result()
    assert (done.num_objects, done.num_existing) == (6, 12)
    assert [size for name, size in bed.store.calls if name == "put"] == [6]
    bed.store.calls.clear()
    # All of it is there: nobody waits for the model.
    assert linker.save(keys(6), ids(bed, 0, 6), layerwise=True).result().num_existing == 18
    assert [name for name, _ in bed.store.calls] == ["exists"]


def test_an_object_that_was_not_written_is_written_again(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    bed.store.before["put"] = fail_once(Outcome.FAILED, "TRANSFER_FAIL")
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.all_written()
    assert save.result().failures == {}
    linker.load(keys(3), ids(bed, 32, 3)).result()
    bed.check(32, range(3))


def test_an_object_that_cannot_be_written_fails_alone(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    (victim,) = linker.keys.object_keys(["page-1"], "full")

    def lose(names: Sequence[str], addresses: Any, sizes: Any) -> Any:
        keep = [i for i, name in enumerate(names) if name != victim]
        some = bed.store.store.put(
            *([column[i] for i in keep] for column in (names, addresses, sizes))
        )
        answers = dict(zip(keep, some, strict=True))
        failed = ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
        return [answers.get(i, failed) for i in range(len(names))]

    bed.store.before["put"] = lose
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.all_written()
    done = save.result()
    assert done.failures == {victim: "failed (TRANSFER_FAIL)"}
    assert done.num_objects == 8
    assert bed.store.store.exists([victim]) == [False]
    assert linker.stats.snapshot()["failures"]["save"] == {"transport": 1}


def test_a_save_whose_model_stops_ends_at_its_deadline(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS, transfer_timeout_s=0.4)
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.layer_written(1)
    begin_s = time.monotonic()
    with pytest.raises(TransferFailed, match=r"not done within") as caught:
        save.result()
    assert time.monotonic() - begin_s < 5
    assert caught.value.cause == "deadline"
    assert linker.lookup(keys(3)) == []
    patient = bed.linker(groups=GROUPS)
    again = patient.save(keys(3), bed.fill(0, 3), layerwise=True)
    again.all_written()
    assert again.result().num_objects == 9


def test_a_cancelled_save_is_revoked_at_once(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.layer_written(0)
    time.sleep(0.1)
    assert save.cancel()
    with pytest.raises(TransferFailed, match="save was cancelled"):
        save.result()
    again = linker.save(keys(3), ids(bed, 0, 3), layerwise=True)
    again.all_written()
    done = again.result()
    assert (done.num_objects, done.failures) == (9, {})


def test_a_full_store_is_tried_twice(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    full = fail_once(Outcome.NO_SPACE, "NO_AVAILABLE_HANDLE")
    bed.store.before["put"] = full
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.all_written()
    assert save.result().num_objects == 9
    always = [ObjectResult(Outcome.NO_SPACE, "NO_AVAILABLE_HANDLE")]
    bed.store.before["put"] = lambda names, *_: always * len(names)
    other = bed.linker(groups=GROUPS)
    save = other.save(keys(3), ids(bed, 0, 3), layerwise=True)
    save.all_written()
    assert set(save.result().failures.values()) == {"no space (NO_AVAILABLE_HANDLE)"}


# ---- arguments, closing, timelines ----


def test_bad_input_is_refused_before_anything_happens(bed: Bed) -> None:
    with pytest.raises(ArgumentError, match="groups are"):
        bed.linker(groups=((0, 2), (3, 5)))
    with pytest.raises(ArgumentError, match="wait is 'never'"):
        bed.linker(wait="never")
    with pytest.raises(ArgumentError, match="fetch_ahead is -1"):
        bed.linker(fetch_ahead=-1)
    if bed.layout.device == torch.device("cpu"):
        with pytest.raises(ArgumentError, match="kind is 'device': the counters are on a cpu"):
            bed.linker(wait="device")
    linker = bed.linker(groups=GROUPS)
    with pytest.raises(ArgumentError, match="requests are empty"):
        linker.load_batch([])
    with pytest.raises(ArgumentError, match="hold 32 in two requests"):
        linker.load_batch(
            [
                LoadRequest(["a"], {"full": [32]}, partial=True),
                LoadRequest(["b"], {"full": [32]}, partial=True),
            ]
        )
    with pytest.raises(ArgumentError, match="tail is 'cut'"):
        linker.load(["a"], {"full": [1]}, partial=True, tail_tokens=1, tail="cut", layerwise=True)
    load = linker.load(["a"], {"full": [1]}, partial=True, layerwise=True)
    for early in (lambda: load.wait_layer(0), load.result):
        with pytest.raises(ArgumentError, match="was not started"):
            early()
    load.start()
    with pytest.raises(ArgumentError, match="start was called before"):
        load.start()
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(ArgumentError, match=f"layer is {layer}, wanted 0 .. 4"):
            load.wait_layer(layer)
    with pytest.raises(TransferFailed):
        load.result()
    save = linker.save(["a"], {"full": [1]}, layerwise=True)
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(ArgumentError, match=f"layer is {layer}, wanted 0 .. 4"):
            save.layer_written(layer)
    save.cancel()


def test_nothing_to_do_is_done(bed: Bed) -> None:
    linker = bed.linker()
    assert linker.save([], {}, layerwise=True).result().num_objects == 0
    load = linker.load([], {"full": []}, partial=True, layerwise=True).start()
    assert read_all(load) == ["landed"] * NUM_LAYERS
    assert load.result()[0].num_objects == 0


def test_close_gives_up_a_save_whose_model_never_comes(bed: Bed) -> None:
    linker = bed.linker(groups=GROUPS)
    saves = [
        linker.save(keys(2), bed.fill(0, 2), layerwise=True),
        linker.save(["q"], {"full": [5]}, layerwise=True),
    ]
    saves[0].layer_written(0)
    linker.close(0.5)
    for save in saves:
        with pytest.raises(TransferFailed, match="the linker was closed"):
            save.result()
    assert not [one.name for one in linker._crew.workers if one.is_alive]
    with pytest.raises(TransferFailed, match="the linker is closed"):
        linker.save(keys(1), {"full": [0]}, layerwise=True)
    with pytest.raises(TransferFailed, match="the linker is closed"):
        linker.load(keys(1), {"full": [0]}, partial=True, layerwise=True).start()


def test_a_timeline_shows_every_lane(bed: Bed) -> None:
    trace = Trace(bed.layout.device)
    linker = bed.linker(groups=GROUPS, trace=trace)
    save = linker.save(keys(3), bed.fill(0, 3), layerwise=True)
    save.all_written()
    save.result()
    load = linker.load(keys(3), ids(bed, 32, 3), layerwise=True).start()
    read_all(load)
    load.result()
    found = {(one.lane, one.name) for one in trace.intervals()}
    for first, end in GROUPS:
        assert {
            (lane, f"layers {first}..{end - 1}") for lane in ("pack", "wire", "unpack")
        } <= found
    assert {("wait", f"layer {layer}") for layer in range(NUM_LAYERS)} <= found
