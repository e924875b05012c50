"""Layer groups: what the choice promises, for real models and any sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.groups import LEAST_RANGE_BYTES, check_groups, choose_groups
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
    # Compute hides everything: as few calls as ranges of 1 MiB allow.
    hidden = choose_groups(offsets, compute_us_per_layer=500, transfer_us_per_layer=100)
    assert hidden == ((0, 1), (1, 22), (22, 43), (43, 61))


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
    assert all(length >= LEAST_RANGE_BYTES for length in lengths[1:-1])
    assert lengths[-1] >= LEAST_RANGE_BYTES or len(groups) <= 2
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
