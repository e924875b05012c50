"""A forward pass reads layer after layer of a load that is under way, in any order it likes."""

import threading
from collections.abc import Callable

import pytest
from hooked import Pause
from prompts import Request, tokens, wait_for, within
from tree import Engine

from kvferry.testing import check_telling

Make = Callable[..., Engine]


@pytest.fixture(params=["mha", "empty_layers"])
def engine(request: pytest.FixtureRequest, make: Make) -> Engine:
    """An engine whose store has a prompt of four pages, each layer of which travels apart."""
    engine = make(request.param, "rust", settings={"wait_timeout_s": 8.0, "fetch_ahead": 0})
    engine.prefill(tokens(4 * 64))
    engine.settle()
    engine.flush()
    return engine


def started(engine: Engine) -> Request:
    """Start a load of the prompt."""
    request = engine.match(tokens(4 * 64))
    assert engine.load_back(request)
    assert engine.start() >= 0
    return request


def check_layers(engine: Engine, request: Request, end: int) -> None:
    """Check the bytes of layers `0 .. end - 1`."""
    for space, (pages, tags) in engine.wanted(request).items():
        check_telling(engine.layout, space, pages, tags, layers=range(end))


def test_a_layer_is_there_before_the_last(engine: Engine) -> None:
    last = engine.kind.num_layers - 1
    full_of_bytes = {buffer.layer_id for row in engine.layout.buffers.values() for buffer in row}
    pause = engine.store.before["read"] = Pause(nth=len(full_of_bytes) - 1)
    request = started(engine)
    wait_until = engine.linker.layer_done_counter.wait_until
    for layer in range(last):  # layers that own nothing too
        wait_until(layer)
    check_layers(engine, request, last)
    pause.wait()
    asked = threading.Thread(target=wait_until, args=(last,))
    asked.start()
    asked.join(0.2)
    assert asked.is_alive(), "the last layer has not come"
    pause.release()
    asked.join(5.0)
    assert not asked.is_alive()
    check_layers(engine, request, last + 1)
    assert engine.finish(request) == []


def test_any_order_any_number_of_times(engine: Engine) -> None:
    request = started(engine)
    last = engine.kind.num_layers - 1
    wait_until = engine.linker.layer_done_counter.wait_until
    for layer in (1, 0, last, 0, last, 1, last + 1, last + 40):
        wait_until(layer)
        check_layers(engine, request, min(layer, last) + 1)
    with within(0.5):
        for _ in range(10_000):
            wait_until(last)
    assert engine.finish(request) == []
    with within(0.5):
        wait_until(last)  # by a batch that has ended: nothing to wait for


def test_a_full_graph_waits_for_the_last_layer_alone(engine: Engine) -> None:
    request = started(engine)
    counter = engine.linker.layer_done_counter
    assert counter.num_layers == engine.kind.num_layers
    counter.wait_until(counter.num_layers - 1)
    check_layers(engine, request, engine.kind.num_layers)
    assert engine.finish(request) == []


def test_a_batch_without_loads_waits_for_nothing(engine: Engine) -> None:
    pause = engine.store.before["read"] = Pause()
    request = started(engine)
    counter = engine.linker.layer_done_counter
    assert counter.consumer_index >= 0
    counter.set_consumer(-1)  # a decode step beside it
    assert counter.consumer_index == -1
    with within(0.5):
        for layer in range(engine.kind.num_layers):
            engine.kind.read_layer(layer)
    pause.release()
    assert engine.finish(request) == []
    assert engine.cache.ready_to_load_host_cache() == -1


def test_two_batches_under_way(engine: Engine) -> None:
    linker = engine.linker
    pause = engine.store.before["read"] = Pause()
    first = started(engine)
    engine.cache.linker.inflight_load_rids.clear()  # SGLang finishes one before it starts another
    index = linker.layer_done_counter.consumer_index
    second = started(engine)
    later = linker.layer_done_counter.consumer_index
    assert later > index >= 0
    pause.release()
    for batch, request in ((later, second), (index, first), (later, second)):
        linker.layer_done_counter.set_consumer(batch)
        engine.forward(request)
    assert linker.finish_layer_wise_loading(later)
    assert linker.finish_layer_wise_loading(index)


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("name", ["gdn", "kda_mla", "swa_states", "empty_layers"])
def test_states_are_waited_for_too(name: str, core: str, make: Make) -> None:
    engine = make(name, core)
    counter = engine.linker.layer_done_counter
    assert engine.kind.requests.layer_transfer_counter is counter
    assert engine.kind.kvcache.layer_transfer_counter is counter


def test_a_layer_that_never_comes_is_waited_for_no_longer_than_said(make: Make) -> None:
    engine = make(settings={"wait_timeout_s": 0.5})
    engine.prefill(tokens(4 * 64))
    engine.settle()
    engine.flush()
    pause = engine.store.before["read"] = Pause()
    request = started(engine)
    with within(5.0):
        engine.kind.read_layer(0)  # raises nothing
        engine.kind.read_layer(2)
    release = threading.Timer(0.5, pause.release)
    release.start()
    assert engine.finish(request) == [request.rid]
    release.join()
    wait_for(lambda: engine.store.count("close") > 0)
