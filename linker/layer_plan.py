"""How requests travel layer group by layer group: which rows, which bytes, which call."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ArgumentError
from kvferry.groups import CALL_US, RANGE_US, check_groups, choose_groups
from kvferry.layout import CacheLayout
from kvferry.linker.plan import OBJECT_ALIGN_BYTES, SpacePlan

LEAST_SHARED_RANGES = 8
"""Fewer of a group's ranges are not worth a store call beside another's."""

Tail = tuple[int, str]
"""How many tokens of a page are wanted, and what becomes of the others."""


@dataclass(frozen=True)
class Rows:
    """The pages of one index space, of all requests of a batch; a row is a page.

    Attributes:
        plan: keys and page ids of the rows.
        owners: which request a row is of, `[num_rows]`.
        tails: row to its tail, for pages that are wanted in part.
        rounds: `[first, end)` ranges of rows in which no key is twice: requests may share keys,
            but one store call fills only one place for each.
    """

    plan: SpacePlan
    owners: NDArray[np.int64]
    tails: Mapping[int, Tail]
    rounds: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.plan.keys)


def merge(
    requests: Sequence[tuple[SpacePlan, ...]], tails: Sequence[Tail | None]
) -> dict[str, Rows]:
    """Return the rows of each index space.

    Args:
        requests: the plans of each.
        tails: of each request's last page; None if it is wanted whole.

    Raises:
        ArgumentError: two requests have a page in common.
    """
    found: dict[str, list[tuple[int, SpacePlan]]] = {}
    for number, plans in enumerate(requests):
        for plan in plans:
            found.setdefault(plan.space, []).append((number, plan))
    return {space: _rows(plans, tails) for space, plans in found.items()}


def _rows(plans: Sequence[tuple[int, SpacePlan]], tails: Sequence[Tail | None]) -> Rows:
    space = plans[0][1].space
    keys = [key for _, plan in plans for key in plan.keys]
    page_ids = np.concatenate([plan.page_ids for _, plan in plans])
    owners = np.repeat([number for number, _ in plans], [len(plan.keys) for _, plan in plans])
    if len(plans) > 1:
        ordered = np.sort(page_ids)
        doubles = ordered[1:][ordered[1:] == ordered[:-1]]
        if doubles.size:
            raise ArgumentError(
                f"page_ids of {space!r} hold {doubles[0]} in two requests, wanted each destination "
                "once"
            )
    cut: dict[int, Tail] = {}
    end = 0
    for number, plan in plans:
        end += len(plan.keys)
        tail = tails[number]
        if tail is not None and plan.holds_last and space != "state":
            cut[end - 1] = tail
    plan = plans[0][1]._replace(keys=keys, page_ids=page_ids, holds_last=False)
    if len(set(keys)) == len(keys):
        return Rows(plan, owners, cut, ((0, len(keys)),))
    # The second time that a key comes, its row goes behind all first ones, and so on.
    times: dict[str, int] = {}
    which = np.empty(len(keys), dtype=np.int64)
    for row, key in enumerate(keys):
        which[row] = times[key] = times.get(key, -1) + 1
    order = np.argsort(which, kind="stable")
    place = np.argsort(order)
    edges = np.searchsorted(which[order], np.arange(which.max() + 2))
    return Rows(
        plan._replace(keys=[keys[row] for row in order], page_ids=page_ids[order]),
        owners[order],
        {int(place[row]): tail for row, tail in cut.items()},
        tuple(itertools.pairwise(edges.tolist())),
    )


@dataclass(frozen=True)
class Piece:
    """One layer group of consecutive rows of one index space, in a span.

    Attributes:
        space: the index space.
        first_row, end_row: the rows.
        origin_bytes: where the group begins in an object.
        range_bytes: how much of the object travels; with its end, if `has_end`.
        has_end: whether the object's checksums and trailer travel with this group.
        base_bytes: where the first row's range stands in the span.
        stride_bytes: from one row's range to the next.
    """

    space: str
    first_row: int
    end_row: int
    origin_bytes: int
    range_bytes: int
    has_end: bool
    base_bytes: int
    stride_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return self.end_row - self.first_row

    def addresses(self, base: int) -> list[int]:
        """Return where the rows' ranges stand, in a span at `base`."""
        first = base + self.base_bytes
        return list(range(first, first + self.num_rows * self.stride_bytes, self.stride_bytes))


@dataclass(frozen=True)
class GroupPart:
    """What shares a span and a store call: pieces of one layer group.

    Attributes:
        group: number of the layer group.
        first_layer, end_layer: its layers.
        pieces: of one or more index spaces.
        staging_bytes: what they take of staging.
    """

    group: int
    first_layer: int
    end_layer: int
    pieces: tuple[Piece, ...]
    staging_bytes: int

    @property
    def name(self) -> str:
        """The layers, for timelines and messages."""
        return f"layers {self.first_layer}..{self.end_layer - 1}"

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return sum(piece.num_rows * piece.range_bytes for piece in self.pieces)


