"""What goes wrong on the way costs time and nothing else: no request, no block, no byte."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine import Engine, prompt
from hooked import Do, Pause

from kvferry.errors import StoreUnavailable
from kvferry.linker.eviction import evict, evict_under
from kvferry.linker.store import ObjectResult, Outcome

Make = Callable[..., Engine]
POLICIES = ("recompute", "fail")


def lose(engine: Engine) -> Do:
    """Let all objects of an engine's model vanish between lookup and load."""
    (linker, *_), store = engine.workers[0].connector._worker.linkers.values(), engine.stores[0]
    return Do(lambda: evict_under(store, linker.keys.stem))


def check(*engines: Engine) -> None:
    """Check that no step read a wrong byte, and nothing is held."""
    for engine in engines:
        assert engine.spoiled == []
        engine.settle()
        engine.check_idle()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_objects_that_vanish_before_the_load(name: str, policy: str, make: Make) -> None:
    first, second = make(name), make(name, policy=policy)
    first.ask(prompt(200))
    second.stores[0].before["get"] = lose(second)
    answer = second.ask(prompt(200))
    if policy == "recompute":
        assert answer.is_right
    else:
        assert (answer.reason, answer.tokens) == ("error", [])
    # The next request computes at once: what failed counts as missing.
    again = second.ask(prompt(200))
    assert again.is_right
    assert again.num_external == 0
    check(first, second)


@pytest.mark.parametrize("policy", POLICIES)
def test_objects_that_cannot_be_read_are_not_tried_again_at_once(policy: str, make: Make) -> None:
    """They are still found, so that a client's next try would fail like the last."""
    first, second = make(), make(policy=policy)
    first.ask(prompt(200))
    store = second.stores[0]
    store.before["get"] = lambda keys, *_: [ObjectResult(Outcome.FAILED)] * len(keys)
    answer = second.ask(prompt(200))
    assert answer.reason == ("length" if policy == "recompute" else "error")
    tries = store.count("get")
    assert tries > 0
    again = second.ask(prompt(200))
    assert (again.is_right, again.num_external, store.count("get")) == (True, 0, tries)
    check(first, second)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_of_several_loads_fails(policy: str, make: Make) -> None:
    first, second = make(), make(policy=policy)
    for branch in range(3):
        first.ask(prompt(200, branch=branch))
    (save,) = first.workers[0].seen[0].jobs.saves
    (group,) = second.connector._plan.prefixes.groups
    ((gone,),) = second.connector._plan.prefixes.object_keys(group, save.pages[0].keys[3:4])
    asked = [second.add(prompt(200, branch=branch)) for branch in range(3)]
    store = second.stores[0]
    store.before["get"] = Do(lambda: evict(store, [gone]))
    second.run()
    assert [answer.is_right for answer in asked] == [policy == "recompute", True, True]
    check(first, second)


def test_aborted_while_loading(make: Make) -> None:
    first, second = make("gpt_oss"), make("gpt_oss")
    first.ask(prompt(200))
    pause = second.stores[0].before["get"] = Pause()
    answer = second.add(prompt(200))
    second.until(lambda: second.num_loading == 1)
    pause.wait()
    second.abort(answer)
    second.step()
    assert second.pool.get_num_free_blocks() < second.num_free  # its blocks are being written
    other = second.add(prompt(100, branch=3))
    second.until(lambda: bool(other.reason))
    pause.release()
    second.run()
    assert other.is_right
    check(first, second)


def test_aborted_while_saving(make: Make) -> None:
    engine = make("gpt_oss", settings={"staging_bytes": 1 << 17})
    # Both groups' saves are held, whichever comes first.
    entered, let_go = threading.Event(), threading.Event()
    engine.stores[0].before["put"] = lambda *_: (entered.set(), let_go.wait(30), None)[-1]
    answer = engine.add(prompt(300), 50)
    engine.until(lambda: len(answer.tokens) == 2)
    assert entered.wait(10)
    engine.abort(answer)
    for _ in range(3):
        engine.step()
    assert engine.pool.get_num_free_blocks() < engine.num_free  # a save still reads some
    assert engine.scheduler.has_requests()  # so that an idle engine hears of its end
    assert not engine.scheduler.reset_prefix_cache()
    let_go.set()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    check(engine)


def test_blocks_are_not_used_again_before_their_save_has_ended(make: Make) -> None:
    """Staging is full and the store is slow, while other requests take all blocks that are free."""
    settings = {"staging_bytes": 1 << 15, "max_held_share": 0.5}
    engine, reader = make(num_blocks=40, settings=settings), make()
    pause = engine.stores[0].before["put"] = Pause()
    first = engine.add(prompt(300), 1)
    engine.until(lambda: bool(first.reason))
    pause.wait()
    held = {block.block_id for block in engine.pool.blocks if block.ref_cnt and not block.is_null}
    assert len(held) >= 10
    others = [engine.add(prompt(150, branch=branch), 4) for branch in range(1, 6)]
    engine.until(lambda: all(answer.reason for answer in others))
    assert held <= {block.block_id for block in engine.pool.blocks if block.ref_cnt}
    pause.release()
    engine.run()
    engine.settle()
    engine.flush()
    answer = reader.ask(prompt(300), 1)  # every byte that it loads is compared
    assert answer.is_right
    assert answer.num_external >= 128
    check(engine, reader)


def test_the_store_is_away(make: Make) -> None:
    engine = make("gpt_oss")

    def away(*_: Any) -> None:
        raise StoreUnavailable("a test's")

    for store in (*engine.stores, engine.connector._store):
        store.before = dict.fromkeys(("exists", "put", "get"), away)
    assert engine.ask(prompt(200)).is_right
    check(engine)


def test_reset_keeps_what_is_stored(make: Make) -> None:
    first, second = make("gpt_oss"), make("gpt_oss")
    first.ask(prompt(200))
    assert second.scheduler.reset_prefix_cache(reset_connector=True)
    assert second.ask(prompt(200)).num_external == 192
    check(first, second)


def test_running_requests_are_reset(make: Make) -> None:
    """As before new weights: running requests begin anew, nothing old is read."""
    engine = make("gpt_oss")
    asked = [engine.add(prompt(100, branch=branch), 30) for branch in range(3)]
    engine.until(lambda: all(len(answer.tokens) > 3 for answer in asked))
    while engine.connector.has_pending_push_work():
        engine.step()
        time.sleep(0.001)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    assert all(answer.is_right for answer in asked)
    check(engine)
