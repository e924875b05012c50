"""Runs of a page against torch's own order of elements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.runs import MAX_RUNS, page_runs


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view `[pages, ...]` with permuted, sliced and offset dimensions."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    view = torch.arange(int(torch.tensor(shape).prod()) * 8, dtype=torch.int16)[
        : int(torch.tensor(shape).prod())
    ].view(shape)
    for dim in range(len(shape)):
        start = draw(st.integers(0, view.shape[dim] - 1))
        step = draw(st.integers(1, 2))
        view = view[(slice(None),) * dim + (slice(start, None, step),)]
    return view.permute(draw(st.permutations(range(len(shape)))))


@given(views())
def test_runs_list_the_bytes_of_every_page_in_memory_order(view: torch.Tensor) -> None:
    page_stride = view.stride(0) * 2
    strides = [stride * 2 for stride in view.stride()[1:]]
    order, runs = page_runs(view.shape[1:], strides, 2, view.shape[0], page_stride)
    flat = [dim for dim in range(view.dim() - 1) if dim not in order]
    for page in range(view.shape[0]):
        ordered = view[page].permute(*flat, *order).reshape(-1)
        # Each element is its own place in the storage.
        wanted = [
            (int(element) * 2 + byte) - (view[page].storage_offset() * 2)
            for element in ordered
            for byte in (0, 1)
        ]
        got = [
            run.offset_bytes + part * run.pitch_bytes + byte
            for run in runs
            for part in range(run.count)
            for byte in range(run.length_bytes)
        ]
        assert got == wanted
        assert got == sorted(got)


def test_contiguous_pages_are_one_run() -> None:
    order, runs = page_runs((4, 2, 8), (32, 16, 2), 2, 3, 128)
    assert order == (0, 1, 2)
    assert [(run.offset_bytes, run.length_bytes, run.count) for run in runs] == [(0, 128, 1)]


def test_two_pitches_become_several_runs() -> None:
    _, runs = page_runs((2, 3, 4), (1000, 100, 2), 2, 1, 0)
    assert [(run.offset_bytes, run.length_bytes, run.count, run.pitch_bytes) for run in runs] == [
        (0, 8, 3, 100),
        (1000, 8, 3, 100),
    ]


def test_overlap_and_scatter_are_refused() -> None:
    with pytest.raises(LayoutError, match="stride of 0"):
        page_runs((4, 8), (0, 2), 2, 1, 16)
    with pytest.raises(LayoutError, match="overlap"):
        page_runs((4, 8), (16, 2), 2, 3, 32)
    with pytest.raises(LayoutError, match=f"at most {MAX_RUNS}"):
        page_runs((MAX_RUNS + 1, 2, 4), (1000, 100, 2), 2, 1, 0)
