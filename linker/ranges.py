"""NVTX ranges in domain `kvferry`: one per transfer, per part on its way, per layer waited for."""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import nvtx
from numpy.typing import NDArray

from kvferry.linker.layer_plan import GroupPart, Rows
from kvferry.linker.plan import SpacePlan

DOMAIN = "kvferry"

COLOURS = {
    "save": 0xFF2E7D32,
    "load": 0xFF1565C0,
    "pack": 0xFF81C784,
    "unpack": 0xFF64B5F6,
    "wire": 0xFFFFB300,
    "wait": 0xFFE53935,
}
"""Of each kind, as ARGB. The kind is also the range's category, and the first word of its name."""

_PAYLOAD = np.dtype([("bytes", np.int64), ("pages", np.int64)])

_domain = nvtx.get_domain(DOMAIN)
is_heard = nvtx.enabled() and isinstance(_domain, nvtx.Domain)
"""Whether a tool listens. It does from the process's start on, or never."""

# All at once, here: the package numbers categories as they come, without a lock.
_categories = {kind: _domain.get_category_id(kind) for kind in COLOURS} if is_heard else {}


class _Mine(threading.local):
    """What a thread has told of its ranges before, by kind and rest of the name: each once."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], tuple[Any, NDArray[Any] | None]] = {}


_mine = _Mine()

CallT = TypeVar("CallT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """What a range says.

    Attributes:
        kind: one of `COLOURS`.
        what: the rest of its name. Tools keep every name for good, so this may tell layers, of
            which there are few, and no sizes.
        num_bytes, num_pages: its payload; none for a range in which nothing moves.
    """

    kind: str
    what: str = ""
    num_bytes: int | None = None
    num_pages: int = 0

    def open(self) -> None:
        """Begin the range in this thread; `close` ends it."""
        known = _mine.attributes.get((self.kind, self.what))
        if known is None:
            payload = None if self.num_bytes is None else np.zeros((), _PAYLOAD)
            name = f"{self.kind} {self.what}".rstrip()
            attributes = _domain.get_event_attributes(
                name, COLOURS[self.kind], _categories[self.kind], payload
            )
            known = _mine.attributes[self.kind, self.what] = (attributes, payload)
        attributes, payload = known
        if payload is not None:
            payload[()] = (self.num_bytes, self.num_pages)  # the attributes point to it
        _domain.push_range(attributes)

    @staticmethod
    def close() -> None:
        """End the range that this thread began last."""
        _domain.pop_range()


def ranged(describe: Callable[..., Range]) -> Callable[[CallT], CallT]:
    """Put a range around every call of a function, closed whatever comes of the call.

    Where no tool listens the function stays what it is, and costs nothing.

    Args:
        describe: takes the arguments of the call.
    """

    def wrapped(function: CallT) -> CallT:
        if not is_heard:
            return function

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            described = describe(*arguments, **options)
            described.open()
            try:
                return function(*arguments, **options)
            finally:
                described.close()

        return cast(CallT, call)

    return wrapped


def of_plans(kind: str, plans: Iterable[SpacePlan], what: str = "") -> Range:
    """Describe whole objects: their payloads' bytes."""
    plans = list(plans)
    num_bytes = sum(plan.num_bytes for plan in plans)
    return Range(kind, what, num_bytes, sum(len(plan.keys) for plan in plans))


def of_rows(kind: str, rows: Mapping[str, Rows]) -> Range:
    """Describe a layer-wise batch of transfers: their objects' payloads."""
    return of_plans(kind, (one.plan for one in rows.values()), "layers")


def of_layers(kind: str, group: tuple[int, int]) -> Range:
    """Describe a layer group of which no bytes move: one that is waited for."""
    first, end = group
    return Range(kind, f"layers {first}..{end - 1}")


def of_part(kind: str, part: GroupPart, rows: Sequence[Sequence[int]]) -> Range:
    """Describe those rows of a layer group's part that travel, piece by piece."""
    counts = [len(wanted) for wanted in rows]
    sizes = [piece.range_bytes for piece in part.pieces]
    num_bytes = sum(count * size for count, size in zip(counts, sizes, strict=True))
    return Range(kind, part.name, num_bytes, sum(counts))
