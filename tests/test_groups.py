"""Layer groups: what the choice promises, for real models and any sizes."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.groups import (
    IN_TIME,
    LEAST_HIDDEN_BYTES,
    LEAST_RANGE_BYTES,
    check_groups,
    choose_groups,
)
from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions


def offsets_of(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def test_deepseek_v32_starts_with_one_layer_and_doubles() -> None:
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    offsets = layout.layer_offsets["full"]
    groups = choose_groups(offsets)
    assert groups == ((0, 1), (1, 7), (7, 18), (18, 39), (39, 61))
    sizes = [offsets[end] - offsets[first] for first, end in groups]
    assert sizes == [50432, 302592, 554752, 1059072, 1109504]


def test_where_compute_hides_the_transfer_only_the_first_group_is_waited_for() -> None:
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    offsets = layout.layer_offsets["full"]

    def lengths(compute_us: float, call_us: float) -> list[int]:
        groups = choose_groups(
            offsets,
            compute_us_per_layer=compute_us,
            transfer_us_per_layer=2_000,
            call_us=call_us,
        )
        return [end - first for first, end in groups]

    assert lengths(10_000, 1_000) == [1, 3, 11, 20, 20, 6]
    # Calls of 32 ranges take longer than a layer's compute: one layer first would be too few.
    assert lengths(4_000, 3_650) == [4, 4, 4, 4, 4, 4, 5, 5, 6, 7, 9, 5]
    assert len(lengths(1_999, 3_650)) == 5  # not hidden


def test_where_the_wire_is_late_anyway_calls_are_saved() -> None:
    layout = CacheLayout.from_description(description("llama-3.1-70b-hnd"))
    offsets = layout.layer_offsets["full"]
    plain = choose_groups(offsets)
    late = choose_groups(offsets, compute_us_per_layer=100, transfer_us_per_layer=500)
    assert [end - first for first, end in plain] == [1, 1, 2, *[4] * 19]
    assert [end - first for first, end in late] == [1, 1, 2, 4, 8, *[16] * 4]


@pytest.mark.parametrize("model", sorted(descriptions()))
def test_real_models_are_covered(model: str) -> None:
    layout = CacheLayout.from_description(description(model))
    for space in layout.spaces:
        offsets = layout.layer_offsets[space]
        groups = check_groups(choose_groups(offsets), layout.num_layers)
        sizes = [offsets[end] - offsets[first] for first, end in groups]
        assert all(size > 0 for size in sizes)
        assert all(size >= LEAST_RANGE_BYTES for size in sizes[1:-1])


def stall_us(
    sizes: list[int], groups: Sequence[tuple[int, int]], compute_us: float, call_us: float
) -> float:
    """How long compute waits behind the first group, all groups coming one after another."""
    us_per_byte = 100 * len(sizes) / max(1, sum(sizes))
    came_us = now_us = stall = 0.0
    for number, (first, end) in enumerate(groups):
        came_us += call_us + sum(sizes[first:end]) * us_per_byte
        if number:
            stall += max(0.0, came_us - now_us)
        now_us = max(now_us, came_us) + compute_us * (end - first)
    return stall


@given(
    st.lists(st.integers(40_000, 90_000), min_size=2, max_size=9),
    st.floats(1, 30),
    st.floats(0, 500),
)
def test_no_shorter_first_group_would_have_all_others_in_time(
    sizes: list[int], ratio: float, call_us: float
) -> None:
    counted_us = max(IN_TIME * 100 * ratio, 100)
    groups = choose_groups(
        offsets_of(sizes),
        compute_us_per_layer=100 * ratio,
        transfer_us_per_layer=100,
        call_us=call_us,
    )
    assert stall_us(sizes, groups, counted_us, call_us) < 1e-6
    for length in range(1, groups[0][1]):
        for others in range(1 << (len(sizes) - length - 1)):  # every way to cut the rest
            inner = [i + length + 1 for i in range(len(sizes) - length - 1) if others >> i & 1]
            edges = [0, length, *inner, len(sizes)]
            late = stall_us(sizes, list(itertools.pairwise(edges)), counted_us, call_us)
            assert late > 0


sizes = st.lists(st.integers(0, 3 << 20) | st.just(0), min_size=1, max_size=80)


@given(sizes, st.none() | st.floats(1, 1e4), st.none() | st.floats(1, 1e4), st.floats(0, 1e4))
def test_promises_hold_for_any_sizes(
    sizes: list[int], compute_us: float | None, transfer_us: float | None, call_us: float
) -> None:
    offsets = offsets_of(sizes)
    groups = choose_groups(
        offsets,
        compute_us_per_layer=compute_us,
        transfer_us_per_layer=transfer_us,
        call_us=call_us,
    )
    assert check_groups(groups, len(sizes)) == groups
    nonempty = [layer for layer, size in enumerate(sizes) if size]
    if not nonempty:
        assert groups == ((0, len(sizes)),)
        return
    lengths = [offsets[end] - offsets[first] for first, end in groups]
    assert all(lengths)
    # The first group holds one layer's bytes, and those without that follow it; unless it is what
    # the others hide behind.
    hidden = compute_us is not None and transfer_us is not None and compute_us >= transfer_us
    assert hidden or lengths[0] == sizes[nonempty[0]]
    # All others are worth a call; of only two groups the second takes what is left.
    least_bytes = LEAST_HIDDEN_BYTES if hidden else LEAST_RANGE_BYTES
    assert all(length >= least_bytes for length in lengths[1:-1])
    assert lengths[-1] >= least_bytes or len(groups) <= 2 or hidden
    # Layers without bytes are in the group of the layer before them.
    for first, _ in groups[1:]:
        assert sizes[first] > 0


def test_groups_that_somebody_fixed_are_checked() -> None:
    assert check_groups([(0, 2), (2, 5)], 5) == ((0, 2), (2, 5))
    for bad in ([(0, 2), (3, 5)], [(0, 2)], [(0, 3), (2, 5)], [(0, 0), (0, 5)], [], [(1, 5)]):
        with pytest.raises(ArgumentError, match="wanted ranges that follow each other from 0 to 5"):
            check_groups(bad, 5)


def test_wrong_arguments_are_refused() -> None:
    for offsets in ([], [0], [0, 5, 3]):
        with pytest.raises(ArgumentError, match="layer_offsets"):
            choose_groups(offsets)
    for name in ("least_range_bytes", "good_range_bytes", "compute_us_per_layer"):
        with pytest.raises(ArgumentError, match=f"{name} is 0"):
            choose_groups([0, 5], **{name: 0})
