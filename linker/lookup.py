"""What is known of objects' existence, remembered for a moment; lookups are asked all the time."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from kvferry.causes import cause_of
from kvferry.linker.store import Store

MAX_REMEMBERED = 1 << 18

SPOILT = frozenset({"corrupted", "foreign", "other format", "wrong size"})
"""Causes that stay with an object: every load of it would fail. Its key names layout and format."""


class ExistenceCache:
    """Answers of `Store.exists`, each good for a short while. Safe from any thread."""

    def __init__(self, answer_ttl_s: float, failure_ttl_s: float) -> None:
        """Remember answers for `answer_ttl_s`, and failed loads, as missing, `failure_ttl_s`."""
        self._answer_ttl_s = answer_ttl_s
        self._failure_ttl_s = failure_ttl_s
        self._known: dict[str, tuple[float, bool]] = {}
        self._corrupted: set[str] = set()
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
        fresh = iter(store.exists(unknown))
        merged = [next(fresh) if answer is None else answer for answer in answers]
        self._remember(
            (
                (key, new)
                for key, new, old in zip(keys, merged, answers, strict=True)
                if old is None
            ),
            self._answer_ttl_s,
        )
        return merged

    def there(self, store: Store, keys: Sequence[str]) -> list[bool]:
        """Return, per key, whether a save need not write the object; asks the store itself.

        What a load found spoilt is removed first: who has the right bytes at hand writes them
        anew. Else the object would fail every load of it for as long as it lives.

        Raises:
            StoreUnavailable, StoreClosed: as `Store.exists`.
        """
        with self._lock:
            corrupted = self._corrupted.intersection(keys)
            self._corrupted -= corrupted
        if corrupted:
            store.remove(sorted(corrupted), force=True)
        return store.exists(keys)

    def mark_stored(self, keys: Iterable[str]) -> None:
        """Remember that these objects exist, whatever failed before."""
        with self._lock:
            for key in (stored := list(keys)):
                self._known.pop(key, None)
        self._remember(((key, True) for key in stored), self._answer_ttl_s)

    def mark_failed(self, keys: Iterable[str]) -> None:
        """Remember that loading these objects failed: they count as missing for a while."""
        self._remember(((key, False) for key in keys), self._failure_ttl_s)

    def mark_faults(self, causes: Mapping[str, str]) -> None:
        """Remember that loading these objects failed, key to reason, and which are spoilt."""
        self.mark_failed(causes)
        with self._lock:
            if len(self._corrupted) > MAX_REMEMBERED:
                self._corrupted.clear()
            self._corrupted.update(
                key for key, cause in causes.items() if cause_of(cause) in SPOILT
            )

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
