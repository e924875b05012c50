"""Whole requests through vLLM's scheduler: saved, found, loaded, and every byte compared."""

from collections.abc import Callable

import plan
import pytest
from engine import Engine, prompt
from vllm.v1.kv_cache_layout import KVCacheLayout

Make = Callable[..., Engine]
MODELS = sorted(plan.MODELS)


def check(*engines: Engine) -> None:
    """Check that all answers were right, no step read a wrong byte, and nothing is held."""
    for engine in engines:
        assert engine.spoiled == []
        assert [a.request.request_id for a in engine.answers.values() if not a.is_right] == []
        engine.settle()
        engine.check_idle()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, layout: KVCacheLayout, make: Make) -> None:
    """Engine A computes, engine B loads what A has saved, and computes on."""
    if not plan.is_served(plan.MODELS[name](), layout):
        pytest.skip("refused; see test_pools")
    first, second = make(name, layout), make(name, layout)
    asked = prompt(200)
    assert first.ask(asked, 4).num_external == 0
    answer = second.ask(asked, 4)
    assert (answer.num_local, answer.num_external) == (0, 192)
    again = second.ask(asked, 4)
    assert (again.num_local, again.num_external) == (192, 0)
    check(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_local_and_external_hits(name: str, make: Make) -> None:
    first, second = make(name, num_blocks=256), make(name, num_blocks=256)
    first.ask(prompt(400), 2)
    second.ask(prompt(200), 2)  # from the store
    longer = second.ask(prompt(400), 2)
    assert longer.num_local == 192
    assert longer.num_external in (192, 144)  # up to 384 or 336 tokens, by the size of a block
    branch = second.ask(prompt(400, branch=1, common=200), 2)
    assert branch.num_local in (192, 144)
    check(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_saved_too(name: str, make: Make) -> None:
    """What was decoded is found by whoever asks on: a conversation's next turn."""
    first, second = make(name), make(name)
    answer = first.ask(prompt(160), 50)
    turn = [*prompt(160), *answer.tokens, *prompt(30, branch=5)]
    assert second.ask(turn, 4).num_external in (192, 208)  # by the size of a block
    check(first, second)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", MODELS)
def test_many_at_once(name: str, is_async: bool, make: Make) -> None:
    """Requests that share prefixes, in chunks, admitted by and by."""
    scheduler = {"async_scheduling": is_async, "max_num_batched_tokens": 100}
    engines = [make(name, num_blocks=200, scheduler=scheduler) for _ in range(2)]
    for engine in engines:
        for branch in range(6):
            common = 64 * (branch % 3)
            engine.add(prompt(150 + 30 * branch, branch=branch, common=common), 20)
            engine.step()
        engine.run()
        engine.settle()
    assert sum(answer.num_external for answer in engines[1].answers.values()) > 600
    check(*engines)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", MODELS)
def test_preempted(name: str, is_async: bool, make: Make) -> None:
    """More requests than the cache holds: they lose their blocks and come back for them."""
    num_blocks = {"llama": 40, "gpt_oss": 48, "qwen3_next": 30, "deepseek_v32": 10}[name]
    engine = make(
        name, num_blocks=num_blocks, settings={"max_held_share": 0.5},
        scheduler={"async_scheduling": is_async, "watermark": 0.0},
    )  # fmt: skip
    asked = [engine.add(prompt(180, branch=branch), 150) for branch in range(4)]
    engine.run()
    assert sum(answer.request.num_preemptions for answer in asked) > 0
    check(engine)


def test_the_older_runner(make: Make) -> None:
    first, second = make("gpt_oss", runner="v1"), make("gpt_oss", runner="v1")
    first.ask(prompt(200), 4)
    assert second.ask(prompt(200), 4).num_external == 192
    check(first, second)


def test_two_requests_load_one_prefix(make: Make) -> None:
    first, second = make(), make()
    first.ask(prompt(200), 4)
    one, other = second.add(prompt(200), 4), second.add(prompt(200), 4)
    second.run()
    assert one.num_external == 192
    assert other.num_external + other.num_local == 192
    check(first, second)


def test_salted_prompts_are_found_by_their_salt_alone(make: Make) -> None:
    first, second = make(), make()
    first.ask(prompt(200), cache_salt="a")
    assert second.ask(prompt(200)).num_external == 0
    assert second.ask(prompt(200), cache_salt="b").num_external == 0
    assert second.ask(prompt(200), cache_salt="a").num_external == 192
    check(first, second)


def test_requests_that_read_no_cache_are_saved_and_load_nothing(make: Make) -> None:
    first, second = make(), make()
    first.ask(prompt(200))
    answer = second.add(prompt(200))
    answer.request.skip_reading_prefix_cache = True
    second.run()
    assert answer.num_external == 0
    check(first, second)


def test_short_hits_are_computed(make: Make) -> None:
    first, second = make(), make(settings={"min_load_tokens": 128})
    first.ask(prompt(100))
    assert second.ask(prompt(100)).num_external == 0
    check(first, second)


def test_saves_that_hold_too_much_take_what_fits(make: Make) -> None:
    first, second = make(num_blocks=40, settings={"max_held_share": 0.2}), make()
    first.ask(prompt(200), 60)
    assert first.connector._plan.num_postponed > 0
    assert 0 < second.ask(prompt(200)).num_external <= 192
    check(first, second)
