"""The owner of the memory is killed or frozen, before a transfer and in the midst of one."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from bed import Bed, words
from cluster import CLIENT_TTL_S, Cluster, wait_until, within
from forms import BATCH, LAYERS, SLACK_S, WHOLE, Form, Moving, name_of
from hooked import Do

from kvferry.linker import hung_owners

RECONNECT_S = 1.0  # Mooncake's pause before it tries a lost peer again, spent in the call
STATUS_S = 2.0  # MC_TCP_STATUS_TIMEOUT_SEC, see conftest.py
AT_ONCE_S = 2.0  # on a busy machine; less than any wait for an owner


def found(*movings: Moving) -> set[str]:
    return {word for moving in movings for end in moving.end() for word in words(end)}


def test_a_killed_owner_is_a_failure_and_then_a_miss(
    cluster: Cluster, bed: Bed, form: Form
) -> None:
    keys, pages = bed.saved(2)
    targets = bed.targets(pages)
    cluster.owner.kill()
    with within(8 * RECONNECT_S + SLACK_S):
        moved = [bed.save(form, bed.keys(2), bed.sources(2)), bed.load(form, keys, targets)]
        assert found(*moved) <= {"transport", "missing", "no space"}
        assert all(words(end) for moving in moved for end in moving.end())
    # Once the master has forgotten it, its objects are gone and there is no room.
    wait_until(lambda: bed.linker.lookup(keys) == [], CLIENT_TTL_S + 10)
    assert found(bed.load(form, keys, targets)) == {"missing"}
    time.sleep(hung_owners.HOLD_S)
    assert found(bed.save(form, bed.keys(2), bed.sources(2))) == {"no space"}
    bed.check_poisoned(targets)
    cluster.heal()
    bed.check_after(form)


@pytest.mark.parametrize(
    ("form", "nth"),
    [(WHOLE, 0), (LAYERS, 0), (LAYERS, 1), (BATCH, 1)],
    ids=name_of,
)
def test_an_owner_that_dies_in_the_midst(cluster: Cluster, bed: Bed, form: Form, nth: int) -> None:
    keys, pages = bed.saved(2)
    bed.store.before["read" if form.by_layer else "get"] = Do(cluster.owner.kill, nth)
    with within(8 * RECONNECT_S + SLACK_S):
        load = bed.load(form, keys, bed.targets(pages))
        assert found(load) <= {"transport", "missing"}
        assert all(words(end) for end in load.end())
    cluster.heal()
    bed.store.before.clear()
    bed.store.before["put_write"] = Do(cluster.owner.kill, nth)
    with within(8 * RECONNECT_S + SLACK_S):
        save = bed.save(form, bed.keys(2), bed.sources(2))
        assert found(save) <= {"transport", "missing", "no space"}
        assert all(words(end) for end in save.end())
    cluster.heal()
    bed.check_after(form)


def test_a_frozen_owner_costs_one_time_limit_and_its_span_is_kept_back(
    cluster: Cluster, bed: Bed, form: Form
) -> None:
    keys, pages = bed.saved(2)
    with cluster.frozen(cluster.owner):
        with within(5 * STATUS_S + SLACK_S):  # two ranges one after another, then whole objects
            moved = [
                bed.save(form, bed.keys(1), bed.sources(1)),
                bed.load(form, keys, bed.targets(pages)),
            ]
            for moving in moved:
                assert all(words(end) for end in moving.end())
                # The master forgets the owner at about the time when the first calls come back.
                assert found(moving) <= {"transport", "no space", "missing"}
        wait_until(lambda: bed.staging.num_held_bytes == 0)
        assert bed.staging.num_free_bytes < bed.staging.num_bytes  # bytes may still come or go
    cluster.heal()
    bed.check_after(form)


def test_an_owner_that_is_frozen_past_the_deadline(
    cluster: Cluster, make_bed: Callable[..., Bed], form: Form
) -> None:
    bed = make_bed(transfer_timeout_s=0.5)
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    with cluster.frozen(cluster.owner):
        with within(0.5 + SLACK_S):
            load = bed.load(form, keys, targets)
            assert found(load) == {"deadline"}
        bed.check_poisoned(targets)
    cluster.heal()
    bed.check_poisoned(targets)  # what arrives late lands nowhere
    bed.check_after(form)


@pytest.fixture
def lasting() -> Iterator[Cluster]:
    """A cluster whose master does not forget an owner while a test looks on."""
    with Cluster(["--client_ttl=60"]) as cluster:
        yield cluster


@pytest.mark.parametrize("way", ["frozen", "killed"])
@pytest.mark.parametrize("form", [WHOLE, LAYERS], ids=name_of)
def test_an_owner_that_does_not_answer_is_waited_for_once(
    lasting: Cluster, form: Form, way: str
) -> None:
    """Several parts, and several transfers: the first store call each way pays, no other does."""
    num_pages = 12
    bed = Bed(lasting, torch.device("cpu"), transfer_timeout_s=40.0, wait_timeout_s=60.0)
    keys, pages = bed.saved(num_pages)
    # Whole objects wait side by side, ranges one after another; those of a part that fails are
    # fetched whole, which is not tried any more. The first object is written alone.
    once_s = RECONNECT_S + (STATUS_S if way == "frozen" else 0)
    load_s = (8 if form.by_layer else 1) * once_s + SLACK_S
    save_s = once_s + SLACK_S
    with contextlib.ExitStack() as stack:
        if way == "frozen":
            stack.enter_context(lasting.frozen(lasting.owner))
        else:
            lasting.owner.kill()
        targets = [bed.targets(pages) for _ in range(2)]
        sources = [bed.sources(num_pages) for _ in range(2)]
        for turn, bound_s in enumerate((load_s, AT_ONCE_S)):
            with within(bound_s):
                assert found(bed.load(form, keys, targets[turn])) == {"transport"}
        for turn, bound_s in enumerate((save_s, AT_ONCE_S)):
            with within(bound_s):
                new = bed.keys(num_pages)
                assert found(bed.save(form, new, sources[turn])) == {"transport"}
        bed.check_pages()
    if way == "frozen":  # it has all that it had, and is waited for no longer than it was away
        lasting.heal()
        bed.load(form, keys, targets[0]).result()
        bed.check_loaded(targets[0])
    bed.close()
