"""Other writers: of the same keys at the same time, and of a key that they take over."""

import time
from collections.abc import Callable

import pytest
import torch
from bed import Bed, reasons, succeeded, words
from cluster import DISCARD_S, LEASE_TTL_S, Cluster
from forms import LAYERS, SAVE_FORMS, WHOLE, Form
from hooked import Do, Pause

from kvferry.linker.eviction import evict
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome


class Rival:
    """Another client that writes whole objects of one byte."""

    def __init__(self, store: MooncakeStore) -> None:
        self.store = store
        self._staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
        self._staging.tensor.fill_(7)
        self._staging.register(store)

    def write(self, key: str, num_bytes: int) -> None:
        """Take a key over, and store an object under it."""
        with self.store.put_session([key], [num_bytes]) as session:
            assert session.start_results()[0].outcome is Outcome.STORED
            session.write([key], [self._staging.address], [num_bytes], [0])
            assert session.finish()[0].outcome is Outcome.STORED


@pytest.fixture(scope="module")
def rival(cluster: Cluster) -> Rival:
    return Rival(cluster.client())


@pytest.fixture(scope="module")
def careless(cluster: Cluster) -> MooncakeStore:
    """A client that writes into sessions longer than the master allows."""
    return cluster.client(session_max_age_s=60.0)


def size_of(bed: Bed, space: str, key: str) -> int:
    """Return an object's size as stored."""
    size: int = bed.store.store.client.get_size(key)
    assert size > 0, (space, key)
    return size


def test_a_key_that_another_has_open_fails_alone(bed: Bed, save_form: Form, rival: Rival) -> None:
    keys, pages = bed.keys(4), bed.sources(4)
    (theirs,) = bed.linker.keys.object_keys(keys[1:2], "full")
    with rival.store.put_session([theirs], [1024]):
        (end,) = bed.save(save_form, keys, pages).end()
        assert succeeded(end).num_objects == 11
        assert list(succeeded(end).failures) == [theirs]
        assert words(end) == ["pending"]
        targets = bed.targets(pages)
        for load_form in (save_form, WHOLE):
            (end,) = bed.load(load_form, keys, targets).end()
            assert words(end) == ["missing"]
            assert reasons(end) == {theirs: "missing (REPLICA_IS_NOT_READY)"}
    (end,) = bed.save(save_form, keys, pages).end()  # they gave it up
    assert (succeeded(end).num_objects, succeeded(end).num_existing) == (1, 11)
    bed.load(save_form, keys, targets).result()
    bed.check_loaded(targets)
    bed.check_after(save_form)


@pytest.mark.parametrize("first", SAVE_FORMS, ids=lambda form: f"first-{form.name}")
def test_two_writers_of_the_same_keys(
    cluster: Cluster, make_bed: Callable[..., Bed], save_form: Form, first: Form, rival: Rival
) -> None:
    beds = [
        make_bed(namespace=f"shared-{save_form.name}-{first.name}", store=store)
        for store in (cluster.store, rival.store)
    ]
    keys, pages = beds[0].keys(8), beds[0].sources(8)
    assert (beds[1].keys(8), beds[1].sources(8)) == (keys, pages)
    # The first one is held where its lookup has said that nothing is there.
    pause = Pause()
    beds[0].store.before["put"] = pause
    slow = beds[0].save(first, keys, pages)
    pause.wait()
    quick = beds[1].save(save_form, keys, pages)
    ends = quick.end()
    pause.release()
    ends += slow.end()
    assert {word for end in ends for word in words(end)} <= {"pending"}
    # Each object was stored by one of them, whole, and whoever it was, its bytes are right.
    assert sum(succeeded(end).num_objects for end in ends) >= 24
    for bed in beds:
        assert bed.linker.lookup(keys) == list(range(1, 9))
        targets = bed.targets(pages)
        bed.load(WHOLE, keys, targets).result()
        bed.check_loaded(targets)
        bed.check_after(save_form)


def test_writers_that_race_leave_whole_objects(
    cluster: Cluster, make_bed: Callable[..., Bed], rival: Rival
) -> None:
    beds = [make_bed(namespace="race", store=store) for store in (cluster.store, rival.store)]
    for _ in range(3):
        keys, pages = beds[0].keys(6), beds[0].sources(6)
        assert (beds[1].keys(6), beds[1].sources(6)) == (keys, pages)
        saves = [bed.save(form, keys, pages) for bed in beds for form in (LAYERS, WHOLE)]
        ends = [end for save in saves for end in save.end()]
        assert {word for end in ends for word in words(end)} <= {"pending"}
        targets = beds[0].targets(pages)
        beds[0].load(WHOLE, keys, targets).result()
        beds[0].check_loaded(targets)
        beds[1].targets(pages)  # so that both hand out the same pages
    for bed in beds:
        bed.check_after(LAYERS)


def test_a_session_that_another_took_over_publishes_nothing(
    make_bed: Callable[..., Bed], careless: MooncakeStore, rival: Rival
) -> None:
    bed = make_bed(store=careless)
    probe, _ = bed.saved(1)
    (known,) = bed.linker.keys.object_keys(probe, "full")
    num_bytes = size_of(bed, "full", known)
    keys, pages = bed.keys(4), bed.sources(4)
    (key,) = bed.linker.keys.object_keys(keys[1:2], "full")

    def take_over() -> None:
        time.sleep(DISCARD_S + 0.3)
        rival.write(key, num_bytes)

    bed.store.before["put_write"] = Do(take_over)
    (end,) = bed.save(LAYERS, keys, pages).end()
    assert key in succeeded(end).failures
    assert set(words(end)) == {"session lost"}
    (end,) = bed.save(LAYERS, keys, pages).end()  # the others are stored by another session
    assert (succeeded(end).failures, succeeded(end).num_existing) == ({}, 1)
    # What the other one wrote is no object of ours, and never reaches a page.
    targets = bed.targets(pages)
    (end,) = bed.load(WHOLE, keys, targets).end()
    assert (words(end), list(reasons(end))) == (["foreign"], [key])
    bed.check_poisoned(targets)
    evict(bed.store.store, [key])
    assert succeeded(bed.save(LAYERS, keys, pages).end()[0]).failures == {}
    bed.load(LAYERS, keys, targets).result()
    bed.check_loaded(targets)
    bed.check_after(LAYERS)


def test_a_save_that_took_too_long_publishes_nothing(
    cluster: Cluster, make_bed: Callable[..., Bed]
) -> None:
    bed = make_bed(store=cluster.client(session_max_age_s=0.4))
    keys, pages = bed.keys(4), bed.sources(4)
    bed.store.before["put_write"] = lambda *_: time.sleep(0.6)  # of either try
    (end,) = bed.save(LAYERS, keys, pages).end()
    assert set(words(end)) == {"session too old"}
    assert set(succeeded(end).failures) == set(bed.object_keys(keys))
    assert not any(bed.store.store.exists(bed.object_keys(keys)))
    time.sleep(LEASE_TTL_S)
    bed.check_after(LAYERS)
