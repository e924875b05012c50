"""Memory that the master has given to others is never written, nor taken for ours."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from bed import Bed, words
from cluster import CLIENT_TTL_S, SEGMENT_BYTES, Cluster, wait_until
from forms import LAYERS

from kvferry.errors import StoreError, StoreUnavailable
from kvferry.linker import patience
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome

VICTIM_BYTES = 1 << 18
NUM_VICTIMS = SEGMENT_BYTES // VICTIM_BYTES * 3 // 4
LOST = ObjectResult(Outcome.FAILED, "SESSION_LOST")


class Victims:
    """Another client, whose objects fill most of the pool, each of a byte of its own."""

    def __init__(self, store: MooncakeStore) -> None:
        self.store = store
        self._staging = StagingBuffer(2 * VICTIM_BYTES, device=torch.device("cpu"))
        self._staging.register(store)
        self._keys: dict[str, int] = {}

    def is_served(self) -> bool:
        """Whether the store takes objects again: the owner has come back to the master."""
        key = f"served-{time.monotonic_ns()}"
        try:
            (result,) = self.store.put([key], [self._staging.address], [1 << 10])
        except StoreError:
            return False
        self.store.client.batch_remove([key], True)
        return result.outcome is Outcome.STORED

    def put(self, key: str, value: int, num_bytes: int = VICTIM_BYTES) -> None:
        """Store an object that holds one byte all over."""
        self._staging.tensor[:num_bytes] = value
        (result,) = self.store.put([key], [self._staging.address], [num_bytes])
        assert result.outcome is Outcome.STORED, result

    def fill(self, count: int = NUM_VICTIMS) -> None:
        """Store objects, leased by a lookup."""
        for number in range(count):
            key = f"victim-{time.monotonic_ns()}-{number}"
            self._keys[key] = number % 200 + 1
            self.put(key, self._keys[key])
        assert all(self.store.exists(list(self._keys)))

    def check(self) -> None:
        """Compare every byte of every object that is still there; nearly all are."""
        target, num_read = self._staging.tensor[VICTIM_BYTES:], 0
        for key, value in self._keys.items():
            target.zero_()
            address = self._staging.address + VICTIM_BYTES
            (result,) = self.store.get([key], [address], [VICTIM_BYTES])
            if result.outcome is Outcome.FETCHED:
                num_read += 1
                assert bool((target == value).all()), f"{key} was overwritten"
        assert num_read > len(self._keys) // 2

    def close(self) -> None:
        """Remove the objects."""
        self.store.client.batch_remove(list(self._keys), True)
        self._staging.unregister()


@pytest.fixture
def victims(cluster: Cluster) -> Iterator[Victims]:
    victims = Victims(cluster.client())
    yield victims
    victims.close()


def restarted(cluster: Cluster) -> None:
    cluster.master.kill()
    cluster.master.start()


def remounted(cluster: Cluster) -> None:
    """Freeze the owner until the master has dropped it, then let it come back, empty."""
    with cluster.frozen(cluster.owner):
        wait_until(lambda: not cluster.ask("get_all_segments").split(), 4 * CLIENT_TTL_S + 10)


FAULTS = [restarted, remounted]
Fault = Callable[[Cluster], None]


class Memory:
    """Registered bytes of the client under test: objects of VICTIM_BYTES, full of 255."""

    def __init__(self, store: MooncakeStore, count: int) -> None:
        self.staging = StagingBuffer(count * VICTIM_BYTES, device=torch.device("cpu"))
        self.staging.tensor.fill_(255)
        self.staging.register(store)
        first = self.staging.address
        self.addresses = [first + number * VICTIM_BYTES for number in range(count)]
        self.sizes = [VICTIM_BYTES] * count
        (result,) = store.put([f"first-{time.monotonic_ns()}"], [first], [16])  # it knows the owner
        assert result.outcome is Outcome.STORED


COUNT = 24


@pytest.fixture
def memory(cluster: Cluster) -> Iterator[Memory]:
    memory = Memory(cluster.store, COUNT)
    yield memory
    cluster.heal()
    memory.staging.unregister()


def after_outage(cluster: Cluster, call: Callable[[], list[ObjectResult]]) -> list[ObjectResult]:
    """Return what a call says once it is let through: the first one may meet a dead connection."""
    with contextlib.suppress(StoreUnavailable):
        return call()
    wait_until(lambda: cluster.store.available)
    return call()


def keys_of(what: str) -> list[str]:
    return [f"{what}-{time.monotonic_ns()}-{number}" for number in range(COUNT)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_wise_save_over_a_fault_that_nobody_notices(
    cluster: Cluster, bed: Bed, victims: Victims, fault: Fault
) -> None:
    keys, pages = bed.keys(16), bed.sources(16)
    save = bed.save(LAYERS, keys, pages, written=False)
    save.whole.layer_written(0)
    time.sleep(0.3)  # the first group is under way
    fault(cluster)
    wait_until(victims.is_served)
    victims.fill()
    (end,) = save.end()
    victims.check()
    # Nothing was reserved meanwhile, so nothing was lost, but the first call to another master.
    assert set(words(end)) <= {"unavailable"}
    wait_until(lambda: cluster.store.available)
    if fault is remounted:
        assert words(end) == []
        targets = bed.targets(pages)
        bed.load(LAYERS, keys, targets).result()
        bed.check_loaded(targets)
    bed.check_after(LAYERS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_put_session_over_a_fault_that_nobody_notices(
    cluster: Cluster, memory: Memory, victims: Victims, fault: Fault
) -> None:
    store, keys, half = cluster.store, keys_of("ours"), VICTIM_BYTES // 2
    with store.put_session(keys, memory.sizes) as session:
        halves = [half] * COUNT
        assert {r.outcome for r in session.write(keys, memory.addresses, halves, [0] * COUNT)} == {
            Outcome.STORED
        }
        fault(cluster)
        wait_until(victims.is_served)
        victims.fill()
        lists = (memory.addresses, halves, halves)
        results = after_outage(cluster, lambda: session.write(keys, *lists))
        assert results == [LOST] * COUNT
        victims.check()
        assert {result.code_name for result in session.finish()} == {"SESSION_LOST"}
    victims.check()
    assert not any(store.exists(keys))
    assert store.num_open_puts == 0


def test_a_put_session_whose_keys_another_writer_has_opened_meanwhile(
    cluster: Cluster, memory: Memory, victims: Victims
) -> None:
    # Then the master calls our keys «not ready», as it does while they are ours.
    store, keys = cluster.store, keys_of("both")
    with store.put_session(keys, memory.sizes) as session:
        restarted(cluster)
        wait_until(victims.is_served)
        with victims.store.put_session(keys, memory.sizes) as theirs:
            assert {r.outcome for r in theirs.start_results()} == {Outcome.STORED}
            victims.fill(NUM_VICTIMS // 2)
            lists = (memory.addresses, memory.sizes, [0] * COUNT)
            results = after_outage(cluster, lambda: session.write(keys, *lists))
            assert results == [LOST] * COUNT
            victims.check()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_get_session_over_a_fault_that_nobody_notices(
    cluster: Cluster, memory: Memory, victims: Victims, fault: Fault
) -> None:
    store, keys = cluster.store, keys_of("read")
    lists = (memory.addresses, memory.sizes)
    assert {r.outcome for r in store.put(keys, *lists)} == {Outcome.STORED}
    with store.get_session(keys) as session:
        fault(cluster)
        wait_until(victims.is_served)
        victims.fill()
        results = after_outage(cluster, lambda: session.read(keys, *lists, [0] * COUNT))
        assert {result.outcome for result in results} == {Outcome.MISSING}
        # One that was stored again meanwhile is read where it is now.
        victims.put(keys[0], 255)
        memory.staging.tensor.zero_()
        results = session.read(keys, *lists, [0] * COUNT)
        assert [result.outcome for result in results] == [
            Outcome.FETCHED,
            *[Outcome.MISSING] * (COUNT - 1),
        ]
        assert bool((memory.staging.tensor[:VICTIM_BYTES] == 255).all())
        assert not memory.staging.tensor[VICTIM_BYTES:].any()
    victims.check()


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    """One whose master does not forget an owner that hangs."""
    with Cluster(["--client_ttl=60"]) as cluster:
        yield cluster


@pytest.mark.parametrize("whole", [True, False], ids=["put", "session"])
def test_a_write_that_timed_out_is_revoked_only_once_nothing_can_land(
    patient: Cluster, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    store, key = patient.client(), keys_of("late")[0]
    memory = Memory(store, 1)
    revoked: list[str] = []
    revoke = store._calls.put_revoke
    monkeypatch.setattr(
        store._calls, "put_revoke", lambda keys: revoked.extend(keys) or revoke(keys)
    )
    lists = ([key], memory.addresses[:1], memory.sizes[:1])
    with patient.frozen(patient.owner):
        if whole:
            (result,) = store.put(*lists)
        else:
            with store.put_session([key], [VICTIM_BYTES]) as session:
                (result,) = session.write(*lists, [0])
        assert result == ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
        # The master goes on holding its memory for us.
        assert store._calls.get_start([key]) == [-703]
        assert store.num_open_puts == 1
    assert key not in revoked
    store.put_session(["other"], [16]).abort()
    assert key not in revoked
    time.sleep(patience.DRAIN_S + 0.1)
    store.put_session(["other"], [16]).abort()
    assert key in revoked
    assert store.num_open_puts == 0
    wait_until(lambda: store.put(*lists)[0].outcome is Outcome.STORED)
    memory.staging.unregister()


def test_keys_with_bytes_on_their_way_are_left_alone_by_close(
    patient: Cluster,
) -> None:
    store, key = patient.client(), keys_of("late")[0]
    memory = Memory(store, 1)
    revoked: list[str] = []
    revoke = store.client.batch_put_session_revoke
    with patient.frozen(patient.owner):
        (result,) = store.put([key], memory.addresses, memory.sizes)
        assert result.outcome is Outcome.FAILED

    class Watched:
        """The client, whose revocations are noted."""

        def __getattr__(self, name: str) -> object:
            return getattr(client, name)

        def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
            revoked.extend(keys)
            answers: list[int] = revoke(keys)
            return answers

    client = store.client
    store._calls.client = Watched()
    other = store.put_session(["other"], [16])
    assert other.start_results()[0].outcome is Outcome.STORED
    store.close()
    assert "other" in revoked
    assert key not in revoked
