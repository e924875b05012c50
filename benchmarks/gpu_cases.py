"""What the GPU check times: pages of four kinds, whose moves are compared byte for byte first.

Small on a CPU, where nothing is timed; 64 MB and more of payload on a GPU.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.pools import PoolTensors
from kvferry.testing import check_telling, make_tensors, object_bytes_of, write_telling

COMPARED_BYTES = 128 << 20
"""Compared at once; telling bytes take some ten times their own memory."""

HEADS, HEAD_DIM, HEAD_PAGE_TOKENS = 8, 128, 64


@dataclass(frozen=True)
class Case:
    """Pools of one kind, and how many of their pages are moved.

    Attributes:
        name: as in tables and bars.
        build: pools and layout, for a number of pages and layers, on a device.
        num_pages: on a GPU.
        num_layers: on a GPU.
        copy_bar: share of `copy_`'s rate that pack and unpack must reach.
        few_pages, few_layers: on a CPU.
    """

    name: str
    build: Callable[[int, int, torch.device], CacheLayout]
    num_pages: int
    num_layers: int
    copy_bar: float = 0.95
    few_pages: int = 2
    few_layers: int = 2

    def load(self, device: torch.device) -> "Loaded":
        """Make the pools, move pages to objects and back elsewhere, and compare every byte.

        Raises:
            AssertionError: a byte is wrong.
        """
        on_gpu = device.type == "cuda"
        num_pages = self.num_pages if on_gpu else self.few_pages
        layers = self.num_layers if on_gpu else self.few_layers
        return Loaded(self.name, self.build(2 * num_pages, layers, device), num_pages)


class Loaded:
    """Pools in memory, and pages of them whose moves were found right.

    Attributes:
        name: of the case.
        layout: bound; one index space, `full`.
        sources, targets: the pages that are read, and those that are written.
        read, written: the same on the device.
        objects: uint8 `[num_pages * stride_bytes]`, which hold the sources.
        stride_bytes: from one object to the next.
        num_bytes: payload.
    """

    def __init__(self, name: str, layout: CacheLayout, num_pages: int) -> None:
        assert layout.device is not None
        self.name = name
        self.layout = layout
        shuffled = random.Random(1).sample(range(2 * num_pages), 2 * num_pages)
        self.sources, self.targets = shuffled[:num_pages], shuffled[num_pages:]
        self.read, self.written = (
            PageIds.check(layout, "full", pages, unique=True)
            for pages in (self.sources, self.targets)
        )
        size = layout.object_bytes["full"]
        self.stride_bytes = -(-size // 64) * 64
        self.num_bytes = num_pages * size
        self.objects = torch.zeros(
            num_pages * self.stride_bytes, dtype=torch.uint8, device=layout.device
        )
        self.check_bytes(Packer(layout, "full"))

    def check_bytes(self, packer: Packer) -> None:
        """Move by a packer to objects and back elsewhere, and compare every byte.

        Raises:
            AssertionError: a byte is wrong.
        """
        self.write(self.sources)
        self.objects.fill_(0xA5)
        self.pack(packer)()
        self.compare_objects(self.objects)
        self.unpack(packer)()
        for some, tags in zip(self._chunks(self.targets), self._chunks(self.sources), strict=True):
            check_telling(self.layout, "full", some, tags)

    def write(self, pages: Sequence[int]) -> None:
        """Fill pages, each with bytes that tell its id."""
        for some in self._chunks(pages):
            write_telling(self.layout, "full", some, some)

    def compare_objects(self, objects: torch.Tensor, pages: Sequence[int] | None = None) -> None:
        """Compare objects with those of `pages`, the sources by default.

        Raises:
            AssertionError: a byte is wrong.
        """
        pages = self.sources if pages is None else pages
        rows = objects.view(len(pages), self.stride_bytes)[:, : self.layout.object_bytes["full"]]
        first = 0
        for some in self._chunks(pages):
            wanted = object_bytes_of(self.layout, "full", some)
            if not torch.equal(rows[first : first + len(some)], wanted):
                raise AssertionError(f"{self.name}: the objects of pages {some[:4]}.. are wrong")
            first += len(some)

    def pack(self, packer: Packer, **more: Any) -> Callable[[], None]:
        """Return a call that packs the sources; by the kernels, unless `more` says otherwise."""
        return self._call(packer.pack, self.read, more)

    def unpack(self, packer: Packer, **more: Any) -> Callable[[], None]:
        """Return a call that unpacks the objects to the targets."""
        return self._call(packer.unpack, self.written, more)

    def _call(
        self, move: Callable[..., None], ids: PageIds, more: Mapping[str, Any]
    ) -> Callable[[], None]:
        named = {"stride_bytes": self.stride_bytes, "backend": "triton", **more}
        return partial(move, ids, self.objects, **named)

    def _chunks(self, pages: Sequence[int]) -> list[Sequence[int]]:
        step = max(1, COMPARED_BYTES // self.layout.object_bytes["full"])
        return [pages[first : first + step] for first in range(0, len(pages), step)]


def gb_per_s(num_bytes: int, time_us: float) -> float:
    """Return a rate of payload, 1e9 bytes a second."""
    return num_bytes / time_us / 1e3


def _of_model(model: str, num_pages: int, num_layers: int, device: torch.device) -> CacheLayout:
    """Return a model's pools, with its first layers alone."""
    plain = description(model)
    pools = [{**pool, "layers": [layer for layer in pool["layers"] if layer < num_layers]}
             for pool in plain["pools"]]  # fmt: skip
    layout = CacheLayout.from_description(
        {"page_size": plain["page_size"], "num_layers": num_layers, "pools": pools}
    )
    return layout.bind(make_tensors(layout, num_pages, device))


def _of_one_head(num_pages: int, num_layers: int, device: torch.device) -> CacheLayout:
    """Return one of eight heads of K and V: 256 bytes of each token's 2 KiB."""
    shape = (num_pages * HEAD_PAGE_TOKENS, HEADS, HEAD_DIM)
    pools = [
        PoolTensors(name, "full", "token", {
            layer: torch.zeros(shape, dtype=torch.bfloat16, device=device)[:, 2:3]
            for layer in range(num_layers)
        })
        for name in ("k", "v")
    ]  # fmt: skip
    return CacheLayout.from_tensors(pools, page_size=HEAD_PAGE_TOKENS, num_layers=num_layers)


MLA = Case("mla_index", partial(_of_model, "deepseek-v3.2-dsa-fp8"), 64, 61)
GQA = Case("gqa", partial(_of_model, "llama-3.1-8b-nhd"), 32, 32)
ROWS = Case("token_rows", partial(_of_model, "llama-3.1-8b-nhd-page1"), 1024, 32)
HEAD = Case("head_slices", _of_one_head, 96, 32, copy_bar=0.85)
CASES = (MLA, GQA, ROWS, HEAD)
