"""Which consecutive layers travel together, when a transfer goes layer by layer."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from kvferry.errors import ArgumentError

LEAST_RANGE_BYTES = 256 << 10
"""Below this a range costs more than its bytes: over TCP loopback, ranges of 34 KiB take twice, of
8.6 KiB seven to ten times as long as the same bytes in one piece (Mooncake 0.3.13)."""

LEAST_HIDDEN_BYTES = 32 << 10
"""Shortest range where compute is known to hide the transfer: it may take twice as long as the same
bytes in one piece, since calls run beside each other and beside compute, but not ten times."""

GOOD_RANGE_BYTES = 1 << 20
"""From this on longer ranges gain nothing: every call costs 1 to 1.5 ms, whatever it moves."""


CALL_US = 1_250.0
"""What a ranged call costs, whatever it moves (TCP loopback, Mooncake 0.3.13: 1 to 1.5 ms)."""

RANGE_US = 75.0
"""What each of its ranges costs, however short (there: 75 µs)."""

IN_TIME = 0.75
"""Share of the compute that a transfer may count on: one that was measured before is a fifth slower
now and then."""


def choose_groups(
    layer_offsets: Sequence[int],
    *,
    least_range_bytes: int = LEAST_RANGE_BYTES,
    good_range_bytes: int = GOOD_RANGE_BYTES,
    compute_us_per_layer: float | None = None,
    transfer_us_per_layer: float | None = None,
    call_us: float = CALL_US + RANGE_US,
) -> tuple[tuple[int, int], ...]:
    """Return the groups, `[first, end)` ranges of layers, in order, that cover every layer.

    A group is one range of each object and one call, so groups should be long; but layer 0 can
    start only once the first group is there, so that one should be short. Hence:

    - The first group ends with the first layer that has bytes, however few they are: its price is
      one call, and it is what a step waits for.
    - Ranges then double, from `least_range_bytes` on, up to `good_range_bytes`: while a group is
      used the next one arrives, so each may take about as long as those before it together.
    - Where a layer's compute is known to take longer than its transfer, one wait should be all: the
      first group is the shortest behind which every other comes in time, by `IN_TIME` of the
      compute before it. (One layer first would have the second wait for its own call.) The others
      are as long as they may be and still come in time, so that calls stay few; they have
      `LEAST_HIDDEN_BYTES` at least and `good_range_bytes` at most.
    - Where the transfer is known to take longer, calls are what can be saved, and ranges go on
      doubling up to four times `good_range_bytes`.
    - A last group shorter than the shortest range joins the one before.
    - Layers without bytes belong to the group of the layer before them: they are there with it.

    Args:
        layer_offsets: `num_layers + 1` offsets in the object, as `CacheLayout.layer_offsets`.
        least_range_bytes: shortest range worth a call of its own, but for the first.
        good_range_bytes: range beyond which nothing is gained.
        compute_us_per_layer: time of a layer's compute, if known.
        transfer_us_per_layer: time of a layer's transfer, all pages, if known.
        call_us: what a call costs besides, with as many ranges as there are pages; see `CALL_US`.

    Raises:
        ArgumentError: offsets that descend, or fewer than two; a size or time that is not positive.
    """
    steps = list(itertools.pairwise(layer_offsets))
    if not steps or any(end < start for start, end in steps):
        raise ArgumentError(
            f"layer_offsets are {list(layer_offsets)[:8]}, wanted two or more, ascending"
        )
    for name, value in (
        ("least_range_bytes", least_range_bytes),
        ("good_range_bytes", good_range_bytes),
        ("compute_us_per_layer", compute_us_per_layer),
        ("transfer_us_per_layer", transfer_us_per_layer),
    ):
        if value is not None and value <= 0:
            raise ArgumentError(f"{name} is {value}, wanted a positive number")
    if call_us < 0:
        raise ArgumentError(f"call_us is {call_us}, wanted 0 or more")
    longest = max(good_range_bytes, least_range_bytes)
    wanted = 1  # what the next group must reach; at first a single byte
    if compute_us_per_layer is not None and transfer_us_per_layer is not None:
        if compute_us_per_layer >= transfer_us_per_layer:
            num_bytes = layer_offsets[-1] - layer_offsets[0]
            return _hidden(
                layer_offsets,
                min(least_range_bytes, LEAST_HIDDEN_BYTES),
                longest,
                max(IN_TIME * compute_us_per_layer, transfer_us_per_layer),
                transfer_us_per_layer * len(steps) / max(1, num_bytes),
                call_us,
            )
        longest *= 4
    groups: list[tuple[int, int]] = []
    first = 0
    for layer_id, (_, end) in enumerate(steps):
        if end - layer_offsets[first] >= wanted:
            wanted = min(max(2 * wanted, least_range_bytes), longest)
            groups.append((first, layer_id + 1))
            first = layer_id + 1
    return _with_rest(groups, first, layer_offsets, least_range_bytes)


def _hidden(
    layer_offsets: Sequence[int],
    least_bytes: int,
    longest_bytes: int,
    compute_us: float,
    us_per_byte: float,
    call_us: float,
) -> tuple[tuple[int, int], ...]:
    """Return the groups with the shortest first one behind which all others come in time."""
    for first_end in range(1, len(layer_offsets)):
        first_bytes = layer_offsets[first_end] - layer_offsets[0]
        if first_bytes or first_end == len(layer_offsets) - 1:
            groups = [(0, first_end)]
            while layer_offsets[first := groups[-1][1]] < layer_offsets[-1]:
                # Layers without bytes compute too, and need nothing.
                needed = bisect_right(layer_offsets, layer_offsets[first]) - 1
                room_us = compute_us * needed - call_us * len(groups)
                come_bytes = layer_offsets[first] - layer_offsets[first_end]
                room_bytes = min(room_us / us_per_byte - come_bytes, longest_bytes)
                end = bisect_right(layer_offsets, layer_offsets[first] + max(0, room_bytes)) - 1
                range_bytes = layer_offsets[end] - layer_offsets[first]
                if range_bytes < min(least_bytes, layer_offsets[-1] - layer_offsets[first]):
                    break  # too short to be worth a call, or late
                groups.append((first, end))
            else:
                return _with_rest(groups, groups[-1][1], layer_offsets, least_bytes)
    raise AssertionError("one group of all layers is always in time")


def check_groups(groups: Sequence[tuple[int, int]], num_layers: int) -> tuple[tuple[int, int], ...]:
    """Return groups that somebody has fixed, once they are known to be such.

    Raises:
        ArgumentError: they do not cover layers 0 .. num_layers - 1, each once, in order.
    """
    edges = [0, *(end for _, end in groups)]
    if [tuple(group) for group in groups] != list(itertools.pairwise(edges)) or (
        edges[-1] != num_layers or any(first >= end for first, end in groups)
    ):
        raise ArgumentError(
            f"groups are {[tuple(group) for group in groups]}, wanted ranges that follow each "
            f"other from 0 to {num_layers}"
        )
    return tuple((first, end) for first, end in groups)


def _with_rest(
    groups: list[tuple[int, int]], first: int, layer_offsets: Sequence[int], least_bytes: int
) -> tuple[tuple[int, int], ...]:
    """Give the layers from `first` on a group of their own, or add them to the last one."""
    num_layers = len(layer_offsets) - 1
    rest_bytes = layer_offsets[-1] - layer_offsets[first]
    if first < num_layers:
        # The first group stays short, whatever is left over.
        joins = bool(groups) and (rest_bytes == 0 or (rest_bytes < least_bytes and len(groups) > 1))
        if joins:
            groups[-1] = (groups[-1][0], num_layers)
        else:
            groups.append((first, num_layers))
    return _trailing_empty(groups, layer_offsets)


def _trailing_empty(
    groups: list[tuple[int, int]], layer_offsets: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Move layers without bytes from a group's beginning to the end of the one before."""
    starts = []
    for number, (first, _) in enumerate(groups):
        start = first
        while number and layer_offsets[start + 1] == layer_offsets[start]:
            start += 1
        starts.append(start)
    return tuple(itertools.pairwise([*starts, groups[-1][1]]))
