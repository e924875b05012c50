"""Pools of a model's layout in one guarded memory, moves of their pages, a check of every byte."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.pools import Pool, dtype_named
from kvferry.testing import POISON, object_bytes_of, write_telling

GUARD_BYTES = 256
"""Poisoned memory before and after each buffer, and around the objects of each input."""

_LEAST_TOKENS = 256
_SPACE = "full"


@dataclass(frozen=True)
class Source:
    """Where a layout's geometry comes from.

    Attributes:
        model: a name of `kvferry.models`, or a description of one's own.
        what: the runs that it has, for those who read a file of figures.
        head: only this KV head of every token; the memory of the others lies between its rows.
    """

    model: str | dict[str, Any]
    what: str
    head: int | None = None


def _tiny(name: str, *row_bytes: int) -> dict[str, Any]:
    pools = [
        {"name": f"{name}{number}", "index": _SPACE, "rows": "page", "row_shape": [size],
         "dtype": "uint8", "layers": [0, 1]}
        for number, size in enumerate(row_bytes)
    ]  # fmt: skip
    return {"page_size": 64, "num_layers": 2, "pools": pools}


LAYOUTS = {
    "deepseek-v3.2 pages": Source(
        "deepseek-v3.2-dsa-fp8", "MLA and index pages of 64 tokens: runs of 41,984 and 8,448 bytes"
    ),
    "llama-3.1-8b pages": Source(
        "llama-3.1-8b-nhd", "GQA pages of 64 tokens, 8 heads: runs of 131,072 bytes"
    ),
    "llama-3.1-8b token rows": Source(
        "llama-3.1-8b-nhd-page1", "a token is a page, 8 heads: runs of 2,048 bytes"
    ),
    "llama-3.1-8b head slices": Source(
        "llama-3.1-8b-nhd", "one head of 8 of each token: runs of 256 bytes, 2,048 apart", 3
    ),
    "tiny pages": Source(_tiny("page", 4608), "of no model: runs of 4,608 bytes"),
    "tiny rows": Source(_tiny("row", 1024, 528), "of no model: runs of 1,024 and 528 bytes"),
}
"""The first two and `tiny pages` are moved by the page kernel, the others by the short-run one."""


def resized(source: Source, num_bytes: int) -> tuple[CacheLayout, int]:
    """Return as many layers of a layout, and as many pages, as have about `num_bytes`.

    Moves are of 256 tokens or more: small ones have fewer layers, as layer groups have.
    """
    whole = description(source.model) if isinstance(source.model, str) else source.model
    pools = [dict(pool) for pool in whole["pools"]]
    if source.head is not None:
        for pool in pools:
            pool["row_shape"] = [1, *pool["row_shape"][1:]]
            pool.pop("page_bytes")
    layers = {"page_size": whole["page_size"], "num_layers": 1}
    one = CacheLayout.from_description(
        {**layers, "pools": [{**pool, "layers": [0]} for pool in pools]}
    )
    layer_bytes = one.object_bytes[_SPACE]
    least_pages = max(1, _LEAST_TOKENS // one.page_size)
    num_layers = round(num_bytes / (least_pages * layer_bytes))
    num_layers = min(max(num_layers, 1), whole["num_layers"])
    num_pages = max(1, round(num_bytes / (num_layers * layer_bytes)))
    layers = {**layers, "num_layers": num_layers}
    every = list(range(num_layers))
    return CacheLayout.from_description(
        {**layers, "pools": [{**pool, "layers": every} for pool in pools]}
    ), num_pages


class Workload:
    """Equal moves of disjoint pages between pools and objects, all of whose memory is known.

    The memory of all pools is one tensor, that of all objects another, guards between. `fault_of`
    moves every input and compares both whole, so that a byte that is wrong shows, and one that was
    written anywhere else too.

    Attributes:
        num_bytes: payload of one move.
        num_pages: pages of one move.
        layout: bound.
    """

    def __init__(
        self, source: Source, num_bytes: int, num_inputs: int, device: torch.device
    ) -> None:
        """Allocate and fill.

        Args:
            source: the layout.
            num_bytes: wanted payload; what it comes to is the attribute.
            num_inputs: moves of different pages.
            device: where; the pools' memory is taken twice, and that of all objects too.
        """
        plain, self.num_pages = resized(source, num_bytes)
        self.num_bytes = self.num_pages * plain.object_bytes[_SPACE]
        self._device = device
        # Pages that no move has stay poisoned.
        pool_pages = num_inputs * self.num_pages + max(2, self.num_pages // 8)
        shuffled = random.Random(7).sample(range(pool_pages), pool_pages)
        inputs = [shuffled[n * self.num_pages :][: self.num_pages] for n in range(num_inputs)]

        heads = 1 if source.head is None else _heads_of(source)
        sizes = [
            (pool, layer, pool.page_bytes * pool_pages * heads)
            for pool in plain.pools
            for layer in pool.layer_ids
        ]
        starts, end = _places([size for _, _, size in sizes])
        self._pools = torch.full((end,), POISON, dtype=torch.uint8, device=device)
        tensors: dict[str, dict[int, torch.Tensor]] = {pool.name: {} for pool in plain.pools}
        for (pool, layer, size), start in zip(sizes, starts, strict=True):
            memory = self._pools[start : start + size]
            tensors[pool.name][layer] = _rows(pool, memory, heads, source.head or 0)
        self.layout = plain.bind(tensors)
        for ids in inputs:
            write_telling(self.layout, _SPACE, ids, ids)
        self._pools_image = self._pools.clone()

        size = self.layout.object_bytes[_SPACE]
        self._stride = -(-size // 64) * 64
        starts, end = _places([self.num_pages * self._stride] * num_inputs)
        self._objects = torch.full((end,), POISON, dtype=torch.uint8, device=device)
        self._inputs = []
        for ids, start in zip(inputs, starts, strict=True):
            objects = self._objects[start : start + self.num_pages * self._stride]
            objects.view(-1, self._stride)[:, :size] = object_bytes_of(self.layout, _SPACE, ids)
            self._inputs.append((PageIds.check(self.layout, _SPACE, ids, unique=True), objects))
        self._objects_image = self._objects.clone()
        self._copied = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def calls(self, direction: str, config: LaunchConfig) -> list[Callable[[], None]]:
        """Return a move of each input, by the kernels, on the current stream."""
        packer = Packer(self.layout, _SPACE, config)
        move = packer.pack if direction == "pack" else packer.unpack
        return [
            partial(move, ids, objects, stride_bytes=self._stride, backend="triton")
            for ids, objects in self._inputs
        ]

    def copies(self) -> list[Callable[[], object]]:
        """Return a `copy_` of as many contiguous bytes as a move has, for each input."""
        return [
            partial(self._copied.copy_, objects[: self.num_bytes]) for _, objects in self._inputs
        ]

    def fault_of(self, direction: str, config: LaunchConfig) -> str:
        """Move every input; return what is wrong with the bytes, nothing if all are right."""
        if direction == "pack":
            self._pools.copy_(self._pools_image)
            self._objects.fill_(POISON)
        else:
            self._pools.fill_(POISON)
            self._objects.copy_(self._objects_image)
        for call in self.calls(direction, config):
            call()
        return "; ".join(
            _difference(name, got, wanted)
            for name, got, wanted in (
                ("pools", self._pools, self._pools_image),
                ("objects", self._objects, self._objects_image),
            )
            # As words: the comparison takes an eighth of the memory.
            if not torch.equal(got.view(torch.int64), wanted.view(torch.int64))
        )


def _heads_of(source: Source) -> int:
    assert isinstance(source.model, str)
    heads = {pool["row_shape"][0] for pool in description(source.model)["pools"]}
    assert len(heads) == 1
    return int(heads.pop())


def _rows(pool: Pool, memory: torch.Tensor, heads: int, head: int) -> torch.Tensor:
    """Return a pool's tensor over memory that has `heads` heads per token: one of them."""
    elements = memory.view(dtype_named(pool.dtype, pool.name))
    if heads == 1:
        return elements.view(-1, *pool.row_shape)
    return elements.view(-1, heads, *pool.row_shape[1:])[:, head : head + 1]


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Return where parts of these sizes begin, guards between and around, and where all ends."""
    starts, at = [], GUARD_BYTES
    for size in sizes:
        starts.append(at)
        at += math.ceil(size / GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
    return starts, at


def _difference(name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    wrong = (got != wanted).to(torch.uint8)
    num_wrong, first = int(wrong.sum()), int(wrong.argmax())
    return f"{num_wrong:,} bytes of the {name} are wrong, the first at {first:,} of {len(got):,}"
