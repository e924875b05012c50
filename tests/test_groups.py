"""Layer groups: what the choice promises, for real models and any sizes."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.groups import (
    GOOD_RANGE_BYTES,
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


def test_where_compute_hides_the_transfer_groups_are_as_long_as_they_come_in_time() -> None:
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    offsets = layout.layer_offsets["full"]

    def lengths(compute_us: float) -> list[int]:
        groups = choose_groups(offsets, compute_us_per_layer=compute_us, transfer_us_per_layer=100)
        return [end - first for first, end in groups]

    # While one layer computes 3.5 come, while four do 14, of which three are there already.
    assert lengths(500) == [1, 3, 11, 21, 21, 4]
    assert lengths(200) == [1, 1, 1, 2, 3, 4, 5, 7, 10, 14, 13]
    # Barely hidden: a quarter of what came before, so that calls stay few.
    assert lengths(100) == [1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 1]
    assert len(lengths(99)) == 5  # not hidden


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


@example([0, 1, 0, 32 << 10, 32 << 10], 2.0)  # a layer without bytes computes too
@given(
    st.lists(st.integers(0, 300 << 10), min_size=2, max_size=80),
    st.floats(1, 30),
)
def test_hidden_groups_are_late_only_where_they_are_as_short_as_may_be(
    sizes: list[int], ratio: float
) -> None:
    groups = choose_groups(
        offsets_of(sizes), compute_us_per_layer=100 * ratio, transfer_us_per_layer=100
    )
    us_per_byte = 100 * len(sizes) / max(1, sum(sizes))
    for (first, end), (_, after) in itertools.pairwise((*groups[1:], (len(sizes), 0))):
        range_bytes = sum(sizes[first:end])
        before_us = 0.7 * 100 * ratio * first
        come_us = sum(sizes[groups[0][1] : end]) * us_per_byte
        if come_us > before_us * 1.000001:  # late, so its last layer was needed
            last = max(layer for layer in range(first, end) if sizes[layer])
            least = max(LEAST_HIDDEN_BYTES, min(sum(sizes[:first]) // 4, GOOD_RANGE_BYTES))
            joined = end == len(sizes) and sum(sizes[last:]) < LEAST_HIDDEN_BYTES
            assert sum(sizes[first:last]) < least or joined
        elif after:  # in time, so another layer would have been late, or the range is long
            more_us = come_us + sizes[end] * us_per_byte
            assert more_us > before_us * 0.999999 or range_bytes >= GOOD_RANGE_BYTES


sizes = st.lists(st.integers(0, 3 << 20) | st.just(0), min_size=1, max_size=80)


@given(sizes, st.none() | st.floats(1, 1e4), st.none() | st.floats(1, 1e4))
def test_promises_hold_for_any_sizes(
    sizes: list[int], compute_us: float | None, transfer_us: float | None
) -> None:
    offsets = offsets_of(sizes)
    groups = choose_groups(
        offsets, compute_us_per_layer=compute_us, transfer_us_per_layer=transfer_us
    )
    assert check_groups(groups, len(sizes)) == groups
    nonempty = [layer for layer, size in enumerate(sizes) if size]
    if not nonempty:
        assert groups == ((0, len(sizes)),)
        return
    lengths = [offsets[end] - offsets[first] for first, end in groups]
    assert all(lengths)
    # The first group holds one layer's bytes, and those without that follow it.
    assert lengths[0] == sizes[nonempty[0]]
    # All others are worth a call; of only two groups the second takes what is left.
    hidden = compute_us is not None and transfer_us is not None and compute_us >= transfer_us
    least_bytes = LEAST_HIDDEN_BYTES if hidden else LEAST_RANGE_BYTES
    assert all(length >= least_bytes for length in lengths[1:-1])
    assert lengths[-1] >= least_bytes or len(groups) <= 2
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
