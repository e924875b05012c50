"""Objects that are evicted between lookup and load, and leases that run out under a load."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from bed import Bed, reasons, words
from cluster import LEASE_TTL_S, Cluster, Filler, within
from forms import SLACK_S, Form

from kvferry.linker.eviction import evict


def test_objects_that_are_evicted_between_lookup_and_load(
    cluster: Cluster, make_bed: Callable[..., Bed], form: Form, filler: Filler
) -> None:
    bed = make_bed(miss_ttl_s=0.5)
    keys, pages = bed.saved(4)
    assert bed.linker.lookup(keys) == [1, 2, 3, 4]
    time.sleep(LEASE_TTL_S + 0.1)
    # By HTTP: any other question would lease them again.
    while set(cluster.ask("get_all_keys").split()) & set(bed.object_keys(keys)):
        if not filler.put():
            time.sleep(0.02)  # eviction runs in the background, every 10 ms
    targets = bed.targets(pages)
    with within(SLACK_S):
        ends = bed.load(form, keys, targets).end()
    assert {word for end in ends for word in words(end)} == {"missing"}
    assert all(words(end) for end in ends)
    assert {reason for end in ends for reason in reasons(end).values()} == {
        "missing (OBJECT_NOT_FOUND)"
    }
    bed.check_poisoned(targets)
    assert bed.linker.lookup(keys) == []
    filler.close()
    time.sleep(0.5)
    bed.check_after(form)


def test_one_object_that_is_gone_fails_its_request_alone(bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(4)
    assert bed.linker.lookup(keys) == [1, 2, 3, 4]
    (gone,) = bed.linker.keys.object_keys(keys[3:], "swa")
    evict(bed.store.store, [gone])
    targets = bed.targets(pages)
    with within(SLACK_S):
        ends = bed.load(form, keys, targets).end()
    assert words(ends[-1]) == ["missing"]
    assert reasons(ends[-1]) == {gone: "missing (OBJECT_NOT_FOUND)"}
    if form.name == "batch":
        assert words(ends[0]) == []
        bed.check_loaded(targets[:2])
    bed.check_after(form)


@pytest.mark.parametrize("how", ["after", "before"])
def test_bytes_that_come_after_their_lease_are_not_used(bed: Bed, form: Form, how: str) -> None:
    keys, pages = bed.saved(4)
    calls = bed.store.store._calls
    real_calls = {name: getattr(calls, name) for name in ("get_read", "get")}

    def slow(name: str) -> Callable[..., Any]:
        def call(*lists: Any) -> Any:
            if how == "before":  # Mooncake itself finds out
                time.sleep(LEASE_TTL_S + 0.1)
            answers = real_calls[name](*lists)
            if how == "after":  # kvferry finds out
                time.sleep(LEASE_TTL_S + 0.1)
            return answers

        return call

    targets = bed.targets(pages)
    with pytest.MonkeyPatch.context() as patch, within(12 * LEASE_TTL_S):
        # The delay is a fake one: no network on loopback is slower than a lease.
        for each in real_calls:
            patch.setattr(calls, each, slow(each))
        ends = bed.load(form, keys, targets).end()
    assert {word for end in ends for word in words(end)} == {"lease expired"}
    bed.check_poisoned(targets)
    bed.check_after(form)


def test_a_load_longer_than_its_lease_renews_it(bed: Bed, layered: Form) -> None:
    keys, pages = bed.saved(4)
    bed.store.before["read"] = lambda *_: time.sleep(0.8 * LEASE_TTL_S)
    targets = bed.targets(pages)
    ends = bed.load(layered, keys, targets).end()
    assert [words(end) for end in ends] == [[]] * len(ends)
    bed.check_loaded(targets)
    bed.check_after(layered)
