"""Generations of weights as SGLang tells of them: named by a version, or drawn."""

import logging

import pytest

from kvferry.linker.sglang_generations import Generations, Weights

START = Weights("default", "/model")


def generations(weights: Weights = START, named: str = "", seed: str = "5eed") -> Generations:
    return Generations(weights, named=named, seed=seed)


def test_nothing_changes_where_the_weights_are_the_same() -> None:
    made = generations()
    assert made.current == "default"
    for _ in range(3):
        assert not made.look(Weights("default", "/model"))
    assert made.current == "default"


def test_a_version_names_a_generation() -> None:
    made = generations()
    assert made.look(Weights("v2", "/model"))
    assert made.current == "v2"
    assert made.look(Weights("v3", "/other", 1))
    assert made.current == "v3"
    assert made.look(Weights("default", "/model", 2))
    assert made.current == "default"  # as at the start: the same weights


@pytest.mark.parametrize("changed", [Weights("default", "/other"), Weights("default", "/model", 1)])
def test_what_changes_under_one_version_is_drawn(
    changed: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    made, alike, other = generations(), generations(), generations(seed="0ther")
    for one in (made, alike, other):
        assert one.look(changed)
        assert not one.look(changed)
    assert made.current == alike.current == "drawn-5eed-1"  # ranks of one engine
    assert other.current != made.current
    assert caplog.records[0].levelno == logging.WARNING
    assert "'drawn-5eed-1' was drawn" in caplog.text
    assert made.look(Weights("default", "/third", 2))
    assert made.current == "drawn-5eed-2"
    assert made.look(START)
    assert made.current == "drawn-5eed-3"  # who knows what lies there now


def test_a_generation_set_by_hand_is_that_of_the_start() -> None:
    made = generations(named="fleet-7")
    assert not made.look(START)
    assert made.current == "fleet-7"
    assert made.look(Weights("v8", "/model"))
    assert made.current == "v8"


def test_between_an_update_and_a_flush_no_generation_is_current(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = generations()
    assert made.are_current("default", "/model")
    for _ in range(3):
        assert not made.are_current("v2", "/model")
        assert not made.are_current("default", "/other")
    assert len(caplog.messages) == 1
    assert "until the next flush nothing is stored" in caplog.text
    made.look(Weights("v2", "/model"))
    assert made.are_current("v2", "/model")
    assert not made.are_current("v3", "/model")
    assert len(caplog.messages) == 2
