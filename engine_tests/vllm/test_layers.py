"""Loads within the step that needs them, and saves as it runs, by vLLM's hooks around a layer."""

from collections.abc import Callable
from typing import Any

import plan
import pytest
from engine import Engine, prompt
from test_failures import POLICIES, lose

from kvferry.errors import ArgumentError
from kvferry.linker.vllm import KVFerryConnector

Make = Callable[..., Engine]
BOTH = {"loads": "layerwise", "saves": "layerwise"}


def check(*engines: Engine) -> None:
    for engine in engines:
        engine.settle()
        engine.check_idle()


@pytest.mark.parametrize("settings", [BOTH, {"loads": "layerwise"}, {"saves": "layerwise"}],
                         ids=["both", "loads", "saves"])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_round_trip(name: str, settings: dict[str, Any], make: Make) -> None:
    first, second = make(name, settings=settings), make(name, settings=settings)
    assert first.ask(prompt(200), 40).is_right
    answer = second.ask(prompt(270), 40)
    assert answer.is_right
    assert answer.num_external == 192
    third = make(name, settings=settings)
    again = third.ask(prompt(300), 2)  # what was computed behind the load has been saved
    assert (again.num_external, again.is_right) == (256, True)
    assert first.spoiled == second.spoiled == third.spoiled == []
    check(first, second, third)


@pytest.mark.parametrize("policy", POLICIES)
def test_failed_loads_are_taken_back(policy: str, make: Make) -> None:
    """The step has computed rubbish by then; vLLM takes it back, and none of it is saved."""
    first, second = make(settings=BOTH), make(settings=BOTH, policy=policy)
    first.ask(prompt(200), 1)
    second.stores[0].before["get"] = lose(second)
    second.stores[0].before["get_session"] = lose(second)
    asked = [second.add(prompt(300, branch=branch, common=200), 4) for branch in range(2)]
    second.run()
    assert second.spoiled  # else nothing was put to the test
    if policy == "recompute":
        assert all(answer.is_right for answer in asked)
    else:
        assert asked[0].reason == "error"
    second.settle()
    third = make(settings=BOTH)
    answer = third.ask(prompt(300, common=200), 4)  # compares every byte that was saved
    assert answer.is_right
    assert third.spoiled == []
    assert answer.num_external == (288 if policy == "recompute" else 0)
    check(first, second, third)


def test_several_groups_are_refused(make: Make) -> None:
    with pytest.raises(ArgumentError, match="loads is 'layerwise', but the model has 2 cache grou"):
        make("gpt_oss", settings=BOTH)
    engine = make("gpt_oss", settings={"saves": "layerwise"})
    engine.ask(prompt(200))
    other = make("gpt_oss")
    assert other.ask(prompt(200)).num_external == 192
    assert other.spoiled == []
    check(engine, other)


def test_steps_that_overlap_are_refused(make: Make) -> None:
    overlapping = {"async_scheduling": True}
    with pytest.raises(ArgumentError, match="loads is 'layerwise', but vLLM runs 2 steps at a"):
        make(settings=BOTH, scheduler=overlapping)
    engine = make(settings={"saves": "layerwise"}, scheduler=overlapping)
    assert engine.ask(prompt(200), 20).is_right
    other = make(scheduler=overlapping)
    assert other.ask(prompt(200), 20).num_external == 192
    assert other.spoiled == []
    check(engine, other)


def test_graphs_that_would_leave_the_hooks_out() -> None:
    asked = KVFerryConnector.requires_piecewise_for_cudagraph
    assert [asked({}), asked({"loads": "layerwise"}), asked({"saves": "layerwise"})] == [
        False, True, True,
    ]  # fmt: skip


def test_layers_are_waited_for_in_their_order(make: Make) -> None:
    first, second = make(settings=BOTH), make(settings=BOTH)
    first.ask(prompt(200), 1)
    side = second.workers[0].connector._worker
    calls = []
    for part, name in ((side.loads, "wait_for_layer"), (side.saves, "layer_written")):
        real = getattr(part, name)
        setattr(part, name, lambda layer, real=real, name=name: (calls.append((name, layer)),
                                                                  real(layer)))  # fmt: skip
    assert second.ask(prompt(200), 1).num_external == 192
    wanted = [
        (call, layer) for layer in plan.llama() for call in ("wait_for_layer", "layer_written")
    ]
    assert calls[: len(wanted)] == wanted
    check(first, second)


def test_ends_are_told_though_a_step_without_a_message_comes_between(make: Make) -> None:
    """Whoever asks for results twice before the message is built must not lose the first ones."""
    first, second = make(settings=BOTH), make(settings=BOTH)
    first.ask(prompt(200), 1)
    connector = second.workers[0].connector
    build = connector.build_connector_worker_meta

    def build_late() -> Any:
        connector.get_transfer_results(set())
        return build()

    connector.build_connector_worker_meta = build_late
    assert second.ask(prompt(270), 20).is_right
    third = make(settings=BOTH)
    assert third.ask(prompt(270), 1).num_external == 256  # saves wait for the loads' ends
    check(first, second, third)
