"""Two ranks or stages: hits need both, failures of either count, blocks wait for both."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import plan
import pytest
from engine import Engine, prompt
from hooked import Do, Pause
from test_failures import check
from vllm.config import ModelConfig

from kvferry.linker import vllm_setup
from kvferry.linker.eviction import evict

Make = Callable[..., Engine]


@pytest.fixture
def make_pair(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines of two ranks in one process; vLLM's process groups are stood in for."""

    def make_pair(name: str = "llama", **more: Any) -> Engine:
        ranks = iter(range(2))
        group = lambda: SimpleNamespace(rank_in_group=next(ranks), world_size=2)  # noqa: E731
        alone = lambda: SimpleNamespace(rank_in_group=0, world_size=1)  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(vllm_setup, "model_parallel_is_initialized", lambda: True)
            patched.setattr(vllm_setup, "get_tp_group", group)
            patched.setattr(vllm_setup, "get_pp_group", alone)
            return make(name, num_ranks=2, **more)

    return make_pair


def keys_of_rank(engine: Engine, rank: int) -> list[str]:
    """Return the object keys of a rank's saves."""
    worker = engine.workers[rank]
    told = worker.connector.get_handshake_metadata().keys.groups
    return [
        key
        for seen in worker.seen
        for save in seen.jobs.saves
        for group_id, pages in save.pages.items()
        for key in told[group_id].object_keys(pages.keys)
    ]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v32"])
def test_round_trip(name: str, make_pair: Make) -> None:
    first, second = make_pair(name), make_pair(name)
    first.ask(prompt(200), 4)
    answer = second.ask(prompt(200), 4)
    assert (answer.num_external, answer.is_right) == (192, True)
    check(first, second)


def test_a_hit_needs_the_objects_of_both(make_pair: Make) -> None:
    first, second = make_pair(), make_pair()
    first.ask(prompt(200))
    ours, theirs = keys_of_rank(first, 0), keys_of_rank(first, 1)
    assert not set(ours) & set(theirs)
    evict(second.stores[0], [theirs[8]])
    answer = second.ask(prompt(200))
    assert answer.is_right
    assert answer.num_external == 8 * 16
    check(first, second)


@pytest.mark.parametrize("loads", ["async", "layerwise"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank(rank: int, loads: str, make_pair: Make) -> None:
    # In chunks: what is computed again takes several steps.
    chunks = {"max_num_batched_tokens": 64}
    first, second = make_pair(), make_pair(settings={"loads": loads}, scheduler=chunks)
    first.ask(prompt(200))
    store = second.stores[rank]
    vanish = lambda: evict(store, [keys_of_rank(first, rank)[5]])  # noqa: E731
    store.before["get" if loads == "async" else "get_session"] = Do(vanish)
    answer = second.ask(prompt(300), 4)
    assert answer.is_right
    assert bool(second.spoiled) == (loads == "layerwise")
    third = make_pair()
    again = third.ask(prompt(300), 4)  # what the good rank has computed meanwhile is not found
    assert again.is_right
    assert third.spoiled == []
    for engine in (first, second, third):
        engine.check_idle()


def test_blocks_wait_for_the_slower_rank(make_pair: Make) -> None:
    engine = make_pair(settings={"staging_bytes": 1 << 15})
    pause = engine.stores[1].before["put"] = Pause()
    answer = engine.add(prompt(300), 1)
    engine.until(lambda: bool(answer.reason))
    pause.wait()
    for _ in range(20):
        engine.step()
    assert engine.pool.get_num_free_blocks() < engine.num_free
    pause.release()
    engine.run()
    check(engine)


@pytest.fixture
def make_stages(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines of two pipeline stages, the first of which has `cut` layers."""

    def make_stages(name: str, cut: int, **more: Any) -> Engine:
        specs = plan.MODELS[name]()
        number = lambda layer: int(layer.split(".")[2])  # noqa: E731
        stages = [
            {layer: spec for layer, spec in specs.items() if (number(layer) < cut) == is_first}
            for is_first in (True, False)
        ]
        ranks, firsts = iter(range(2)), iter([(0, cut), (cut, 8)])
        group = lambda: SimpleNamespace(rank_in_group=next(ranks), world_size=2)  # noqa: E731
        alone = lambda: SimpleNamespace(rank_in_group=0, world_size=1)  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(vllm_setup, "model_parallel_is_initialized", lambda: True)
            patched.setattr(vllm_setup, "get_tp_group", alone)
            patched.setattr(vllm_setup, "get_pp_group", group)
            patched.setattr(ModelConfig, "get_layers_start_end_indices", lambda *_: next(firsts))
            return make(name, stages=stages, **more)

    return make_stages


@pytest.mark.parametrize(("name", "cut"), [("llama", 2), ("gpt_oss", 2), ("deepseek_v32", 1)])
def test_pipeline_stages(name: str, cut: int, make_stages: Make) -> None:
    first, second = make_stages(name, cut), make_stages(name, cut)
    first.ask(prompt(200), 4)
    assert not set(keys_of_rank(first, 0)) & set(keys_of_rank(first, 1))
    answer = second.ask(prompt(200), 4)
    assert (answer.num_external, answer.is_right) == (192, True)
    evict(second.stores[0], [keys_of_rank(first, 1)[-1]])
    second.flush()
    assert second.ask(prompt(200), 4).num_external < 192
    check(first, second)
