"""MooncakeStore against a real master and owner; a fake client only for faults they can't show."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvferry.errors
from kvferry.errors import ArgumentError, StoreClosed, StoreError, StoreUnavailable
from kvferry.linker import mooncake as mooncake_module
from kvferry.linker import mooncake_config
from kvferry.linker.codes import code_name
from kvferry.linker.eviction import evict
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.regions import RegisteredRanges
from kvferry.linker.store import ObjectResult, Outcome

SOURCE = Path(kvferry.errors.__file__).parents[1]
KIB, MIB = 1 << 10, 1 << 20


def outcomes(results):
    return [result.outcome for result in results]


def wait_until(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


# ---- whole objects ----


@pytest.mark.mooncake
def test_put_get_exists_remove(mooncake_store, make_memory, unique):
    store, memory = mooncake_store, make_memory(mooncake_store, 8 * MIB)
    memory.fill(1)
    sizes = [1, 7, 4096, MIB, MIB + 13, 2 * MIB]
    keys = [unique(str(size)) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
    expected = memory.bytes.copy()
    assert store.exists(keys) == [False] * 6
    sources = [memory.address(offset) for offset in offsets]
    assert outcomes(store.put(keys, sources, sizes)) == [Outcome.STORED] * 6
    assert store.exists([*keys, unique("absent")]) == [True] * 6 + [False]

    memory.bytes[:] = 0
    order = [3, 0, 5, 1, 4, 2]
    results = store.get(
        [keys[i] for i in order], [sources[i] for i in order], [sizes[i] for i in order]
    )
    assert outcomes(results) == [Outcome.FETCHED] * 6
    used = sum(sizes)
    np.testing.assert_array_equal(memory.bytes[:used], expected[:used])
    assert not memory.bytes[used:].any()

    assert store.remove(keys[:1]) == [ObjectResult(Outcome.FAILED, "OBJECT_HAS_LEASE")]
    assert outcomes(evict(store, keys)) == [Outcome.STORED] * 6
    assert outcomes(store.remove(keys[:1])) == [Outcome.MISSING]
    assert store.exists(keys) == [False] * 6
    assert store.get(keys[:1], sources[:1], sizes[:1]) == [
        ObjectResult(Outcome.MISSING, "OBJECT_NOT_FOUND")
    ]
    assert store.available


@pytest.mark.mooncake
def test_existing_object_keeps_its_bytes(mooncake_store, make_memory, unique):
    store, memory = mooncake_store, make_memory(mooncake_store, 3 * KIB)
    memory.bytes[:KIB], memory.bytes[KIB : 2 * KIB] = 1, 2
    first, second, third = (memory.address(index * KIB) for index in range(3))
    keys = [unique("old"), unique("new")]
    assert outcomes(store.put(keys[:1], [first], [KIB])) == [Outcome.STORED]
    results = store.put(keys, [second, second], [KIB, KIB])
    assert outcomes(results) == [Outcome.EXISTS, Outcome.STORED]
    assert outcomes(store.get(keys[:1], [third], [KIB])) == [Outcome.FETCHED]
    assert (memory.bytes[2 * KIB :] == 1).all()


@pytest.mark.mooncake
def test_wrong_size_is_told_apart_and_harms_no_neighbour(mooncake_store, make_memory, unique):
    store, memory = mooncake_store, make_memory(mooncake_store, 64 * KIB)
    memory.fill(2)
    expected = memory.bytes[:KIB].copy()
    keys = [unique("a"), unique("b"), unique("c"), unique("absent")]
    source = memory.address(0)
    store.put(keys[:3], [source] * 3, [KIB] * 3)
    memory.bytes[:] = 9
    targets = [memory.address(index * 16 * KIB) for index in range(4)]
    results = store.get(keys, targets, [KIB - 1, KIB, KIB + 1, KIB])
    assert outcomes(results) == [
        Outcome.WRONG_SIZE,
        Outcome.FETCHED,
        Outcome.WRONG_SIZE,
        Outcome.MISSING,
    ]
    np.testing.assert_array_equal(memory.bytes[16 * KIB : 17 * KIB], expected)
    assert (memory.bytes[33 * KIB :] == 9).all()


@pytest.mark.mooncake
def test_wrong_arguments_are_refused_before_anything_moves(mooncake_store, make_memory, unique):
    store, memory = mooncake_store, make_memory(mooncake_store, 4 * KIB)
    foreign = np.zeros(4 * KIB, dtype=np.uint8).ctypes.data
    a, b = unique("a"), unique("b")
    inside, last = memory.address(0), memory.address(3 * KIB)
    for call in (store.put, store.get):
        with pytest.raises(ArgumentError, match="more than once") as caught:
            call([a, b, a], [inside] * 3, [KIB] * 3)
        assert repr(a) in str(caught.value)
        with pytest.raises(ArgumentError, match="1 addresses for 2 keys"):
            call([a, b], [inside], [KIB, KIB])
        with pytest.raises(ArgumentError, match="3 sizes for 2 keys"):
            call([a, b], [inside, inside], [KIB] * 3)
        with pytest.raises(ArgumentError, match="empty key"):
            call([""], [inside], [KIB])
        for size in (0, -1, 2**31):
            with pytest.raises(ArgumentError, match=f"size is {size} bytes"):
                call([a], [inside], [size])
        with pytest.raises(ArgumentError, match="registered range") as caught:
            call([b, a], [inside, foreign], [KIB, KIB])
        assert repr(a) in str(caught.value)
        assert f"{foreign:#x}" in str(caught.value)
        assert "1024 bytes" in str(caught.value)
        with pytest.raises(ArgumentError, match="registered range"):
            call([a], [last], [KIB + 1])  # straddles the end
        assert call([], [], []) == []
    for call in (store.exists, store.remove):
        with pytest.raises(ArgumentError, match="more than once"):
            call([a, a])
        assert call([]) == []
    assert store.exists([a, b]) == [False, False]


@pytest.mark.mooncake
def test_registration_is_checked_by_our_own_books(mooncake_store):
    memory = np.zeros(16 * KIB, dtype=np.uint8)
    first = memory.ctypes.data + 4 * KIB
    mooncake_store.register(first, 4 * KIB)
    for address, num_bytes in (
        (first, 4 * KIB),
        (first + KIB, KIB),
        (first - KIB, 8 * KIB),
        (first - 1, 2),
        (first + 4 * KIB - 1, 2),
    ):
        with pytest.raises(ArgumentError, match="overlaps the registered range"):
            mooncake_store.register(address, num_bytes)
    mooncake_store.register(first + 4 * KIB, KIB)  # touches, and shares no byte
    with pytest.raises(ArgumentError, match="no registered range begins"):
        mooncake_store.unregister(first + KIB)
    mooncake_store.unregister(first)
    mooncake_store.unregister(first + 4 * KIB)
    mooncake_store.register(first, 5 * KIB)
    mooncake_store.unregister(first)
    with pytest.raises(ArgumentError, match="is 0, wanted 1 "):
        mooncake_store.register(0, 5)


def test_address_must_lie_in_one_range():
    ranges = RegisteredRanges()
    for index in (5, 1, 3, 4):
        ranges.add(index * 100, 50 if index < 4 else 100)
    ranges.check("k", 100, 50)
    ranges.check("k", 149, 1)
    ranges.check("k", 400, 100)
    for address, num_bytes in ((99, 1), (100, 51), (150, 1), (450, 51), (499, 2), (600, 1)):
        with pytest.raises(ArgumentError, match="'k'"):
            ranges.check("k", address, num_bytes)
        for addresses in ([address], range(address, address + 1), [address, 120], [420, address]):
            assert not ranges.hold(addresses, [num_bytes] * len(addresses))
    for addresses in (range(100, 150, 10), range(140, 90, -10), [140, 100], range(410, 490), []):
        assert ranges.hold(addresses, [10] * len(addresses))
    assert not ranges.hold(range(100, 150, 10), [11] * 5)
    ranges.remove(300)
    with pytest.raises(ArgumentError):
        ranges.check("k", 300, 1)


@pytest.mark.mooncake
def test_long_lists_are_split(local_master, local_owner, make_memory, unique):
    config = MooncakeConfig(local_master.address, max_call_bytes=10 * KIB, max_call_objects=3)
    with MooncakeStore(config) as store:
        calls = []
        write = store._calls.put_write
        store._calls.put_write = lambda keys, *lists: calls.append(len(keys)) or write(keys, *lists)
        memory = make_memory(store, 64 * KIB)
        memory.fill(3)
        expected = memory.bytes.copy()
        sizes = [KIB] * 7 + [8 * KIB, 8 * KIB, 20 * KIB, KIB]
        keys = [unique(str(index)) for index in range(len(sizes))]
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
        addresses = [memory.address(offset) for offset in offsets]
        assert outcomes(store.put(keys, addresses, sizes)) == [Outcome.STORED] * len(keys)
        # Each call's objects are a session of their own, whose first goes alone.
        assert calls == [1, 2, 1, 2, 1, 1, 1, 1, 1]
        memory.bytes[:] = 0
        assert store.exists(keys) == [True] * len(keys)
        assert outcomes(store.get(keys, addresses, sizes)) == [Outcome.FETCHED] * len(keys)
        used = sum(sizes)
        np.testing.assert_array_equal(memory.bytes[:used], expected[:used])
        assert outcomes(evict(store, keys)) == [Outcome.STORED] * len(keys)


@pytest.mark.mooncake
def test_two_writers_of_one_key(local_master, mooncake_store, make_memory, unique):
    key = unique("a")
    memory = make_memory(mooncake_store, 2 * KIB)
    memory.bytes[:KIB] = 5
    with MooncakeStore(MooncakeConfig(local_master.address)) as other:
        theirs = make_memory(other, KIB)
        theirs.bytes[:] = 7
        with other.put_session([key], [KIB]) as session:
            results = mooncake_store.put([key], [memory.address(0)], [KIB])
            assert results == [ObjectResult(Outcome.PENDING, "OBJECT_ALREADY_EXISTS")]
            assert mooncake_store.exists([key]) == [False]
            session.write([key], [theirs.address(0)], [KIB], [0])
            assert outcomes(session.finish()) == [Outcome.STORED]
        assert outcomes(mooncake_store.put([key], [memory.address(0)], [KIB])) == [Outcome.EXISTS]
        mooncake_store.get([key], [memory.address(KIB)], [KIB])
        assert (memory.bytes[KIB:] == 7).all()


@pytest.mark.mooncake
def test_racing_writers_leave_one_whole_object(mooncake_store, make_memory, unique):
    num_writers, size = 6, 256 * KIB
    memory = make_memory(mooncake_store, (num_writers + 1) * size)
    for writer in range(num_writers):
        memory.bytes[writer * size : (writer + 1) * size] = writer + 1
    for turn in range(5):
        key, results = unique(str(turn)), {}

        def put(writer, key=key, results=results):
            results[writer] = mooncake_store.put([key], [memory.address(writer * size)], [size])[0]

        threads = [threading.Thread(target=put, args=(w,)) for w in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        readable = (Outcome.STORED, Outcome.EXISTS)
        assert any(result.outcome in readable for result in results.values())
        assert all(r.outcome in (*readable, Outcome.PENDING) for r in results.values())
        target = memory.address(num_writers * size)
        assert outcomes(mooncake_store.get([key], [target], [size])) == [Outcome.FETCHED]
        got = memory.bytes[num_writers * size :]
        assert 1 <= got[0] <= num_writers
        assert (got == got[0]).all()


@pytest.mark.mooncake
def test_full_store_says_no_space(make_memory):
    with (
        LocalMaster() as master,
        LocalOwner(master.address, 16 * MIB),
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        memory = make_memory(store, 8 * MIB)
        source = memory.address(0)
        seen = []
        for index in range(4):
            seen += store.put([f"k{index}"], [source], [6 * MIB])  # leased: none can be evicted
        assert outcomes(seen[:2]) == [Outcome.STORED] * 2
        assert ObjectResult(Outcome.NO_SPACE, "NO_AVAILABLE_HANDLE") in seen[2:]
        with store.put_session(["session"], [8 * MIB]) as session:
            assert outcomes(session.start_results()) == [Outcome.NO_SPACE]


@pytest.mark.mooncake
def test_own_segment_serves_without_an_owner(make_memory):
    with LocalMaster() as master:
        config = MooncakeConfig(master.address, segment_bytes=32 * MIB)
        with MooncakeStore(config) as store:
            memory = make_memory(store, 2 * MIB)
            memory.fill(4)
            expected = memory.bytes[:MIB].copy()
            store.put(["a"], [memory.address(0)], [MIB])
            assert outcomes(store.get(["a"], [memory.address(MIB)], [MIB])) == [Outcome.FETCHED]
            np.testing.assert_array_equal(memory.bytes[MIB:], expected)


# ---- outages ----


@pytest.mark.mooncake
def test_master_dies_and_comes_back(make_memory):
    with (
        LocalMaster() as master,
        LocalOwner(master.address, 16 * MIB),
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        memory = make_memory(store, KIB)
        lists = ([memory.address(0)], [KIB])
        assert outcomes(store.put(["a"], *lists)) == [Outcome.STORED]
        master.kill()
        with pytest.raises(StoreUnavailable, match=master.address) as caught:
            store.exists(["a"])
        assert caught.value.code_name in ("RPC_FAIL", "RPC_TIMEOUT")
        assert not store.available
        begin_s = time.monotonic()
        for call in (
            lambda: store.exists(["a"]),
            lambda: store.put(["b"], *lists),
            lambda: store.get(["a"], *lists),
            lambda: store.remove(["a"]),
            lambda: store.put_session(["b"], [KIB]),
            lambda: store.get_session(["a"]),
        ):
            with pytest.raises(StoreUnavailable):
                call()
        assert time.monotonic() - begin_s < 0.2  # ungated, each blocks for over 4 s
        assert "kvferry-probe" in [thread.name for thread in threading.enumerate()]
        master.start()
        wait_until(lambda: store.available)
        assert store.exists(["a"]) == [False]  # a new master knows nothing
        wait_until(lambda: outcomes(store.put(["b"], *lists)) == [Outcome.STORED])
        assert outcomes(store.get(["b"], *lists)) == [Outcome.FETCHED]
    assert "kvferry-probe" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.mooncake
def test_close_is_quick_while_the_master_is_away():
    with LocalMaster() as master:
        store = MooncakeStore(MooncakeConfig(master.address))
        master.kill()
        with pytest.raises(StoreUnavailable):
            store.exists(["a"])
        begin_s = time.monotonic()
        store.close()
        assert time.monotonic() - begin_s < 6.0
        assert "kvferry-probe" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.mooncake
def test_owner_dies_and_another_comes(make_memory):
    with (
        LocalMaster(extra_flags=["--client_ttl=2"]) as master,
        LocalOwner(master.address, 16 * MIB) as owner,
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        memory = make_memory(store, KIB)
        lists = ([memory.address(0)], [KIB])
        assert outcomes(store.put(["a"], *lists)) == [Outcome.STORED]
        owner.kill()
        result = store.get(["a"], *lists)[0]
        assert result == ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
        assert store.available  # the master answers: no outage
        wait_until(lambda: not store.exists(["a"])[0])
        assert outcomes(store.get(["a"], *lists)) == [Outcome.MISSING]
        owner.start()
        wait_until(lambda: outcomes(store.put(["b"], *lists)) == [Outcome.STORED])
        assert outcomes(store.get(["b"], *lists)) == [Outcome.FETCHED]


# ---- connecting and closing ----


@pytest.mark.mooncake
def test_calls_after_close_raise(local_master):
    store = MooncakeStore(MooncakeConfig(local_master.address))
    memory = np.zeros(KIB, dtype=np.uint8)
    address = memory.ctypes.data
    store.register(address, KIB)
    session = store.get_session([])
    store.close()
    store.close()
    assert store.closed
    assert not store.available
    for call in (
        lambda: store.exists(["a"]),
        lambda: store.put(["a"], [address], [KIB]),
        lambda: store.get(["a"], [address], [KIB]),
        lambda: store.remove(["a"]),
        lambda: store.register(address + KIB, KIB),
        lambda: store.unregister(address),
        lambda: store.put_session(["a"], [KIB]),
        lambda: store.get_session(["a"]),
    ):
        with pytest.raises(StoreClosed):
            call()
    session.close()


@pytest.mark.mooncake
def test_close_during_calls_does_not_crash(local_master, local_owner):
    # In a process of its own, because what it guards against is a segmentation fault.
    program = f"""
        import threading, time, numpy as np
        from kvferry.errors import StoreClosed
        from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
        size, count = 32 << 20, 3
        store = MooncakeStore(MooncakeConfig({local_master.address!r}))
        memory = np.ones(count * size, dtype=np.uint8)
        store.register(memory.ctypes.data, memory.nbytes)
        keys = [f"closing/{{index}}" for index in range(count)]
        places = [memory.ctypes.data + index * size for index in range(count)]
        store.put(keys, places, [size] * count)
        ends = []
        def get(worker):
            try:
                with store.get_session(keys) as session:
                    while True:
                        store.get(keys, places, [size] * count)
                        session.read(keys, places, [size] * count, [0] * count)
            except StoreClosed:
                ends.append("closed")
        def put(worker):
            try:
                for turn in range(10**6):
                    names = [f"closing/{{worker}}/{{turn}}/{{index}}" for index in range(2)]
                    with store.put_session(names, [size] * 2) as session:
                        session.write(names, places[:2], [size] * 2, [0] * 2)
            except StoreClosed:
                ends.append("closed")
        threads = [threading.Thread(target=run, args=(w,)) for w, run in
                   enumerate([get, get, get, put, put])]
        for thread in threads: thread.start()
        time.sleep(0.5)
        closers = [threading.Thread(target=store.close) for _ in range(2)]
        for thread in closers: thread.start()
        for thread in closers + threads: thread.join(20)
        assert ends == ["closed"] * 5, ends
        assert threading.active_count() == 1, threading.enumerate()
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-3000:]


