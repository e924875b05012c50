"""Put and get sessions: real ones, and how their books keep Mooncake's traps away."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError, StoreClosed, StoreError, StoreUnavailable
from kvferry.linker import patience
from kvferry.linker.coverage import Coverage
from kvferry.linker.eviction import evict
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.patience import RANGES_PER_CALL, UNTRIED, Patience
from kvferry.linker.store import ObjectResult, Outcome

KIB, MIB = 1 << 10, 1 << 20

NOT_OPEN = r"not open (in this put session|here, wanted one of this get session)"


def outcomes(results):
    return [result.outcome for result in results]


def wait_until(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def short_master():
    """A master whose lease and discard times a test can outwait."""
    with LocalMaster(lease_ttl_s=1.0, extra_flags=["--put_start_discard_timeout_sec=1"]) as master:
        yield master


@pytest.fixture(scope="module")
def short_store(short_master):
    config = MooncakeConfig(short_master.address, lease_ttl_s=1.0, session_max_age_s=0.5)
    with LocalOwner(short_master.address, 64 * MIB), MooncakeStore(config) as store:
        yield store


@pytest.fixture(scope="module")
def other_store(local_master, local_owner):
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        yield store


# ---- coverage ----


@given(st.data())
def test_coverage_is_complete_exactly_when_every_byte_is_written(data):
    size = data.draw(st.integers(1, 40))
    coverage, claimed, written = Coverage(size), np.zeros(size, bool), np.zeros(size, bool)
    for _ in range(data.draw(st.integers(0, 30))):
        offset = data.draw(st.integers(-2, size))
        num_bytes = data.draw(st.integers(-1, size + 2))
        end = offset + num_bytes
        fits = offset >= 0 and num_bytes > 0 and end <= size
        if not fits or claimed[offset:end].any():
            with pytest.raises(ArgumentError):
                coverage.claim(offset, num_bytes)
        else:
            coverage.claim(offset, num_bytes)
            if data.draw(st.booleans()):
                coverage.written(num_bytes)
                claimed[offset:end] = written[offset:end] = True
            else:
                coverage.give_back(offset)
        assert coverage.complete == written.all()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30).flatmap(st.permutations))
def test_coverage_takes_disjoint_ranges_in_any_order(lengths):
    coverage = Coverage(sum(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    for index in order:
        assert not coverage.complete
        coverage.claim(offsets[index], lengths[index])
        coverage.written(lengths[index])
    assert coverage.complete


# ---- put sessions ----


@pytest.mark.mooncake
def test_object_appears_whole_after_finish(mooncake_store, other_store, make_memory, unique):
    keys = [unique("a"), unique("b")]
    source, target = make_memory(mooncake_store, 2 * MIB), make_memory(other_store, 2 * MIB)
    source.fill(1)
    group, places = MIB // 4, [source.address(0), source.address(MIB)]
    with mooncake_store.put_session(keys, [MIB, MIB]) as session:
        assert outcomes(session.start_results()) == [Outcome.STORED] * 2
        for index in (2, 0, 3, 1):
            results = session.write(
                keys, [place + index * group for place in places], [group] * 2, [index * group] * 2
            )
            assert outcomes(results) == [Outcome.STORED] * 2
            assert other_store.exists(keys) == [False] * 2
        assert outcomes(session.finish()) == [Outcome.STORED] * 2
        assert outcomes(session.finish()) == [Outcome.STORED] * 2
        with pytest.raises(StoreError, match="finished or aborted"):
            session.write(keys[:1], places[:1], [1], [0])
    assert other_store.exists(keys) == [True] * 2
    results = other_store.get(keys, [target.address(0), target.address(MIB)], [MIB] * 2)
    assert outcomes(results) == [Outcome.FETCHED] * 2
    np.testing.assert_array_equal(target.bytes, source.bytes)


@pytest.mark.mooncake
def test_partly_written_object_never_appears(mooncake_store, other_store, make_memory, unique):
    whole, part = unique("whole"), unique("part")
    memory = make_memory(mooncake_store, 4 * KIB)
    with mooncake_store.put_session([whole, part], [4 * KIB] * 2) as session:
        address = memory.address(0)
        session.write([whole, part], [address] * 2, [4 * KIB, 4 * KIB - 1], [0, 0])
        assert session.finish() == [
            ObjectResult(Outcome.STORED),
            ObjectResult(Outcome.FAILED, "INCOMPLETE"),
        ]
    assert other_store.exists([whole, part]) == [True, False]
    assert outcomes(mooncake_store.put([part], [address], [4 * KIB])) == [Outcome.STORED]


@pytest.mark.mooncake
@pytest.mark.parametrize("how", ["abort", "exit", "exception"])
def test_left_session_is_revoked(mooncake_store, other_store, make_memory, unique, how):
    key = unique("a")
    memory = make_memory(mooncake_store, KIB)

    class ModelError(Exception):
        pass

    def leave():
        with mooncake_store.put_session([key], [KIB]) as session:
            session.write([key], [memory.address(0)], [KIB], [0])
            if how == "abort":
                session.abort()
                assert session.finish() == [ObjectResult(Outcome.FAILED, "REVOKED")]
            if how == "exception":
                raise ModelError

    if how == "exception":
        with pytest.raises(ModelError):
            leave()
    else:
        leave()
    assert mooncake_store.num_open_puts == 0
    assert other_store.exists([key]) == [False]
    with other_store.put_session([key], [KIB]) as again:  # free at once, for anybody
        assert outcomes(again.start_results()) == [Outcome.STORED]


@pytest.mark.mooncake
def test_start_tells_existing_from_pending(mooncake_store, other_store, make_memory, unique):
    there, theirs, ours, free = (unique(name) for name in ("there", "theirs", "ours", "free"))
    memory = make_memory(mooncake_store, KIB)
    mooncake_store.put([there], [memory.address(0)], [KIB])
    with (
        other_store.put_session([theirs], [KIB]),
        mooncake_store.put_session([ours], [KIB]) as first,
        mooncake_store.put_session([there, theirs, ours, free], [KIB] * 4) as second,
    ):
        assert outcomes(second.start_results()) == [
            Outcome.EXISTS,
            Outcome.PENDING,
            Outcome.PENDING,
            Outcome.STORED,
        ]
        second.write([free], [memory.address(0)], [KIB], [0])
        with pytest.raises(ArgumentError, match=NOT_OPEN):
            second.write([ours], [memory.address(0)], [KIB], [0])
        assert outcomes(second.finish()) == [
            Outcome.EXISTS,
            Outcome.PENDING,
            Outcome.PENDING,
            Outcome.STORED,
        ]
        # The first session of this process is untouched by the second one's end.
        results = first.write([ours], [memory.address(0)], [KIB], [0])
        assert outcomes(results) == [Outcome.STORED]
        assert outcomes(first.finish()) == [Outcome.STORED]
    assert mooncake_store.exists([there, theirs, ours, free]) == [True, False, True, True]


@pytest.mark.mooncake
def test_bad_ranges_are_refused_and_claim_nothing(mooncake_store, make_memory, unique):
    a, b = unique("a"), unique("b")
    memory = make_memory(mooncake_store, 4 * KIB)
    address = memory.address(0)
    with mooncake_store.put_session([a, b], [KIB, KIB]) as session:
        session.write([a], [address], [100], [500])
        for keys, size, offset, message in (
            ([b, a], 101, 400, "overlaps"),
            ([b, a], 1, 599, "overlaps"),
            ([b, a], 500, 524 + 1, "not inside an object of 1024 bytes"),
            ([b, a], 1, -1, "not inside"),
            ([a, a], 1, 0, "more than once"),
            ([b, unique("c")], 1, 0, NOT_OPEN),
        ):
            with pytest.raises(ArgumentError, match=message):
                session.write(keys, [address] * 2, [size] * 2, [offset] * 2)
        with pytest.raises(ArgumentError, match="registered range"):
            session.write([b], [address + 4 * KIB - 1], [2], [0])
        with pytest.raises(ArgumentError, match="size is 0"):
            session.write([b], [address], [0], [0])
        session.write([b], [address], [KIB], [0])  # so none of the above claimed a byte of b
        session.write([a], [address], [500], [0])
        session.write([a], [address], [424], [600])
        assert outcomes(session.finish()) == [Outcome.STORED] * 2
    with pytest.raises(ArgumentError, match="more than once"):
        mooncake_store.put_session([a, a], [1, 1])
    with pytest.raises(ArgumentError, match="1 sizes for 2 keys"):
        mooncake_store.put_session([a, b], [1])
    with pytest.raises(ArgumentError, match="wanted 1"):
        mooncake_store.put_session([a], [0])


@pytest.mark.mooncake
def test_long_writes_and_reads_are_split(local_master, local_owner, make_memory, unique):
    config = MooncakeConfig(local_master.address, max_call_bytes=3 * KIB, max_call_objects=2)
    with MooncakeStore(config) as store:
        memory = make_memory(store, 10 * KIB)
        memory.fill(5)
        keys = [unique(str(index)) for index in range(5)]
        places = [memory.address(index * KIB) for index in range(10)]
        with store.put_session(keys, [KIB] * 5) as session:
            assert outcomes(session.write(keys, places[:5], [KIB] * 5, [0] * 5)) == (
                [Outcome.STORED] * 5
            )
            assert outcomes(session.finish()) == [Outcome.STORED] * 5
        with store.get_session(keys) as session:
            assert outcomes(session.read(keys, places[5:], [KIB] * 5, [0] * 5)) == (
                [Outcome.FETCHED] * 5
            )
        np.testing.assert_array_equal(memory.bytes[5 * KIB :], memory.bytes[: 5 * KIB])


@pytest.mark.mooncake
def test_old_session_writes_and_publishes_nothing(short_store, make_memory, unique):
    key, late = unique("a"), unique("late")
    memory = make_memory(short_store, KIB)
    lists = ([memory.address(0)], [KIB], [0])
    with short_store.put_session([key, late], [KIB, KIB]) as session:
        assert outcomes(session.write([key], *lists)) == [Outcome.STORED]
        time.sleep(0.6)
        too_old = ObjectResult(Outcome.FAILED, "SESSION_TOO_OLD")
        assert session.write([late], *lists) == [too_old]
        assert session.finish() == [too_old, too_old]
    assert short_store.exists([key, late]) == [False, False]
    assert outcomes(short_store.put([key], *lists[:2])) == [Outcome.STORED]


def test_sessions_end_before_the_master_gives_memory_away():
    assert MooncakeConfig("h:1").session_age_s == 8.0  # of 10 s of client_ttl
    assert MooncakeConfig("h:1", client_ttl_s=40.0).session_age_s == 24.0
    assert MooncakeConfig("h:1", put_start_discard_s=5.0).session_age_s == 4.0
    assert MooncakeConfig("h:1", put_start_release_s=1.0).session_age_s == 0.8
    assert MooncakeConfig("h:1", session_max_age_s=3.0).session_age_s == 3.0
    with pytest.raises(ArgumentError, match=r"session_max_age_s is 12, wanted at most 10: "):
        MooncakeConfig("h:1", session_max_age_s=12.0)
    for name in ("put_start_discard_s", "put_start_release_s", "client_ttl_s"):
        with pytest.raises(ArgumentError, match=name):
            MooncakeConfig("h:1", **{name: 0.0})


@pytest.mark.mooncake
def test_session_that_was_taken_over_fails_and_frees_its_key(
    short_master, short_store, make_memory, unique
):
    key = unique("a")
    careless = MooncakeConfig(
        short_master.address, session_max_age_s=60.0, put_start_discard_s=60.0, client_ttl_s=60.0
    )
    with MooncakeStore(careless) as store:
        ours, theirs = make_memory(store, KIB), make_memory(short_store, KIB)
        theirs.bytes[:] = 7
        with store.put_session([key], [KIB]) as session:
            session.write([key], [ours.address(0)], [KIB], [0])
            time.sleep(1.5)
            with short_store.put_session([key], [KIB]) as winner:
                assert outcomes(winner.start_results()) == [Outcome.STORED]
                winner.write([key], [theirs.address(0)], [KIB], [0])
                assert outcomes(winner.finish()) == [Outcome.STORED]
            assert session.finish()[0].outcome is Outcome.FAILED
        assert outcomes(store.get([key], [ours.address(0)], [KIB])) == [Outcome.FETCHED]
        assert (ours.bytes == 7).all()
        evict(store, [key])
        with store.put_session([key], [KIB]) as again:  # Mooncake's entry was cleared
            assert outcomes(again.start_results()) == [Outcome.STORED]


@pytest.mark.mooncake
def test_closing_the_store_revokes_its_open_sessions(
    local_master, mooncake_store, make_memory, unique
):
    key = unique("a")
    store = MooncakeStore(MooncakeConfig(local_master.address))
    memory = make_memory(store, KIB)
    session = store.put_session([key], [KIB])
    session.write([key], [memory.address(0)], [KIB], [0])
    store.close()
    with mooncake_store.put_session([key], [KIB]) as other:
        assert outcomes(other.start_results()) == [Outcome.STORED]
    with pytest.raises(StoreClosed):
        session.finish()
    session.abort()
    assert mooncake_store.exists([key]) == [False]


@pytest.mark.mooncake
def test_sessions_over_an_outage(make_memory):
    with (
        LocalMaster() as master,
        LocalOwner(master.address, 16 * MIB),
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        memory = make_memory(store, KIB)
        lists = ([memory.address(0)], [KIB], [0])
        store.put(["there"], *lists[:2])
        finished = store.put_session(["finished"], [KIB])
        aborted = store.put_session(["aborted"], [KIB])
        reading = store.get_session(["there"])
        assert outcomes(finished.write(["finished"], *lists)) == [Outcome.STORED]
        master.kill()
        with pytest.raises(StoreUnavailable):
            store.exists(["there"])
        lost = ObjectResult(Outcome.FAILED, "SESSION_LOST")
        assert aborted.write(["aborted"], *lists) == [lost]
        aborted.abort()
        with pytest.raises(StoreUnavailable):
            reading.read(["there"], *lists)
        master.start()
        wait_until(lambda: store.available)
        # The master may have given the memory to others: not a byte goes there any more.
        assert finished.finish() == [lost]
        assert outcomes(reading.read(["there"], *lists)) == [Outcome.MISSING]
        reading.close()
        wait_until(lambda: outcomes(store.put(["new"], *lists[:2])) == [Outcome.STORED])
        with store.put_session(["aborted", "finished"], [KIB] * 2) as again:
            assert outcomes(again.start_results()) == [Outcome.STORED] * 2


@pytest.mark.mooncake
def test_finish_waits_for_writes_in_flight(mooncake_store, make_memory, unique, monkeypatch):
    key = unique("a")
    memory = make_memory(mooncake_store, KIB)
    real, entered = mooncake_store._calls.put_write, threading.Event()

    def slow(*arguments):
        entered.set()
        time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(mooncake_store._calls, "put_write", slow)
    with mooncake_store.put_session([key], [KIB]) as session:
        writer = threading.Thread(
            target=session.write, args=([key], [memory.address(0)], [KIB], [0])
        )
        writer.start()
        assert entered.wait(5.0)
        assert outcomes(session.finish()) == [Outcome.STORED]
        writer.join(5.0)


@pytest.mark.mooncake
@pytest.mark.parametrize("answer", [-800, KIB - 1, StoreUnavailable("away")])
def test_failed_range_counts_as_unwritten_and_can_be_retried(
    mooncake_store, make_memory, unique, monkeypatch, answer
):
    key = unique("a")
    memory = make_memory(mooncake_store, KIB)
    arguments = ([key], [memory.address(0)], [KIB], [0])

    def broken(*_):
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    with mooncake_store.put_session([key], [KIB]) as session:
        with monkeypatch.context() as patch:
            patch.setattr(mooncake_store._calls, "put_write", broken)
            if isinstance(answer, Exception):
                with pytest.raises(StoreUnavailable):
                    session.write(*arguments)
            else:
                assert outcomes(session.write(*arguments)) == [Outcome.FAILED]
        assert not session._coverage[key].complete
        assert outcomes(session.write(*arguments)) == [Outcome.STORED]
        assert outcomes(session.finish()) == [Outcome.STORED]


@pytest.mark.mooncake
def test_revocation_that_failed_is_repeated(mooncake_store, other_store, unique, monkeypatch):
    key = unique("a")

    def away(_keys):
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(mooncake_store._calls, "put_revoke", away)
        mooncake_store.put_session([key], [KIB]).abort()
    assert mooncake_store.num_open_puts == 1
    with other_store.put_session([key], [KIB]) as other:
        assert outcomes(other.start_results()) == [Outcome.PENDING]
    with mooncake_store.put_session([unique("b")], [KIB]):
        pass  # any start sweeps first
    assert mooncake_store.num_open_puts == 0
    with other_store.put_session([key], [KIB]) as other:
        assert outcomes(other.start_results()) == [Outcome.STORED]


# ---- get sessions ----


@pytest.mark.mooncake
def test_ranges_are_read_exactly(mooncake_store, make_memory, unique):
    keys = [unique("a"), unique("b")]
    source, target = make_memory(mooncake_store, 2 * MIB), make_memory(mooncake_store, 2 * MIB)
    source.fill(7)
    mooncake_store.put(keys, [source.address(0), source.address(MIB)], [MIB, MIB])
    group = MIB // 4
    absent = unique("absent")
    with mooncake_store.get_session([*keys, absent]) as session:
        assert session.start_results() == [
            ObjectResult(Outcome.FETCHED),
            ObjectResult(Outcome.FETCHED),
            ObjectResult(Outcome.MISSING, "OBJECT_NOT_FOUND"),
        ]
        for index in (3, 1, 0, 2):
            offset = index * group
            places = [target.address(offset), target.address(MIB + offset)]
            results = session.read(keys, places, [group] * 2, [offset] * 2)
            assert outcomes(results) == [Outcome.FETCHED] * 2
        with pytest.raises(ArgumentError, match=NOT_OPEN):
            session.read([absent], [target.address(0)], [1], [0])
        with pytest.raises(ArgumentError, match="offset is -1"):
            session.read(keys[:1], [target.address(0)], [1], [-1])
        with pytest.raises(ArgumentError, match="registered range"):
            session.read(keys[:1], [target.address(2 * MIB)], [1], [0])
        results = session.read(
            keys, [target.address(0), target.address(MIB)], [2, 2], [MIB - 1, MIB - 2]
        )
        assert outcomes(results) == [Outcome.WRONG_SIZE, Outcome.FETCHED]
        # Of longer objects than asked for, no range tells; the client knows.
        names, sizes = [*keys, absent], [MIB, MIB - 1, 1]
        assert session.longer(names, sizes) == [False, True, False]
        assert session.longer(names, [MIB + 1, MIB, MIB]) == [False] * 3
        np.testing.assert_array_equal(target.bytes[MIB : MIB + 2], source.bytes[-2:])
        target.bytes[MIB : MIB + 2] = source.bytes[MIB : MIB + 2]
    np.testing.assert_array_equal(target.bytes, source.bytes)
    session.close()
    with pytest.raises(StoreError, match="get session was closed"):
        session.read([], [], [], [])


@pytest.mark.mooncake
def test_object_being_written_is_missing(mooncake_store, other_store, unique):
    key = unique("a")
    with other_store.put_session([key], [KIB]), mooncake_store.get_session([key]) as session:
        assert session.start_results() == [ObjectResult(Outcome.MISSING, "REPLICA_IS_NOT_READY")]


@pytest.mark.mooncake
def test_sessions_on_one_key_do_not_end_each_other(mooncake_store, make_memory, unique):
    keys = [unique("a"), unique("b")]
    memory = make_memory(mooncake_store, KIB)
    address = memory.address(0)
    mooncake_store.put(keys, [address] * 2, [KIB] * 2)
    ended = []
    real = mooncake_store._calls.get_end
    mooncake_store._calls.get_end = lambda names: (ended.extend(names), real(names))
    try:
        with mooncake_store.get_session(keys) as outer:
            with mooncake_store.get_session(keys[:1]) as inner:
                assert outcomes(inner.read(keys[:1], [address], [KIB], [0])) == [Outcome.FETCHED]
            inner.close()
            assert ended == []
            assert mooncake_store.num_open_gets == 2
            results = outer.read(keys, [address] * 2, [KIB // 2] * 2, [0] * 2)
            assert outcomes(results) == [Outcome.FETCHED] * 2
        assert sorted(ended) == sorted(keys)
    finally:
        mooncake_store._calls.get_end = real
    assert mooncake_store.num_open_gets == 0


@pytest.mark.mooncake
def test_many_threads_share_keys(mooncake_store, make_memory, unique):
    keys = [unique(str(index)) for index in range(4)]
    num_threads, size = 6, 64 * KIB
    memory = make_memory(mooncake_store, (4 + 4 * num_threads) * size)
    memory.fill(8)
    sources = [memory.address(index * size) for index in range(4)]
    mooncake_store.put(keys, sources, [size] * 4)
    bad = []

    def read(thread):
        rng = np.random.default_rng(thread)
        for _ in range(15):
            chosen = rng.permutation(4)[: rng.integers(1, 5)]
            names = [keys[index] for index in chosen]
            first = (4 + 4 * thread) * size
            places = [memory.address(first + slot * size) for slot in range(len(names))]
            with mooncake_store.get_session(names) as session:
                results = session.read(names, places, [size] * len(names), [0] * len(names))
            for slot, (index, result) in enumerate(zip(chosen, results, strict=True)):
                got = memory.bytes[first + slot * size :][:size]
                want = memory.bytes[index * size :][:size]
                if result.outcome is not Outcome.FETCHED or (got != want).any():
                    bad.append((thread, result))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not bad
    assert mooncake_store.num_open_gets == 0


@pytest.mark.mooncake
def test_lease_is_renewed_while_a_session_lives(short_store, make_memory, unique):
    key = unique("a")
    memory = make_memory(short_store, KIB)
    lists = ([memory.address(0)], [KIB], [0])
    short_store.put([key], *lists[:2])
    with short_store.get_session([key]) as session:
        for pause_s in (0.0, 0.7, 0.7, 1.3):
            time.sleep(pause_s)
            assert outcomes(session.read([key], *lists)) == [Outcome.FETCHED]
        assert short_store.remove([key]) == [ObjectResult(Outcome.FAILED, "OBJECT_HAS_LEASE")]
        evict(short_store, [key])
        time.sleep(0.6)
        assert outcomes(session.read([key], *lists)) == [Outcome.MISSING]


@pytest.mark.mooncake
def test_read_that_outlasts_its_lease_is_void(short_store, make_memory, unique, monkeypatch):
    key = unique("a")
    memory = make_memory(short_store, KIB)
    lists = ([memory.address(0)], [KIB], [0])
    short_store.put([key], *lists[:2])
    real = short_store._calls.get_read
    with short_store.get_session([key]) as session:
        with monkeypatch.context() as patch:
            # Mooncake itself answers in full here: its own check was before the delay.
            patch.setattr(
                short_store._calls, "get_read", lambda *lists: (real(*lists), time.sleep(1.1))[0]
            )
            assert outcomes(session.read([key], *lists)) == [Outcome.LEASE_EXPIRED]
            # Here Mooncake finds out: -707, and it drops its entry.
            patch.setattr(
                short_store._calls, "get_read", lambda *lists: (time.sleep(1.1), real(*lists))[1]
            )
            assert outcomes(session.read([key], *lists)) == [Outcome.LEASE_EXPIRED]
        assert outcomes(session.read([key], *lists)) == [Outcome.FETCHED]


@pytest.mark.mooncake
def test_lease_shorter_than_configured_is_renewed_in_time(
    short_master, short_store, make_memory, unique
):
    key = unique("a")
    with MooncakeStore(MooncakeConfig(short_master.address, lease_ttl_s=60.0)) as store:
        memory = make_memory(store, KIB)
        lists = ([memory.address(0)], [KIB], [0])
        store.put([key], *lists[:2])
        with store.get_session([key]) as session:
            time.sleep(1.2)
            assert outcomes(session.read([key], *lists)) == [Outcome.FETCHED]


# ---- an owner that hangs ----


def test_patience_ends_with_a_slow_failure_and_comes_back_with_a_success():
    found, good = Patience(), ObjectResult(Outcome.STORED)
    assert found.ranges_per_call == RANGES_PER_CALL
    assert not found.is_lost([good, UNTRIED], 0.01)  # quick: another owner may be well
    assert not found.is_lost([good], 20.0)  # slow, but there
    assert found.ranges_per_call == RANGES_PER_CALL
    assert found.is_lost([good, UNTRIED], 1.5)
    assert found.ranges_per_call == 1
    assert not found.is_lost([UNTRIED], 0.01)
    assert found.ranges_per_call == 1
    assert not found.is_lost([good], 0.01)
    assert found.ranges_per_call == RANGES_PER_CALL


@pytest.mark.mooncake
def test_after_a_call_that_hung_no_range_is_tried(
    local_master, local_owner, make_memory, unique, monkeypatch
):
    count = 2 * RANGES_PER_CALL + 1
    keys = [unique(str(index)) for index in range(count)]
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        memory = make_memory(store, count * KIB)
        lists = ([memory.address(index * KIB) for index in range(count)], [KIB] * count)
        store.put(keys, *lists)
        tried = {"put_write": [], "get_read": []}

        def hang(name):
            def call(names, *_):
                tried[name].append(len(names))
                time.sleep(0.06)
                return [-800] * len(names)

            return call

        monkeypatch.setattr(patience, "SLOW_S", 0.05)
        offsets = [0] * count
        for turn, sizes in enumerate([[RANGES_PER_CALL], [1]]):
            with (
                store.get_session(keys) as reading,
                store.put_session([f"{key}/{turn}" for key in keys], [KIB] * count) as writing,
            ):
                written = [f"{key}/{turn}" for key in keys]
                with monkeypatch.context() as patch:
                    for name in tried:
                        tried[name].clear()
                        patch.setattr(store._calls, name, hang(name))
                    if turn:  # whichever way the first loss was found
                        store._calls.patience._suspects = True
                    assert reading.read(keys, *lists, offsets) == [UNTRIED] * count
                    if not turn:
                        store._calls.patience._suspects = False
                    assert writing.write(written, *lists, offsets) == [UNTRIED] * count
                # The first of a session's writes goes alone.
                assert tried == {"put_write": [1], "get_read": sizes}
                results = reading.read(keys, *lists, offsets)
                assert outcomes(results) == [Outcome.FETCHED] * count
                assert outcomes(writing.write(written, *lists, offsets)) == [Outcome.STORED] * count
                assert outcomes(writing.finish()) == [Outcome.STORED] * count
        assert store._calls.patience.ranges_per_call == RANGES_PER_CALL
