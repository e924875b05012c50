"""The telling bytes tell: what kvferry's tests rely on is itself shown to fail."""

import pytest
import torch

from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.testing import (
    check_poison,
    check_telling,
    make_tensors,
    object_bytes_of,
    poison,
    telling_bytes,
    write_telling,
)


@pytest.fixture
def layout() -> CacheLayout:
    plain = CacheLayout.from_description(description("qwen3-8b-fp8-scales"))
    return plain.bind(make_tensors(plain, 4))


def test_words_are_unique_over_buffers_pages_and_places() -> None:
    words = torch.cat(
        [
            telling_bytes(salt, torch.arange(16), 4096).contiguous().view(torch.int64).flatten()
            for salt in range(1, 40)
        ]
    )
    assert len(words.unique()) == len(words)
    halves = words.view(torch.int16)
    # bfloat16 NaNs with payloads, infinities' neighbours and negative zero are all among them
    assert bool(halves.view(torch.bfloat16).isnan().any())
    assert bool((halves == -(2**15)).any())
    assert len(words.view(torch.uint8).unique()) == 256


def test_a_tail_of_odd_length_is_cut_not_padded() -> None:
    assert telling_bytes(1, torch.tensor([5]), 13).shape == (1, 13)
    whole = telling_bytes(1, torch.tensor([5]), 16)
    assert torch.equal(telling_bytes(1, torch.tensor([5]), 13), whole[:, :13])


def test_one_wrong_byte_is_found_and_placed(layout: CacheLayout) -> None:
    write_telling(layout, "full", [2], [9])
    check_telling(layout, "full", [2], [9])
    buffer = layout.buffers["full"][5]
    assert buffer.tensor is not None
    byte = buffer.tensor.view(torch.uint8).flatten()
    byte[2 * buffer.pool.page_bytes + 17] ^= 1
    with pytest.raises(AssertionError, match=r"'v' layer 1: 1 of \d+ bytes.*page 2 at byte 17"):
        check_telling(layout, "full", [2], [9])


def test_other_pages_and_swapped_buffers_are_found(layout: CacheLayout) -> None:
    write_telling(layout, "full", [2], [9])
    with pytest.raises(AssertionError, match="bytes differ"):
        check_telling(layout, "full", [2], [8])
    k, v = layout.buffers["full"][0].tensor, layout.buffers["full"][1].tensor
    assert k is not None
    assert v is not None
    k.copy_(v)
    with pytest.raises(AssertionError, match="'k' layer 0"):
        check_telling(layout, "full", [2], [9])


def test_layers_are_written_and_compared_alone(layout: CacheLayout) -> None:
    write_telling(layout, "full", [2], [9], layers=[1, 4])
    check_telling(layout, "full", [2], [9], layers=(4, 1))
    for layer_id in range(layout.num_layers):
        if layer_id not in (1, 4):
            with pytest.raises(AssertionError, match=f"layer {layer_id}: "):
                check_telling(layout, "full", [2], [9], layers=[layer_id])
    check_telling(layout, "full", [2], [9], layers=[])


def test_a_touched_neighbour_is_found(layout: CacheLayout) -> None:
    check_poison(layout, "full", [])
    write_telling(layout, "full", [3], [1])
    check_poison(layout, "full", [3])
    with pytest.raises(AssertionError, match=r"untouched.*page 3"):
        check_poison(layout, "full", [])
    poison(layout)
    check_poison(layout, "full", [])


def test_objects_made_without_a_pack_have_the_layouts_order(layout: CacheLayout) -> None:
    made = object_bytes_of(layout, "full", [7])
    assert made.shape == (1, layout.object_bytes["full"])
    last = layout.buffers["full"][-1]
    assert torch.equal(
        made[0, last.object_offset :],
        telling_bytes(3 * 10007 + 36, torch.tensor([7]), last.pool.page_bytes)[0],
    )