def groups_for(
    layout: CacheLayout,
    rows: Mapping[str, Rows],
    fixed: Sequence[tuple[int, int]] | None,
    compute_us_per_layer: float | None,
    wire_gb_per_s: float | None,
) -> tuple[tuple[int, int], ...]:
    """Return the layer groups of a batch; see `kvferry.groups`.

    Where several index spaces travel, what counts is the mean range of their objects.

    Args:
        layout: of the objects.
        rows: what travels.
        fixed: the groups, if somebody has chosen them already.
        compute_us_per_layer: time of a layer's compute, if known.
        wire_gb_per_s: rate of the store, 1e9 bytes a second, if known.

    Raises:
        ArgumentError: fixed groups that do not cover the layers.
    """
    if fixed is not None:
        return check_groups(fixed, layout.num_layers)
    num_rows = tuple(len(one) for one in rows.values())
    if wire_gb_per_s is None:  # then shares alone count, and most batches have the same
        scale = max(1, math.gcd(*num_rows))
        num_rows = tuple(number // scale for number in num_rows)
    offsets = tuple(tuple(layout.layer_offsets[space]) for space in rows)
    return _groups_of(offsets, num_rows, layout.num_layers, compute_us_per_layer, wire_gb_per_s)


@lru_cache(maxsize=1024)
def _groups_of(
    offsets_by_space: tuple[tuple[int, ...], ...],
    num_rows: tuple[int, ...],
    num_layers: int,
    compute_us_per_layer: float | None,
    wire_gb_per_s: float | None,
) -> tuple[tuple[int, int], ...]:
    offsets = np.array(offsets_by_space, dtype=np.int64)
    weighted = (offsets * np.array(num_rows, dtype=np.int64)[:, None]).sum(axis=0)
    transfer_us = None
    if wire_gb_per_s is not None:
        transfer_us = max(1.0, float(weighted[-1])) / num_layers / (wire_gb_per_s * 1e3)
    # Rounded up, so that a layer with few bytes does not look like one without any.
    mean = -(-weighted // max(1, sum(num_rows))) if num_rows else [0] * (num_layers + 1)
    return choose_groups(
        [int(offset) for offset in mean],
        compute_us_per_layer=compute_us_per_layer,
        transfer_us_per_layer=transfer_us,
        call_us=CALL_US + RANGE_US * sum(num_rows),
    )


def cut(
    layout: CacheLayout,
    rows: Mapping[str, Rows],
    groups: Sequence[tuple[int, int]],
    max_bytes: int,
    first_parts: int = 1,
) -> Iterator[list[GroupPart]]:
    """Yield the parts of each layer group, in order; a group without bytes has none.

    Args:
        layout: of the objects.
        rows: what travels.
        groups: `[first, end)` ranges of layers.
        max_bytes: of staging that a part may take, unless a single range is longer.
        first_parts: in how many parts of like size the first group comes, if it has
            `LEAST_SHARED_RANGES` for each: so many store calls can be made for it at once.
    """
    num_ranges = sum(map(len, rows.values()))
    first_parts = max(1, min(first_parts, num_ranges // LEAST_SHARED_RANGES))
    spans = {space: _ranges(layout, one.plan, groups) for space, one in rows.items()}
    num_rounds = max((len(one.rounds) for one in rows.values()), default=0)
    for number, (first_layer, end_layer) in enumerate(groups):
        num_bytes = sum(
            len(one) * _stride(*spans[space][number][:2]) for space, one in rows.items()
        )
        fair_bytes = max_bytes if number else min(max_bytes, -(-num_bytes // first_parts))
        cutter = _Cutter(number, first_layer, end_layer, fair_bytes)
        for turn in range(num_rounds):
            for space, one in rows.items():
                start, end, has_end = spans[space][number]
                if end > start and turn < len(one.rounds):
                    cutter.add(space, *one.rounds[turn], start, end - start, has_end=has_end)
            cutter.flush()
        yield cutter.parts


def _ranges(
    layout: CacheLayout, plan: SpacePlan, groups: Sequence[tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Return, per group, first and last byte in the object, and whether its end is among them."""
    offsets = layout.layer_offsets[plan.space]
    ranges = [(offsets[first], offsets[end], False) for first, end in groups]
    last = max((i for i, (start, end, _) in enumerate(ranges) if end > start), default=0)
    ranges[last] = (ranges[last][0], plan.size_bytes, plan.end_bytes > 0)
    return ranges


def _stride(start: int, end: int) -> int:
    """Return the distance in staging of ranges that begin and end at these bytes of objects."""
    return -(-(start % OBJECT_ALIGN_BYTES + end - start) // OBJECT_ALIGN_BYTES) * OBJECT_ALIGN_BYTES


class _Cutter:
    """Fills parts with pieces until they are full."""

    def __init__(self, number: int, first_layer: int, end_layer: int, max_bytes: int) -> None:
        self.parts: list[GroupPart] = []
        self._group = (number, first_layer, end_layer)
        self._max_bytes = max_bytes
        self._pieces: list[Piece] = []
        self._used = 0

    def add(
        self, space: str, row: int, end_row: int, start: int, num_bytes: int, *, has_end: bool
    ) -> None:
        """Add the rows' ranges of `num_bytes` from byte `start` of their objects."""
        # As far behind a multiple of 64 as in the object, so that kernels keep to wide accesses.
        lead, stride = start % OBJECT_ALIGN_BYTES, _stride(start, start + num_bytes)
        while row < end_row:
            fitting = (self._max_bytes - self._used) // stride
            if fitting < 1 and self._pieces:
                self.flush()
                continue
            count = min(max(1, fitting), end_row - row)
            self._pieces.append(
                Piece(space, row, row + count, start, num_bytes, has_end, self._used + lead, stride)
            )
            self._used += count * stride
            row += count

    def flush(self) -> None:
        """Begin another part."""
        if self._pieces:
            self.parts.append(GroupPart(*self._group, tuple(self._pieces), self._used))
        self._pieces, self._used = [], 0
