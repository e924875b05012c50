"""Objects and stores that fail a prefix tree: nothing wrong is served, nothing hangs."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from damage import corrupt, fail_load, filled, remove
from prompts import tokens, wait_for, within
from tree import Engine

from kvferry.linker import lookup
from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner
from kvferry.linker.store import ObjectResult, Outcome

CORES = pytest.mark.parametrize("core", ["python", "rust"])
SPACES = pytest.mark.parametrize("space", ["full", "swa", "state"])
Make = Callable[..., Engine]
BRIEF_LEASE_S = 1.0


@pytest.fixture(scope="module")
def brief_leases() -> Iterator[str]:
    """A master whose leases end soon."""
    with (
        LocalMaster(lease_ttl_s=BRIEF_LEASE_S) as master,
        LocalOwner(master.address, 64 << 20, warm=False),
    ):
        yield master.address


@CORES
@SPACES
def test_an_object_that_is_evicted_between_match_and_load(
    space: str, core: str, make: Make
) -> None:
    engine = make("swa_states", core)
    prompt = filled(engine)
    request = engine.match(prompt)
    assert engine.load_back(request) == len(prompt)
    remove(engine, prompt, 4, space)
    fail_load(engine, request)
    assert engine.match(prompt).match.host_hit_length == 0
    again = engine.prefill(prompt)  # it is computed, stored again, and found
    engine.settle()
    engine.flush()
    assert len(again) == len(prompt)
    engine.load(engine.match(prompt))


@CORES
@SPACES
def test_a_corrupted_object(space: str, core: str, make: Make, brief_leases: str) -> None:
    engine = make("swa_states", core, master=brief_leases, settings={"lease_ttl_s": BRIEF_LEASE_S})
    prompt = filled(engine)
    corrupt(engine, prompt, 4, space)
    request = engine.match(prompt)
    assert engine.load_back(request) == len(prompt)
    fail_load(engine, request)
    assert engine.match(prompt).match.host_hit_length == 0, "known to be bad for a while"

    def computed_anew() -> bool:
        """Whether that has replaced what was bad: it may once nobody has it leased."""
        engine.flush()
        engine.prefill(prompt)
        engine.settle()
        engine.flush()
        return bool(engine.match(prompt).match.host_hit_length == len(prompt))

    wait_for(computed_anew)
    engine.load(engine.match(prompt))


def test_a_corrupted_object_that_nobody_computes_anew(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SPOILT_TTL_S", 2.0)
    engine = make("mha", settings={"miss_ttl_s": 2.0})
    prompt = filled(engine)
    corrupt(engine, prompt, 1, "full")
    request = engine.match(prompt)
    assert engine.load_back(request) == len(prompt)
    fail_load(engine, request)
    assert engine.match(prompt).match.host_hit_length == 64, "known to be bad for a while"
    wait_for(lambda: engine.match(prompt).match.host_hit_length == len(prompt))


@CORES
def test_one_bad_object_in_a_batch_of_two(core: str, make: Make) -> None:
    engine = make("mha", core)
    good, bad = tokens(4 * 64), tokens(4 * 64, branch=1)
    for prompt in (good, bad):
        engine.prefill(prompt)
    engine.settle()
    engine.flush()
    remove_later = engine.match(bad)
    requests = [engine.match(good), remove_later]
    for request in requests:
        assert engine.load_back(request)
    remove(engine, bad, 2, "full")
    fail_load(engine, *requests)  # SGLang aborts all requests of the batch
    engine.flush()
    engine.load(engine.match(good))


def test_a_store_that_is_gone(make: Make) -> None:
    settings = {"transfer_timeout_s": 4.0, "wait_timeout_s": 4.0, "rpc_timeout_s": 2.0}
    with LocalMaster() as master, LocalOwner(master.address, 32 << 20, warm=False) as owner:
        engine = make("swa", master=master.address, settings=settings)
        prompt = filled(engine)
        request = engine.match(prompt)
        assert engine.load_back(request)
        owner.kill()
        with within(12.0):
            fail_load(engine, request)
        request = engine.match(tokens(3 * 64, 7))  # the master is asked while it still lives
        master.kill()
        with within(12.0):
            assert engine.match(prompt).match.host_hit_length == 0
        with within(0.5):  # known to be gone: nobody waits again
            assert engine.match(prompt).match.host_hit_length == 0
        with within(12.0):
            engine.prefill(tokens(2 * 64, 8))
            engine.settle()
        assert engine.linker.linker.stats.snapshot()["transfers"]["save"]["failed"] > 0
        with within(20.0):
            engine.close()


def test_failed_transfers_keep_nothing_alive(make: Make) -> None:
    engine = make()
    good, bad = tokens(2 * 64), tokens(2 * 64, branch=1)
    gc.collect()
    gc.disable()  # SGLang freezes what is there
    try:
        engine.store.before["put"] = lambda keys, *_: [ObjectResult(Outcome.FAILED)] * len(keys)
        engine.prefill(bad)
        saved = weakref.ref(engine.linker._offloads._waiting[0].pages.page_ids["full"])
        engine.settle()
        engine.store.before.clear()
        engine.flush()
        for prompt in (good, bad):
            engine.prefill(prompt)
        engine.settle()
        engine.flush()
        request = engine.match(bad)
        assert engine.load_back(request)
        remove(engine, bad, 1, "full")
        loaded = weakref.ref(engine.linker._loads._queued[request.rid].page_ids["full"])
        fail_load(engine, request)
        engine.flush()
        engine.load(engine.match(good))  # threads remember their last transfer, and no more
        wait_for(lambda: saved() is None and loaded() is None, 3.0)
    finally:
        gc.enable()
