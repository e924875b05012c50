"""Prompts leave an engine's prefix tree for the store, and come back byte for byte."""

from collections.abc import Callable

import pytest
from kinds import KINDS
from prompts import tokens
from tree import Engine

CORES = ("python", "rust")
Make = Callable[..., Engine]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", KINDS)
def test_round_trip(name: str, core: str, make: Make) -> None:
    engine = make(name, core)
    page_size = engine.kind.page_size
    prompt = tokens(5 * page_size + page_size // 2)
    engine.prefill(prompt[: 5 * page_size])
    engine.settle()
    engine.flush()

    request = engine.match(prompt)
    assert (request.hit, request.match.host_hit_length) == (0, 5 * page_size)
    engine.load(request)
    engine.adopt(request)
    again = engine.match(prompt)
    assert (again.hit, again.match.host_hit_length) == (5 * page_size, 0)
    engine.settle()


@pytest.mark.parametrize("core", CORES)
def test_keys_of_pairs_of_tokens(core: str, make: Make) -> None:
    engine = make("packed_drafts", core, params={"is_eagle": True})
    prompt = tokens(4 * 64 + 1)  # as many pairs as four pages have
    slots = engine.allocate(4 * 64)
    engine.compute(prompt, slots)
    engine.insert(prompt, slots)
    engine.settle()
    engine.flush()
    request = engine.match(prompt)
    assert request.match.host_hit_length == 4 * 64
    engine.load(request)
