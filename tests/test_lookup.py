"""What is remembered of objects' existence: for how long, and what puts an end to it."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.linker.lookup import ExistenceCache

KEYS = ["a", "b", "c"]


class Store:
    """A store that has some keys, and counts how often it is asked."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.asked: list[list[str]] = []

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        return [key in self.keys for key in keys]

    def remove(self, keys: Sequence[str], *, force: bool) -> None:
        assert force
        self.keys -= set(keys)


@pytest.fixture
def store() -> Any:
    return Store("a", "b")


def test_only_what_is_unknown_is_asked(store: Any) -> None:
    cache = ExistenceCache(60.0, 60.0)
    assert cache.ask(store, ["a"]) == [True]
    assert cache.ask(store, KEYS) == [True, True, False]
    assert cache.ask(store, KEYS) == [True, True, False]
    assert store.asked == [["a"], ["b", "c"]]


def test_answers_and_failures_have_their_own_time(store: Any) -> None:
    cache = ExistenceCache(0.0, 0.05)
    cache.mark_failed(["a"])
    assert cache.ask(store, KEYS) == [False, True, False]
    time.sleep(0.06)
    assert cache.ask(store, KEYS) == [True, True, False]
    assert len(store.asked) == 2, "answers are not remembered"


@pytest.mark.parametrize("answer_ttl_s", [0.0, 60.0])
def test_what_is_stored_anew_is_not_missing_any_more(answer_ttl_s: float, store: Any) -> None:
    cache = ExistenceCache(answer_ttl_s, 60.0)
    cache.mark_failed(["a", "b"])
    cache.mark_stored(["a"])
    assert cache.ask(store, KEYS) == [True, False, False]


@pytest.mark.parametrize(
    "reason",
    [
        "corrupted: checksums of layers [1] differ",
        "foreign: the object of another key",
        "other format: version 9",
        "wrong size",
    ],
)
def test_what_is_spoilt_is_removed_by_who_writes_it_anew(reason: str, store: Any) -> None:
    cache = ExistenceCache(60.0, 60.0)
    cache.mark_faults({"a": reason, "b": "missing"})
    assert store.keys == {"a", "b"}, "nobody else loses it"
    assert cache.ask(store, KEYS) == [False, False, False]
    assert cache.there(store, KEYS) == [False, True, False]
    assert store.keys == {"b"}
    store.keys.add("a")
    assert cache.there(store, KEYS) == [True, True, False], "once"
