"""What is known of objects' existence, remembered for a moment; lookups are asked all the time."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvferry.causes import cause_of
from kvferry.linker.attempts import reason_of
from kvferry.linker.store import Outcome, Store

MAX_REMEMBERED = 1 << 18

SPOILT_TTL_S = 120.0
"""How long a spoilt object is remembered: this process asks for it no more, which would lease it
anew, and removes it once nobody's lease is in the way. Several leases long."""

REMOVAL_EVERY_S = 1.0
"""How often a save of other objects tries to remove what was still leased."""

MAX_REMOVALS = 100
"""How many of those it tries at a time."""

SPOILT = frozenset({"corrupted", "foreign", "other format", "wrong size"})
"""Causes that stay with an object: every load of it would fail. Its key names layout and format."""


class _Spoilt(NamedTuple):
    """An object that every load would refuse.

    Attributes:
        cause: the word for why.
        forget_s: monotonic time at which it is forgotten.
        again_s: when a save of other objects may try to remove it.
    """

    cause: str
    forget_s: float
    again_s: float


class Existing(NamedTuple):
    """What a save finds in the store.

    Attributes:
        exists: per key, whether the object is there and need not be written.
        missing: per key, whether it may be written.
        spoilt: keys that are neither, with the reason: what is there is no good, and cannot be
            removed yet.
    """

    exists: list[bool]
    missing: list[bool]
    spoilt: dict[str, str]


class ExistenceCache:
    """Answers of `Store.exists`, each good for a short while. Safe from any thread."""

    def __init__(self, answer_ttl_s: float, failure_ttl_s: float) -> None:
        """Remember answers for `answer_ttl_s`, and failed loads, as missing, `failure_ttl_s`."""
        self._answer_ttl_s = answer_ttl_s
        self._failure_ttl_s = failure_ttl_s
        self._known: dict[str, tuple[float, bool]] = {}
        self._spoilt: dict[str, _Spoilt] = {}
        self._num_stored = 0  # calls of `mark_stored`
        self._lock = threading.Lock()

    def ask(self, store: Store, keys: Sequence[str]) -> list[bool]:
        """Return, per key, whether the object exists; asks the store for the unknown, in one call.

        Raises:
            StoreUnavailable, StoreClosed: as `Store.exists`.
        """
        now = time.monotonic()
        with self._lock:
            known = [self._known.get(key) for key in keys]
        answers = [entry[1] if entry and entry[0] > now else None for entry in known]
        unknown = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        if not unknown:
            return [bool(answer) for answer in answers]
        num_stored = self._num_stored
        fresh = iter(store.exists(unknown))
        merged = [next(fresh) if answer is None else answer for answer in answers]
        self._remember(
            (
                (key, new)
                for key, new, old in zip(keys, merged, answers, strict=True)
                # A «no» may be of before something was stored here meanwhile.
                if old is None and (new or num_stored == self._num_stored)
            ),
            self._answer_ttl_s,
        )
        return merged

    def before_save(self, store: Store, keys: Sequence[str]) -> Existing:
        """Return which objects a save must write; asks the store itself.

        What a load found spoilt is removed first: who has the right bytes at hand writes them
        anew, else the object would fail every load of it for as long as it lives. Where somebody
        has it leased it stays, for its memory must not go to another object under a reader. Then
        this save does not store that page, and a later one removes the object.

        Raises:
            StoreUnavailable, StoreClosed: as `Store.exists`.
        """
        spoilt = self._remove_spoilt(store, keys) if self._spoilt else {}
        # To ask for what is to be removed would lease it.
        asked = [key for key in keys if key not in spoilt] if spoilt else keys
        answers = store.exists(asked)
        self._forget_misses(key for key, there in zip(asked, answers, strict=True) if there)
        if spoilt:
            fresh = iter(answers)
            answers = [key not in spoilt and next(fresh) for key in keys]
        missing = [not there for there in answers]
        if spoilt:
            missing = [key not in spoilt and it for key, it in zip(keys, missing, strict=True)]
        return Existing(answers, missing, spoilt)

    def _remove_spoilt(self, store: Store, keys: Sequence[str]) -> dict[str, str]:
        """Remove what is spoilt among these keys, and some of what else is due.

        Returns:
            Those of `keys` that could not be removed, with the reason.
        """
        now = time.monotonic()
        with self._lock:
            self._spoilt = {key: one for key, one in self._spoilt.items() if one.forget_s > now}
            mine = self._spoilt.keys() & set(keys)
            due = [key for key, one in self._spoilt.items() if one.again_s <= now]
            taken = {
                key: self._spoilt.pop(key) for key in dict.fromkeys([*mine, *due[:MAX_REMOVALS]])
            }
        left = dict(taken)
        refused: dict[str, str] = {}
        try:
            names = sorted(taken)
            for key, result in zip(names, store.remove(names) if names else [], strict=True):
                if result.outcome in (Outcome.STORED, Outcome.MISSING):
                    del left[key]
                elif key in mine:
                    refused[key] = (
                        f"{taken[key].cause}: what is stored is no good, and could not be removed "
                        f"yet: {reason_of(result)}"
                    )
        finally:
            with self._lock:
                for key in taken.keys() - left.keys():
                    self._known.pop(key, None)
                for key, one in left.items():
                    again_s = now + REMOVAL_EVERY_S
                    self._spoilt.setdefault(key, one._replace(again_s=again_s))
        return refused

    def mark_stored(self, keys: Iterable[str]) -> None:
        """Remember that these objects exist, whatever failed before."""
        with self._lock:
            self._num_stored += 1
            for key in (stored := list(keys)):
                self._known.pop(key, None)
                self._spoilt.pop(key, None)
        self._remember(((key, True) for key in stored), self._answer_ttl_s)

    def _forget_misses(self, keys: Iterable[str]) -> None:
        """Forget what failed or was missing before, of objects that the store has told to exist."""
        with self._lock:
            for key in keys:
                if not self._known.get(key, (0.0, True))[1]:
                    del self._known[key]

    def mark_failed(self, keys: Iterable[str]) -> None:
        """Remember that loading these objects failed: they count as missing for a while."""
        self._remember(((key, False) for key in keys), self._failure_ttl_s)

    def mark_faults(self, causes: Mapping[str, str]) -> None:
        """Remember that loading these objects failed, key to reason, and which are spoilt."""
        self.mark_failed(causes)
        words = {key: cause_of(reason) for key, reason in causes.items()}
        spoilt = {key: word for key, word in words.items() if word in SPOILT}
        if not spoilt:
            return
        self._remember(((key, False) for key in spoilt), SPOILT_TTL_S)
        now = time.monotonic()
        with self._lock:
            if len(self._spoilt) > MAX_REMEMBERED:
                self._spoilt.clear()
            for key, word in spoilt.items():
                self._spoilt[key] = _Spoilt(word, now + SPOILT_TTL_S, now)

    def _remember(self, answers: Iterable[tuple[str, bool]], ttl_s: float) -> None:
        if ttl_s <= 0:
            return
        now = time.monotonic()
        with self._lock:
            if len(self._known) > MAX_REMEMBERED:
                self._known = {key: entry for key, entry in self._known.items() if entry[0] > now}
                if len(self._known) > MAX_REMEMBERED:
                    self._known.clear()
            for key, exists in answers:
                self._known[key] = (now + ttl_s, exists)
