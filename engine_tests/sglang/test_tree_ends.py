"""Loads that are cancelled, refused or flushed away, offloads in their order, and the end."""

import threading
from collections.abc import Callable

import pytest
import torch
from damage import filled
from hooked import Pause
from prompts import tags_of, tokens, wait_for, within
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from tree import POISON, Engine

CORES = pytest.mark.parametrize("core", ["python", "rust"])
Make = Callable[..., Engine]


@CORES
@pytest.mark.parametrize("name", ["mha", "swa_states"])
def test_a_queued_load_is_cancelled(name: str, core: str, make: Make) -> None:
    engine = make(name, core)
    prompt = filled(engine)
    request = engine.match(prompt)
    assert engine.load_back(request)
    engine.cache.linker.release_request(request.rid)  # as SGLang's abort does
    assert not engine.linker.cancel_queued_load(request.rid), "it is gone already"
    assert engine.start() == -1
    assert engine.finish(request) == []
    assert all((storage == POISON).all() for storage in engine.memory.storages)


def test_a_cancelled_load_leaves_the_others(make: Make) -> None:
    engine = make("swa")
    prompt = filled(engine)
    dropped, kept = engine.match(prompt), engine.match(prompt)
    assert engine.load_back(dropped)
    assert engine.load_back(kept)
    engine.cache.linker.release_request(dropped.rid)
    before = engine.memory.copy()
    assert engine.start() >= 0
    engine.forward(kept)
    assert engine.finish(kept) == []
    engine.check_all(before, kept)


def test_a_started_load_is_not_cancelled(make: Make) -> None:
    engine = make()
    prompt = filled(engine)
    request = engine.match(prompt)
    assert engine.load_back(request)
    assert engine.start() >= 0
    assert not engine.linker.cancel_queued_load(request.rid)
    assert engine.finish(request) == []


@CORES
@pytest.mark.parametrize("name", ["mha", "swa_states"])
def test_a_refused_load_gives_its_slots_back(name: str, core: str, make: Make) -> None:
    engine = make(name, core)
    prompt = filled(engine)
    first = engine.match(prompt, "twice")
    assert engine.load_back(first)
    allocator, requests = engine.kind.allocator, engine.kind.requests
    free = allocator.available_size()
    states = requests.mamba_allocator.available_size() if engine.kind.has_states else 0
    second = engine.match(prompt, "twice")
    engine.cache.linker.private_load_indices.clear()
    assert engine.load_back(second) == 0, "a second load of one request"
    assert allocator.available_size() == free
    if engine.kind.has_states:
        assert requests.mamba_allocator.available_size() == states
    before = engine.memory.copy()
    assert engine.start() >= 0  # the first one stands
    assert engine.finish(first) == []
    engine.check_all(before, first)


def test_transfers_that_fit_no_pool_are_refused(make: Make) -> None:
    engine = make("swa")
    slots = torch.arange(64, 192)
    full = PoolTransfer(name=PoolName.KV, keys=["a", "b"], device_indices=slots)
    torn = PoolTransfer(name=PoolName.KV, keys=["a", "b"], device_indices=slots + 1)
    few = PoolTransfer(name=PoolName.KV, keys=["a", "b"], device_indices=slots[:64])
    twice = PoolTransfer(name=PoolName.KV, keys=["a", "a"], device_indices=slots)
    state = PoolTransfer(name=PoolName.MAMBA, keys=["b"], device_indices=slots[:1])
    none = PoolTransfer(name=PoolName.KV, keys=[])
    for bad in ([torn], [few], [twice], [full, state], [full, full], [none], []):
        assert not engine.linker.load("r", bad)
        assert not engine.linker.offload(bad)
    assert engine.linker.start_layer_wise_loading() == -1
    assert engine.linker.num_completed_offloads() == 0
    assert engine.linker.lookup("r", [none]) == engine.linker.lookup("r", []) == []


@pytest.mark.parametrize("name", ["mha", "swa_states"])
def test_a_flush_ends_loads_under_way(name: str, make: Make) -> None:
    engine = make(name)
    prompt = filled(engine)
    pause = engine.store.before["read"] = Pause()
    request = engine.match(prompt)
    assert engine.load_back(request)
    queued = engine.match(prompt)
    assert engine.start() >= 0
    assert engine.load_back(queued)
    pause.wait()
    with within(5.0):
        engine.flush()  # poisons the pools
    assert engine.linker.layer_done_counter.consumer_index == -1
    pause.release()
    wait_for(lambda: engine.store.count("close") > 0)  # the load's session has ended
    assert all((storage == POISON).all() for storage in engine.memory.storages)
    assert engine.start() == -1, "the queued load is forgotten"
    engine.load(engine.match(prompt))


def test_a_flush_ends_offloads_under_way(make: Make) -> None:
    engine = make("swa")
    prompts = [tokens(3 * 64, branch) for branch in range(3)]
    pause = engine.store.before["put"] = Pause()
    engine.prefill(prompts[0])
    pause.wait()
    for prompt in prompts[1:]:
        engine.prefill(prompt)
    with within(5.0):
        engine.flush()
    assert engine.linker.num_completed_offloads() == 0
    assert not engine.cache.linker.pending_offloads
    pause.release()
    engine.prefill(tokens(3 * 64, 9))
    engine.settle()  # one worker: what was before it has ended
    engine.flush()
    for prompt in prompts:  # what is there is right, and what was not begun is not there
        request = engine.match(prompt)
        if request.match.host_hit_length:
            assert prompt is prompts[0]
            engine.load(request)


def test_verdicts_come_in_the_order_of_the_offloads(make: Make) -> None:
    engine = make()
    pause = engine.store.before["put"] = Pause()
    engine.prefill(tokens(2 * 64))
    engine.prefill(tokens(2 * 64, branch=1))
    pause.wait()
    assert len(engine.cache.linker.pending_offloads) == 2
    # The second one ends first: its worker is done with it, the first is still under way.
    first, second = engine.linker._offloads._waiting
    second.wait_begun(5.0)
    second.give_up("for the test", "cancelled")
    assert second.done()
    assert not first.done()
    assert engine.linker.num_completed_offloads() == 0
    with pytest.raises(IndexError, match="no offload has completed"):
        engine.linker.pop_completed_offload()
    pause.release()
    wait_for(lambda: engine.linker.num_completed_offloads() == 2)
    assert [engine.linker.pop_completed_offload() for _ in range(2)] == [True, False]
    assert engine.linker.num_completed_offloads() == 0


def test_threads_end_with_the_engine(make: Make) -> None:
    def ours() -> list[str]:
        return [each.name for each in threading.enumerate() if "kvferry" in each.name]

    assert ours() == []
    engine = make("swa", own_client=True)
    filled(engine)
    assert "kvferry-sglang-loads" in ours()
    pause = engine.store.before["put"] = Pause()
    engine.prefill(tokens(64, 3))
    pause.wait()
    threading.Timer(0.3, pause.release).start()
    engine.close()
    engine.close()
    engine.linker.close()
    wait_for(lambda: ours() == [], 5.0)
    assert not engine.linker.load("late", [])
    assert engine.linker.lookup("late", [PoolTransfer(name=PoolName.KV, keys=["a"])]) == []


def test_tags_tell_prompts_apart() -> None:
    one, other = tags_of(tokens(4 * 64, 0, 64), 64), tags_of(tokens(4 * 64, 1, 64), 64)
    assert one[0] == other[0]
    assert len({*one, *other}) == 7