def test_nobody_at_the_masters_address():
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"nobody listens at master_address '127.0.0.1:1'"):
        MooncakeStore(MooncakeConfig("127.0.0.1:1"))
    assert time.monotonic() - begin_s < 3.0


@pytest.mark.mooncake
def test_refused_setup_names_the_code(local_master):
    with pytest.raises(StoreError, match=r"pigeon.*INTERNAL_ERROR") as caught:
        MooncakeStore(MooncakeConfig(local_master.address, protocol="pigeon"))
    assert caught.value.code == -1
    assert caught.value.code_name == "INTERNAL_ERROR"


def test_absent_mooncake_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"not installed.*kvferry\[cpu\]"):
        MooncakeStore(MooncakeConfig("127.0.0.1:1"))


def test_missing_shared_library_is_named(monkeypatch, tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file')"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoreError, match=r"can't be loaded: libibverbs.so.1.*libibverbs1"):
        MooncakeStore(MooncakeConfig("127.0.0.1:1"))
    for name in ("mooncake.store", "mooncake"):
        sys.modules.pop(name, None)


# ---- configuration ----


def test_configuration_from_environment():
    assert MooncakeConfig.from_environment({"MOONCAKE_MASTER": "a:1"}) == MooncakeConfig("a:1")
    full = MooncakeConfig.from_environment(
        {
            "MOONCAKE_MASTER": "etcd://a:1;b:2",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_DEVICE": "mlx5_0",
            "MOONCAKE_LOCAL_HOSTNAME": "me",
            "MOONCAKE_TE_META_DATA_SERVER": "http://meta",
            "UNRELATED": "x",
        }
    )
    assert full.master_endpoint() is None
    assert (full.device_name, full.local_hostname, full.metadata) == (
        "mlx5_0",
        "me",
        "http://meta",
    )
    with pytest.raises(ArgumentError, match="MOONCAKE_MASTER is not set"):
        MooncakeConfig.from_environment({"MOONCAKE_MASTER": ""})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master_address": "host"}, "master_address is 'host', wanted host:port"),
        ({"master_address": "host:0"}, "wanted host:port"),
        ({"master_address": " "}, "master_address is ' ', wanted more than blanks"),
        ({"protocol": ""}, "protocol is '', wanted a string of 1 or more"),
        ({"segment_bytes": -1}, "segment_bytes is -1, wanted 0 .."),
        ({"lease_ttl_s": 0}, "lease_ttl_s is 0, wanted a number, above 0"),
        ({"max_call_objects": 0}, "max_call_objects is 0, wanted 1 .."),
    ],
)
def test_bad_configuration_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        MooncakeConfig(**{"master_address": "a:1", **arguments})


