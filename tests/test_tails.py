"""Pages moved in part: the first tokens of the last page, the rest zeroed or kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.errors import ArgumentError, LayoutError
from kvferry.kernels.pack import Packer
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.pools import PoolTensors
from kvferry.testing import POISON, make_tensors, poison, telling_bytes, write_telling

PATHS = ("reference", "triton")
NARROW = LaunchConfig(tile_bytes=1024, units_per_program=32, page_run_bytes=64)
TOKENS, HEADS, WIDTH = 8, 3, 16


def layouts() -> dict[str, CacheLayout]:
    """Pools whose tokens lie in memory in every order that a page can have."""
    shape = (5 * TOKENS, HEADS, WIDTH)
    wide = torch.empty(5 * TOKENS, 2 * HEADS, WIDTH + 8, dtype=torch.bfloat16)

    def of(tensor: torch.Tensor, rows: str = "token", **extra: Any) -> CacheLayout:
        if extra:
            return CacheLayout.from_description({
                "page_size": TOKENS, "num_layers": 1,
                "pools": [{"name": "k", "index": "full", "rows": rows,
                           "row_shape": list(tensor.shape[1:]),
                           "dtype": str(tensor.dtype).removeprefix("torch."), "layers": [0],
                           **extra}],
            }).bind({"k": {0: tensor}})  # fmt: skip
        return CacheLayout.from_tensors(
            [PoolTensors("k", "full", rows, {0: tensor})], page_size=TOKENS, num_layers=1
        )

    head_major = torch.empty(5, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    return {
        "tokens outside": of(torch.empty(shape, dtype=torch.bfloat16)),
        "odd rows": of(torch.empty(5 * TOKENS, 7, dtype=torch.uint8)),
        "some heads": of(wide[:, 1 : 1 + HEADS, :WIDTH]),
        "one head": of(wide[:, 2:3]),
        "heads outside": of(head_major, "page", token_axis=1),
        "some heads outside": of(head_major[:, 1:], "page", token_axis=1),
        "tokens inside": of(
            torch.empty(5, HEADS, WIDTH, TOKENS, dtype=torch.bfloat16), "page", token_axis=2
        ),
        "heads outside, padded": of(
            torch.empty(5, HEADS, TOKENS, WIDTH + 8, dtype=torch.bfloat16)[..., :WIDTH],
            "page", token_axis=1,
        ),
    }  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tail", ["zero", "keep"])
@pytest.mark.parametrize("config", [LaunchConfig(), NARROW, replace(NARROW, max_programs=3)])
@pytest.mark.parametrize("name", sorted(layouts()))
def test_first_tokens_come_and_the_rest_is_as_asked(
    name: str, config: LaunchConfig, tail: str, path: str
) -> None:
    layout = layouts()[name]
    tensor = layout.buffers["full"][0].tensor
    assert tensor is not None
    packer = Packer(layout, "full", config)
    token_axis = layout.pools[0].token_axis
    assert token_axis is not None
    object_bytes = layout.object_bytes["full"]
    objects = torch.zeros(2 * object_bytes, dtype=torch.uint8)
    write_telling(layout, "full", [0, 1], [10, 11])
    packer.pack([0, 1], objects, backend=path)
    for tail_tokens in (0, 1, 5, TOKENS - 1, TOKENS):
        poison(layout)
        packer.unpack([3, 2], objects, tail_tokens=tail_tokens, tail=tail, backend=path)
        got = pages(layout, tensor)
        write_telling(layout, "full", [3, 2], [10, 11])
        wanted = pages(layout, tensor)
        rest = wanted[2].narrow(token_axis, tail_tokens, TOKENS - tail_tokens)
        if tail == "zero":
            rest.zero_()
        else:
            rest.view(torch.uint8).fill_(POISON)
        assert torch.equal(got[3], wanted[3])
        assert torch.equal(got[2], wanted[2])
        for other in (0, 1, 4):
            assert bool((got[other].contiguous().view(torch.uint8) == POISON).all())


def pages(layout: CacheLayout, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy `[num_pages, *page_shape]` as integers."""
    whole = tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    return whole.view(-1, *layout.pools[0].page_shape).clone()


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
def test_planes_of_a_page_are_cut_each(path: str) -> None:
    keys, scales = 128, 4
    layout = CacheLayout.from_description({
        "page_size": 64, "num_layers": 1,
        "pools": [{"name": "index_k", "index": "full", "rows": "page",
                   "row_shape": [64 * (keys + scales)], "dtype": "uint8", "layers": [0],
                   "token_planes": [keys, scales]}],
    })  # fmt: skip
    layout = layout.bind(make_tensors(layout, 3))
    packer = Packer(layout, "full")
    write_telling(layout, "full", [0], [9])
    objects = torch.zeros(layout.object_bytes["full"], dtype=torch.uint8)
    packer.pack([0], objects, backend=path)
    packer.unpack([2], objects, tail_tokens=10, tail="zero", backend=path)
    tensor = layout.buffers["full"][0].tensor
    assert tensor is not None
    wanted = telling_bytes(1, torch.tensor([9]), 64 * (keys + scales))[0].clone()
    wanted[10 * keys : 64 * keys] = 0
    wanted[64 * keys + 10 * scales :] = 0
    assert torch.equal(tensor[2], wanted)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ["pool", "canonical"])
