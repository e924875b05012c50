"""Page ids: every wrong one is refused before anything is launched."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.kernels.page_ids import PageIds
from kvferry.layout import CacheLayout
from kvferry.linker.keys import KeyScheme
from kvferry.linker.plan import plan_transfer
from kvferry.models import description
from kvferry.testing import make_tensors


@pytest.fixture(scope="module")
def layout(device: torch.device) -> CacheLayout:
    plain = CacheLayout.from_description(description("odd-bytes"))
    return plain.bind(make_tensors(plain, 8, device))


@pytest.mark.parametrize(
    "ids",
    [
        [3, 0, 7],
        np.array([3, 0, 7], dtype=np.int32),
        np.array([3, 0, 7], dtype=np.uint8),
        torch.tensor([3, 0, 7]),
        torch.tensor([3, 0, 7], dtype=torch.int32),
    ],
)
def test_any_integers_are_taken(layout: CacheLayout, ids: Any) -> None:
    checked = PageIds.check(layout, "full", ids, unique=True)
    assert checked.on_device.tolist() == [3, 0, 7]
    assert checked.on_device.device == layout.device
    assert len(checked) == 3
    assert checked[1:].on_device.tolist() == [0, 7]
    assert PageIds.check(layout, "full", checked, unique=True) is checked


@given(st.lists(st.slices(8), max_size=4))
def test_slices_are_those_of_the_ids_in_place(layout: CacheLayout, parts: list[slice]) -> None:
    wanted = [3, 0, 7, 1, 6, 2, 4, 5]
    got = PageIds.check(layout, "full", wanted, unique=True)
    for part in parts:
        if part.step not in (None, 1):
            with pytest.raises(ArgumentError, match=f"step {part.step}, wanted 1"):
                got[part]
            return
        wanted, got = wanted[part], got[part]
        assert (got.on_device.tolist(), len(got), got.unique) == (wanted, len(wanted), True)
        if wanted:
            assert got.address == got.on_device.data_ptr()
            assert got.id_bytes == got.on_device.element_size()


@pytest.mark.parametrize(
    "bad", [[1.0, 2.0], [True, False], ["1"], [1, None], [[1, 2]], [2**63], [1, -(2**70)]]
)
def test_lists_of_anything_but_small_integers_are_refused(layout: CacheLayout, bad: Any) -> None:
    with pytest.raises(ArgumentError, match="page_ids"):
        PageIds.check(layout, "full", bad, unique=False)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(
    ("ids", "unique", "words"),
    [
        (torch.tensor([0, 8]), False, ["8", "0 .. 7", "'full'"]),
        (torch.tensor([-1, 2]), False, ["-1", "0 .. 7"]),
        (torch.tensor([5, 2, 5]), True, ["5 twice"]),
        (torch.tensor([[1, 2]]), False, ["[1, 2]", "[num_pages]"]),
        (torch.tensor([1.0]), False, ["float32", "int32 or int64"]),
    ],
)
def test_wrong_ids_are_refused(
    layout: CacheLayout, where: str, ids: torch.Tensor, unique: bool, words: list[str]
) -> None:
    with pytest.raises(ArgumentError) as caught:
        PageIds.check(layout, "full", ids.to(layout.device) if where == "device" else ids,
                      unique=unique)  # fmt: skip
    for word in words:
        assert word in str(caught.value)


def test_other_spaces_and_devices_are_refused(layout: CacheLayout) -> None:
    with pytest.raises(ArgumentError, match=r"space is 'swa', wanted one of \['full'\]"):
        PageIds.check(layout, "swa", [1], unique=False)
    with pytest.raises(ArgumentError, match="page_ids are on meta"):
        PageIds.check(layout, "full", torch.empty(2, dtype=torch.int64, device="meta"),
                      unique=False)  # fmt: skip


def test_ids_are_copied_and_doubles_are_allowed_where_pages_are_read(layout: CacheLayout) -> None:
    source = np.array([4, 4])
    checked = PageIds.check(layout, "full", source, unique=False)
    source[:] = 99
    assert checked.on_device.tolist() == [4, 4]
    with pytest.raises(ArgumentError, match="4 twice"):
        PageIds.check(layout, "full", checked, unique=True)
    assert len(PageIds.check(layout, "full", [], unique=True)) == 0


def test_ids_that_were_checked_for_another_layout_are_refused(layout: CacheLayout) -> None:
    checked = PageIds.check(layout, "full", [1, 0], unique=True)
    twin = layout.bind({pool.name: _tensors(layout, pool.name) for pool in layout.pools})
    for ids in (checked, checked[:1]):
        with pytest.raises(ArgumentError, match="were checked for another layout"):
            PageIds.check(twin, "full", ids, unique=True)
        with pytest.raises(ArgumentError, match="were checked for another layout"):
            plan_transfer(
                twin, KeyScheme.of(twin, "n"), list("ab"), {"full": checked},
                unique=False, trailer=False,
            )  # fmt: skip


def _tensors(layout: CacheLayout, pool: str) -> dict[int, torch.Tensor]:
    return {
        buffer.layer_id: buffer.tensor
        for buffers in layout.buffers.values()
        for buffer in buffers
        if buffer.pool.name == pool and buffer.tensor is not None
    }