def test_rdma_needs_its_device(monkeypatch, tmp_path):
    monkeypatch.setattr(mooncake_config, "_RDMA_DEVICES", tmp_path / "absent")
    with pytest.raises(ArgumentError, match="no RDMA device"):
        MooncakeConfig("a:1", protocol="rdma")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(mooncake_config, "_RDMA_DEVICES", tmp_path)
    MooncakeConfig("a:1", protocol="rdma")
    MooncakeConfig("a:1", protocol="rdma", device_name="mlx5_0")
    with pytest.raises(ArgumentError, match=r"\['mlx5_7'\] not among"):
        MooncakeConfig("a:1", protocol="rdma", device_name="mlx5_0,mlx5_7")


def test_master_endpoint():
    assert MooncakeConfig("[::1]:50051").master_endpoint() == ("::1", 50051)
    assert MooncakeConfig("10.0.0.1:1").master_endpoint() == ("10.0.0.1", 1)


# ---- faults that only a fake client shows ----


class FakeClient:
    """Answers every call with what the test wants."""

    def __init__(self):
        self.exist = [0]
        self.codes = [0]
        self.size = -704
        self.wait = lambda: None
        self.num_closed = 0

    def batch_is_exist(self, keys):
        self.wait()
        return self.exist

    def batch_put_from(self, keys, addresses, sizes):
        return self.codes

    def batch_get_into(self, keys, addresses, sizes):
        self.wait()
        return self.codes

    def get_size(self, key):
        return self.size

    def register_buffer(self, address, num_bytes):
        return 0

    def unregister_buffer(self, address):
        return 0

    def close(self):
        self.num_closed += 1
        return 0


