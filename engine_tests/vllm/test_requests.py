"""Whole requests through vLLM's scheduler: saved, found, loaded, and every byte compared."""

from collections.abc import Callable

import plan
import pytest
from engine import Engine
from vllm.v1.kv_cache_layout import KVCacheLayout

Make = Callable[..., Engine]


def prompt(num_tokens: int, branch: int = 0, common: int = 0) -> list[int]:
    """A prompt that shares its first `common` tokens with other branches."""
    shared = [at % 400 + 1 for at in range(common)]
    return shared + [(at * 7 + branch * 31) % 400 + 1 for at in range(common, num_tokens)]


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", sorted(plan.MODELS))
def test_round_trip(name: str, layout: KVCacheLayout, make: Make) -> None:
    """Engine A computes, engine B loads what A has saved, and then computes on."""
    if not plan.is_served(plan.MODELS[name](), layout):
        pytest.skip("refused; see test_pools")
    first, second = make(name, layout), make(name, layout)
    asked = prompt(200)
    assert first.ask(asked, 4).is_right
    answer = second.ask(asked, 4)
    assert answer.is_right
    assert answer.num_external == 192
    for engine in (first, second):
        assert engine.spoiled == []
        engine.check_idle()
