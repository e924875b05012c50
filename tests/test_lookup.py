"""What is remembered of objects' existence: for how long, and what puts an end to it."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.causes import cause_of
from kvferry.errors import StoreUnavailable
from kvferry.linker import lookup
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.store import STORED, ObjectResult, Outcome

KEYS = ["a", "b", "c"]


class Store:
    """A store that has some keys, and counts how often it is asked."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.asked: list[list[str]] = []
        self.removing: list[list[str]] = []
        self.leased: set[str] = set()
        self.away = False

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        return [key in self.keys for key in keys]

    def remove(self, keys: Sequence[str]) -> list[ObjectResult]:
        if self.away:
            raise StoreUnavailable("away")
        self.removing.append(list(keys))
        leased = ObjectResult(Outcome.FAILED, "OBJECT_HAS_LEASE")
        missing = ObjectResult(Outcome.MISSING)
        results = [
            leased if key in self.leased else STORED if key in self.keys else missing
            for key in keys
        ]
        self.keys -= set(keys) - self.leased
        return results


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
def test_what_a_save_finds_is_not_missing_any_more(answer_ttl_s: float, store: Any) -> None:
    cache = ExistenceCache(answer_ttl_s, 60.0)
    cache.mark_failed(KEYS)
    assert cache.before_save(store, KEYS).exists == [True, True, False]
    assert cache.ask(store, KEYS) == [True, True, False]


def test_a_no_of_before_the_save_is_not_remembered(store: Any) -> None:
    cache = ExistenceCache(60.0, 60.0)
    exists = store.exists

    def slow(keys: Sequence[str]) -> list[bool]:
        answers: list[bool] = exists(keys)
        store.keys.add("c")
        cache.mark_stored(["c"])
        return answers

    store.exists = slow
    assert cache.ask(store, KEYS) == [True, True, False]
    assert cache.ask(store, KEYS) == [True, True, True]


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
    assert cache.before_save(store, KEYS).exists == [False, True, False]
    assert store.keys == {"b"}
    store.keys.add("a")
    assert cache.before_save(store, KEYS) == ([True, True, False], [False, False, True], {})
    assert store.removing == [["a"]], "once"


def test_what_is_spoilt_and_leased_stays_and_is_said_to(store: Any) -> None:
    """Its memory must not go to another object while somebody reads it."""
    cache = ExistenceCache(0.0, 0.0)
    cache.mark_faults({"a": "corrupted: checksums of layers [1] differ"})
    store.leased = {"a"}
    found = cache.before_save(store, KEYS)
    assert (found.exists, found.missing) == ([False, True, False], [False, False, True])
    assert list(found.spoilt) == ["a"]
    assert cause_of(found.spoilt["a"]) == "corrupted"
    assert "OBJECT_HAS_LEASE" in found.spoilt["a"]
    # Nobody here asks for it meanwhile: that would lease it again, and again.
    assert cache.ask(store, KEYS) == [False, True, False]
    assert store.asked == [["b", "c"], ["b", "c"]]
    store.leased.clear()
    assert cache.before_save(store, KEYS) == ([False, True, False], [True, False, True], {})
    assert cache.ask(store, ["a"]) == [False]
    store.keys.add("a")  # by anybody
    assert cache.ask(store, ["a"]) == [True]


def test_a_save_of_other_pages_removes_what_was_leased(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "REMOVAL_EVERY_S", 0.1)
    cache = ExistenceCache(0.0, 0.0)
    cache.mark_faults({"a": "foreign: no kvferry object"})
    store.leased = {"a"}
    for _ in range(3):
        assert cache.before_save(store, ["c"]).spoilt == {}, "the save of c is not to blame"
    assert store.removing == [["a"]], "not at every save"
    time.sleep(0.11)
    store.leased.clear()
    cache.before_save(store, ["c"])
    assert store.keys == {"b"}
    time.sleep(0.11)
    cache.before_save(store, ["c"])
    assert store.removing == [["a"], ["a"]]


def test_what_is_spoilt_is_forgotten_in_the_end(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have written it anew, and readers of that may keep it leased."""
    monkeypatch.setattr(lookup, "SPOILT_TTL_S", 0.05)
    cache = ExistenceCache(0.0, 0.0)
    cache.mark_faults({"a": "wrong size"})
    store.leased = {"a"}
    assert list(cache.before_save(store, ["a"]).spoilt) == ["a"]
    assert cache.ask(store, ["a"]) == [False]
    time.sleep(0.06)
    assert cache.ask(store, ["a"]) == [True]
    assert cache.before_save(store, ["a"]) == ([True], [False], {})


def test_what_this_process_stores_is_spoilt_no_more(store: Any) -> None:
    cache = ExistenceCache(0.0, 0.0)
    cache.mark_faults({"a": "wrong size"})
    cache.mark_stored(["a"])
    assert cache.ask(store, ["a"]) == [True]
    assert cache.before_save(store, ["a"]).exists == [True]
    assert store.removing == []


def test_an_outage_forgets_nothing(store: Any) -> None:
    cache = ExistenceCache(0.0, 0.0)
    cache.mark_faults({"a": "corrupted"})
    store.away = True
    with pytest.raises(StoreUnavailable):
        cache.before_save(store, KEYS)
    store.away = False
    cache.before_save(store, KEYS)
    assert store.keys == {"b"}


def test_removals_of_others_are_few_at_a_time(store: Any) -> None:
    cache = ExistenceCache(0.0, 0.0)
    names = [f"spoilt-{number}" for number in range(lookup.MAX_REMOVALS + 5)]
    cache.mark_faults(dict.fromkeys(names, "corrupted"))
    for _ in range(3):
        cache.before_save(store, ["c"])
    assert [len(keys) for keys in store.removing] == [lookup.MAX_REMOVALS, 5]