@pytest.fixture
def fake(monkeypatch):
    client = FakeClient()
    monkeypatch.setattr(mooncake_module, "_connect", lambda config: client)
    store = MooncakeStore(MooncakeConfig("127.0.0.1:1", lease_ttl_s=0.2))
    store.register(4096, KIB)
    yield client, store
    client.wait = lambda: None
    store.close()


def test_answer_of_the_wrong_length_is_an_error(fake):
    client, store = fake
    client.exist = []
    with pytest.raises(StoreError, match="answered 0 codes for 1 keys"):
        store.exists(["a"])


@pytest.mark.parametrize("code", [-1, -900, -901])
def test_lookup_error_is_an_outage_and_never_missing(fake, code):
    client, store = fake
    client.exist = [code]
    with pytest.raises(StoreUnavailable) as caught:
        store.exists(["a"])
    assert caught.value.code == code
    assert not store.available


def test_unknown_codes_keep_their_number(fake):
    client, store = fake
    client.codes = [-123]
    assert store.get(["a"], [4096], [KIB]) == [ObjectResult(Outcome.FAILED, "UNKNOWN_-123")]
    assert code_name(-712) == "REPLICA_IS_GONE"


def test_get_that_outlasts_its_lease_is_void(fake):
    client, store = fake
    client.codes = [KIB]
    assert outcomes(store.get(["a"], [4096], [KIB])) == [Outcome.FETCHED]
    client.wait = lambda: time.sleep(0.25)
    results = store.get(["a"], [4096], [KIB])
    assert results == [ObjectResult(Outcome.LEASE_EXPIRED, "LEASE_EXPIRED")]
    client.wait = lambda: None
    client.codes = [-707]
    assert outcomes(store.get(["a"], [4096], [KIB])) == [Outcome.LEASE_EXPIRED]


def test_close_never_cuts_a_call_in_flight(fake):
    client, store = fake
    entered, leave = threading.Event(), threading.Event()
    client.wait = lambda: entered.set() or leave.wait(10.0)
    thread = threading.Thread(target=lambda: store.exists(["a"]))
    thread.start()
    assert entered.wait(5.0)
    with pytest.raises(StoreError, match="1 calls are still in flight"):
        store.close(timeout_s=0.1)
    assert client.num_closed == 0
    with pytest.raises(StoreClosed):
        store.exists(["a"])
    leave.set()
    store.close()
    store.close()
    assert client.num_closed == 1
    thread.join(5.0)


def test_client_without_sessions_is_told(fake):
    _, store = fake
    with pytest.raises(StoreError, match=r"no batch_put_session_start.*0\.3\.13"):
        store.put_session(["a"], [1])
    with pytest.raises(StoreError, match="sessions need"):
        store.get_session(["a"])
    with pytest.raises(StoreError, match="sessions need"):
        store.put(["a"], [4096], [KIB])
