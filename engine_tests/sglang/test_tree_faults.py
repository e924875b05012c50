"""What goes wrong between a prefix tree and its store: nothing wrong is served, nothing hangs."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hooked import Pause
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from tree import POISON, Engine, Request, tags_of, tokens, wait_for

from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome
from kvferry.trailer import stored_bytes

CORES = pytest.mark.parametrize("core", ["python", "rust"])
SPACES = pytest.mark.parametrize("space", ["full", "swa", "state"])
Make = Callable[..., Engine]


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if the body takes longer than its bound."""
    begin_s = time.monotonic()
    yield
    taken_s = time.monotonic() - begin_s
    assert taken_s < limit_s, f"took {taken_s:.1f} s, wanted at most {limit_s:g} s"


def page_keys(engine: Engine, prompt: Sequence[int]) -> list[str]:
    """SGLang's keys of a prompt's pages."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(prompt, page_size=engine.kind.page_size))


def object_key(engine: Engine, prompt: Sequence[int], page: int, space: str) -> str:
    """The key of one page's object."""
    return engine.linker.linker.keys.object_keys(page_keys(engine, prompt), space)[page]


def remove(engine: Engine, prompt: Sequence[int], page: int, space: str) -> None:
    """Take an object out of the store, as its eviction does."""
    (result,) = engine.store.remove([object_key(engine, prompt, page, space)], force=True)
    assert result.outcome is Outcome.STORED


def corrupt(engine: Engine, prompt: Sequence[int], page: int, space: str) -> None:
    """Change one bit of an object."""
    key = object_key(engine, prompt, page, space)
    size = stored_bytes(engine.layout.object_bytes[space], engine.layout.num_layers)
    staging = StagingBuffer(size, device=torch.device("cpu"))
    store = engine.store.store
    staging.register(store)
    try:
        (got,) = store.get([key], [staging.address], [size])
        assert got.outcome is Outcome.FETCHED
        staging.tensor[engine.layout.object_bytes[space] // 2] ^= 0x10
        store.remove([key], force=True)
        (put,) = store.put([key], [staging.address], [size])
        assert put.outcome is Outcome.STORED
    finally:
        staging.unregister()


def filled(engine: Engine, num_pages: int = 5) -> Any:
    """Store a prompt, forget it on the device, and return it."""
    prompt = tokens(num_pages * engine.kind.page_size)
    engine.prefill(prompt)
    engine.settle()
    engine.flush()
    return prompt


def all_but(engine: Engine, requests: Sequence[Request]) -> list[torch.Tensor]:
    """The pools' bytes, with those of the requests' destinations poisoned."""
    before = engine.memory.copy()
    for request in requests:
        for space, (pages, _) in engine.wanted(request).items():
            for buffer in engine.layout.buffers[space]:
                for page in pages:
                    poison_page(buffer, page)
    poisoned = engine.memory.copy()
    engine.memory.restore(before)
    return poisoned


def poison_page(buffer: Any, page: int) -> None:
    """Fill one page of a buffer."""
    from kvferry.testing import pages_of

    rows = pages_of(buffer.pool, buffer.tensor)
    byte = torch.full((rows.element_size(),), POISON, dtype=torch.uint8)
    rows[page] = byte.view(rows.dtype).item()


def fail_load(engine: Engine, *requests: Request) -> None:
    """Start the requests' loads, read all layers, and see that SGLang aborts all of them."""
    before = all_but(engine, requests)
    assert engine.start() >= 0
    for layer in range(engine.kind.num_layers):
        engine.kind.read_layer(layer)  # a forward pass that has begun goes on
    assert engine.finish(*requests) == [request.rid for request in requests]
    assert all(request.skip_radix_cache_insert for request in requests)
    for got, wanted in zip(all_but(engine, requests), before, strict=True):
        assert torch.equal(got, wanted), "a failed load wrote elsewhere"


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
def test_a_corrupted_object(space: str, core: str, make: Make) -> None:
    engine = make("swa_states", core)
    prompt = filled(engine)
    corrupt(engine, prompt, 4, space)
    request = engine.match(prompt)
    assert engine.load_back(request) == len(prompt)
    fail_load(engine, request)
    assert engine.match(prompt).match.host_hit_length == 0, "known to be bad for a while"
    engine.flush()
    engine.prefill(prompt)  # it is computed, and replaces what was bad
    engine.settle()
    engine.flush()
    engine.load(engine.match(prompt))


def test_a_corrupted_object_that_nobody_computes_anew(make: Make) -> None:
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