@pytest.mark.parametrize("heads", [1, 3])
def test_none_of_the_tokens_of_a_page_that_has_one(heads: int, order: str, path: str) -> None:
    wide = torch.empty(5, 2 * heads, WIDTH, dtype=torch.bfloat16)
    layout = CacheLayout.from_tensors(
        [PoolTensors("k", "full", "token", {0: wide[:, :heads]}, shard_axis=0)],
        page_size=1, num_layers=1, order=order,
    )  # fmt: skip
    packer = Packer(layout, "full")
    objects = torch.zeros(2 * layout.object_bytes["full"], dtype=torch.uint8)
    for tail, wanted in (("keep", POISON), ("zero", 0)):
        poison(layout)
        packer.unpack([4, 2], objects.fill_(7), tail_tokens=0, tail=tail, backend=path)
        got = wide[:, :heads].contiguous().view(torch.uint8)
        assert bool((got[4] == 7).all())
        assert bool((got[2] == wanted).all())


def test_pages_that_cannot_be_cut_are_refused() -> None:
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    layout = layout.bind(make_tensors(layout, 2))
    packer = Packer(layout, "full")
    objects = torch.zeros(layout.object_bytes["full"], dtype=torch.uint8)
    with pytest.raises(LayoutError, match="'index_k' layer 0: its pages cannot be cut by tokens"):
        packer.unpack([0], objects, tail_tokens=3)
    packer.unpack([0], objects, tail_tokens=64)


def test_wrong_arguments_are_refused() -> None:
    layout = CacheLayout.from_description(description("odd-bytes"))
    layout = layout.bind(make_tensors(layout, 2))
    packer = Packer(layout, "full")
    objects = torch.zeros(210, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"tail_tokens is 4, wanted 0 \.\. 3"):
        packer.unpack([0], objects, tail_tokens=4)
    with pytest.raises(ArgumentError, match="tail is 'drop', wanted one of"):
        packer.unpack([0], objects, tail_tokens=1, tail="drop")
    for changes, words in (
        ({"token_axis": 1}, "token_axis is 1"),
        ({"token_planes": [100, 100]}, "exceed the page's"),
    ):
        with pytest.raises(LayoutError, match=words):
            CacheLayout.from_description({
                "page_size": 4, "num_layers": 1,
                "pools": [{"name": "k", "index": "full", "rows": "page", "row_shape": [4, 8],
                           "dtype": "uint8", "layers": [0], **changes}],
            })  # fmt: skip


def test_segments_that_tell_no_tokens_are_refused_for_tails_and_sums() -> None:
    layout = CacheLayout.from_description(description("odd-bytes"))
    layout = layout.bind(make_tensors(layout, 2))
    packer = Packer(layout, "full", segments=layout.segments("full"))
    objects = torch.zeros(210, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="do not tell tokens apart"):
        packer.unpack([0], objects, tail_tokens=1)
    with pytest.raises(ArgumentError, match="sums are given"):
        packer.unpack([0], objects, sums=torch.zeros(1, 2, dtype=torch.int64))
    packer.unpack([0], objects)
