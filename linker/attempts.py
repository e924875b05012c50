"""Store calls on one span: tried once more where that may help, and what they may leave behind."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from kvferry.linker import patience
from kvferry.linker.store import FETCHED, STORED, ObjectResult, Outcome, all_are

RETRY_DELAY_S = 0.05
"""Before the one retry: a full store evicts in the background, every 10 ms."""

STILL_ARRIVING = "STILL_ARRIVING"
"""Code of a failed object whose bytes may still land, however soon the call returned."""

ItemT = TypeVar("ItemT")


class Attempts:
    """What became of the store calls on one span.

    A store call that failed may have left work behind that reads or writes the span: a call that
    ran into the transport's own time limit returns while its transfer goes on.

    Attributes:
        drain_s: how long a late transfer may still land.
        wire_us: time in the calls.
    """

    def __init__(self) -> None:
        self.drain_s = 0.0
        self.wire_us = 0.0

    def twice(
        self,
        call: Callable[..., list[ObjectResult]],
        keys: Sequence[str],
        *columns: Sequence[int],
        again: Collection[Outcome],
    ) -> list[ObjectResult]:
        """Call the store, and once more for the objects whose outcome is in `again`.

        Args:
            call: takes the keys and columns.
            keys: of the objects.
            columns: addresses, sizes and so on, one entry for each key.
            again: outcomes that another try may better.
        """
        results = self._once(call, keys, *columns)
        if not again or _all_well(results):
            return results
        failed = [index for index, result in enumerate(results) if result.outcome in again]
        if failed and self.drain_s == 0:
            time.sleep(RETRY_DELAY_S)
            chosen = [chosen_of(column, failed) for column in columns]
            fresh = self._once(call, chosen_of(keys, failed), *chosen)
            for index, result in zip(failed, fresh, strict=True):
                results[index] = result
        return results

    def _once(
        self, call: Callable[..., list[ObjectResult]], keys: Sequence[str], *columns: Any
    ) -> list[ObjectResult]:
        begin_s = time.perf_counter()
        failed = True
        try:
            results = call(keys, *columns)
            failed = not _all_well(results) and any(
                result.outcome is Outcome.FAILED for result in results
            )
            if failed and any(result.code_name == STILL_ARRIVING for result in results):
                self.drain_s = patience.DRAIN_S
        finally:
            taken_s = time.perf_counter() - begin_s
            self.wire_us += taken_s * 1e6
            if failed and taken_s > patience.SLOW_S:
                self.drain_s = patience.DRAIN_S
        return results


def _all_well(results: Sequence[ObjectResult]) -> bool:
    return bool(results) and results[0] in (FETCHED, STORED) and all_are(results, results[0])


def chosen_of(column: Sequence[ItemT], indices: Sequence[int]) -> list[ItemT]:
    """Return the entries of a list at some indices."""
    return [column[index] for index in indices]


def reason_of(result: ObjectResult) -> str:
    """Return an outcome in words, the store's own name for it in brackets."""
    name = f" ({result.code_name})" if result.code_name else ""
    return result.outcome.value + name
