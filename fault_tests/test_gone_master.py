"""The master is killed, restarted or frozen, before a transfer and in the midst of one."""

from collections.abc import Callable

import pytest
from bed import Bed, succeeded, words
from cluster import Cluster, within
from forms import SAVE_FORMS, SLACK_S, WHOLE, Form, name_of
from hooked import Do

from kvferry.errors import TransferFailed

RPC_S = 3.0  # MC_RPC_TIMEOUT_MS, see conftest.py
MANY_CALLS_S = 3 * RPC_S + SLACK_S

SAVE_CALLS = [
    (form, call)
    for form in SAVE_FORMS
    for call in ("exists", "put", "put_start", "put_write", "put_end")
]


def test_without_a_master_transfers_fail_at_once_and_nothing_exists(
    cluster: Cluster, bed: Bed, form: Form
) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    cluster.master.kill()
    with within(MANY_CALLS_S):
        moved = [bed.save(form, bed.keys(2), bed.sources(2)), bed.load(form, keys, targets)]
        for moving in moved:
            assert {word for end in moving.end() for word in words(end)} == {"unavailable"}
    with within(0.5):  # the breaker is open
        assert bed.linker.lookup(keys) == []
        again = bed.load(form, keys, targets).end()
    assert {word for end in again for word in words(end)} == {"unavailable"}
    bed.check_poisoned(targets)
    cluster.heal()
    bed.check_after(form)


def test_a_frozen_master_costs_one_time_limit(cluster: Cluster, bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(4)
    with cluster.frozen(cluster.master), within(MANY_CALLS_S):
        moved = [
            bed.save(form, bed.keys(2), bed.sources(2)),
            bed.load(form, keys, bed.targets(pages)),
        ]
        for moving in moved:
            assert {word for end in moving.end() for word in words(end)} == {"unavailable"}
        assert bed.linker.lookup(keys) == []
    cluster.heal()
    bed.check_after(form)


@pytest.mark.parametrize(("form", "call"), SAVE_CALLS, ids=name_of)
@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_a_master_that_goes_in_the_midst_of_a_save(
    cluster: Cluster, bed: Bed, form: Form, call: str, how: str
) -> None:
    bed.store.before[call] = Do(gone(cluster, how))
    keys, pages = bed.keys(4), bed.sources(4)
    with within(MANY_CALLS_S + SLACK_S):
        (end,) = bed.save(form, keys, pages).end()
    allowed = {"unavailable", "session lost", "missing", "transport", "no space"}
    assert set(words(end)) <= allowed
    if how == "killed":
        assert set(words(end)) == {"unavailable"}
    cluster.heal()
    # Whatever it says was stored can be loaded, and nothing else can.
    held = bed.store.store.exists(bed.object_keys(keys))
    if isinstance(end, TransferFailed):
        assert not any(held)
    else:
        assert sum(held) == succeeded(end).num_objects
    bed.check_after(form)


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_a_master_that_goes_before_a_whole_load(cluster: Cluster, bed: Bed, how: str) -> None:
    keys, pages = bed.saved(4)
    bed.store.before["get"] = Do(gone(cluster, how))
    with within(MANY_CALLS_S):
        (end,) = bed.load(WHOLE, keys, bed.targets(pages)).end()
    # The first call after a restart may still go to the old connection.
    assert words(end)[0] in ("unavailable", "missing")
    if how == "killed":
        assert words(end) == ["unavailable"]
    cluster.heal()
    bed.check_after(WHOLE)


@pytest.mark.parametrize("how", ["killed", "restarted"])
@pytest.mark.parametrize(("call", "nth"), [("get_session", 0), ("read", 0), ("read", 1)])
def test_a_master_that_goes_in_the_midst_of_a_load_by_layer(
    cluster: Cluster, bed: Bed, layered: Form, how: str, call: str, nth: int
) -> None:
    keys, pages = bed.saved(4)
    bed.store.before[call] = Do(gone(cluster, how), nth)
    targets = bed.targets(pages)
    with within(MANY_CALLS_S):
        ends = bed.load(layered, keys, targets).end()
    # A session that is open reads from the owner without the master, as long as its lease lasts.
    allowed = {"unavailable", "missing", "lease expired", "transport"}
    found = {word for end in ends for word in words(end)}
    assert found <= allowed
    if not found:
        bed.check_loaded(targets)
    if call == "get_session":
        assert found
    cluster.heal()
    bed.check_after(layered)


def gone(cluster: Cluster, how: str) -> Callable[[], None]:
    """Return what kills the master, or restarts it empty."""

    def fault() -> None:
        cluster.master.kill()
        if how == "restarted":
            cluster.master.start()

    return fault
