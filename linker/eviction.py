"""Objects taken out of a store of one's own, as a master's eviction would; for tests and trials.

Leases are not heeded: whoever reads such an object gets what its memory holds next. Nothing of
kvferry's own does that; `Store.remove` leaves what is leased.
"""

import re
from collections.abc import Sequence
from typing import Any

from kvferry.linker import codes
from kvferry.linker.store import STORED, ObjectResult

MAX_CALL_OBJECTS = 1000


def evict(store: Any, keys: Sequence[str]) -> list[ObjectResult]:
    """Delete objects, leased or not; per key STORED (done), MISSING or FAILED.

    Args:
        store: a `MooncakeStore`, open until this returns.
        keys: of the objects.
    """
    answers: list[int] = []
    for first in range(0, len(keys), MAX_CALL_OBJECTS):
        answers += store.client.batch_remove(list(keys[first : first + MAX_CALL_OBJECTS]), True)
    return [STORED if code == 0 else codes.failure(code) for code in answers]


def evict_under(store: Any, prefix: str) -> int:
    """Delete all objects whose keys begin with `prefix`; return how many were."""
    return int(store.client.remove_by_regex("^" + re.escape(prefix), True))
