"""Proofs that a layout moves every byte of an engine's pages, told by the engine's own views."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels.pack import Packer
from kvferry.layout import CacheLayout
from kvferry.testing import telling_bytes

PageView = Callable[[int], torch.Tensor]
"""From a page id to the engine's own view of the page, writable."""

Views = Mapping[tuple[str, int], PageView]
"""Pool name and layer id to view."""


@dataclass(frozen=True)
class Memory:
    """Storages as bytes, each once."""

    storages: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "Memory":
        """Return the storages behind tensors."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return cls(
            tuple(
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
                for storage in storages.values()
            )
        )

    def fill(self, byte: int) -> None:
        """Set every byte."""
        for storage in self.storages:
            storage.fill_(byte)

    def copy(self) -> list[torch.Tensor]:
        """Return the bytes as they are now."""
        return [storage.clone() for storage in self.storages]

    def restore(self, copies: Sequence[torch.Tensor]) -> None:
        """Put bytes back."""
        for storage, copy in zip(self.storages, copies, strict=True):
            storage.copy_(copy)


def memory_of(layout: CacheLayout) -> Memory:
    """Return the memory behind a layout."""
    buffers = (buffer for row in layout.buffers.values() for buffer in row)
    return Memory.of(buffer.tensor for buffer in buffers if buffer.tensor is not None)


def as_bytes(page: torch.Tensor) -> torch.Tensor:
    """Return a page's bytes in the order of memory, copied."""
    strides, shape = page.stride(), page.shape
    order = sorted(range(page.dim()), key=lambda dim: (-strides[dim], -shape[dim]))
    return page.permute(order).contiguous().view(torch.uint8).reshape(-1)


def write_bytes(page: torch.Tensor, data: torch.Tensor) -> None:
    """Write bytes into a page, in the order of memory."""
    strides, shape = page.stride(), page.shape
    order = sorted(range(page.dim()), key=lambda dim: (-strides[dim], -shape[dim]))
    target = page.permute(order)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers[page.element_size()]
    target.view(kind).copy_(data.view(kind).reshape(target.shape))


def prove_bytes(
    layout: CacheLayout,
    space: str,
    views: Views,
    source: Sequence[int],
    target: Sequence[int],
    *,
    source_views: Views | None = None,
) -> None:
    """Write pages through the engine's views, move them by kvferry, read them by the engine's.

    Args:
        layout: bound to the engine's tensors.
        space: the index space to prove.
        views: of all pools and layers of the space, made by the engine's accessors.
        source: page ids to pack.
        target: as many page ids to unpack into.
        source_views: views that read the source, where they differ.
    """
    buffers = layout.buffers[space]
    named = {(buffer.pool.name, buffer.layer_id) for buffer in buffers}
    mine = {key: view for key, view in views.items() if key in named}
    assert set(mine) == named, "the engine's accessors and the layout differ"
    memory = memory_of(layout)
    memory.fill(0xA5)
    for salt, key in enumerate(sorted(mine)):
        tags = torch.arange(layout.num_pages[space])
        for page_id in tags.tolist():
            page = mine[key](page_id)
            num_bytes = page.numel() * page.element_size()
            write_bytes(page, telling_bytes(salt + 1, tags[page_id : page_id + 1], num_bytes)[0])
    before = memory.copy()

    objects = torch.zeros(len(source) * layout.object_bytes[space], dtype=torch.uint8)
    packer = Packer(layout, space)
    packer.pack(torch.tensor(source), objects)
    for here, there in zip(memory.copy(), before, strict=True):
        assert torch.equal(here, there), "pack wrote into the pools"
    reading = mine if source_views is None else source_views
    for index, page_id in enumerate(source):
        wanted = torch.cat([as_bytes(reading[b.pool.name, b.layer_id](page_id)) for b in buffers])
        got = objects.view(len(source), -1)[index]
        assert torch.equal(got, wanted), f"page {page_id} of {space}: the object differs"

    packer.unpack(torch.tensor(target), objects)
    after = memory.copy()
    memory.restore(before)
    pages = {
        (page_id, key): as_bytes(view(page_id)) for page_id in source for key, view in mine.items()
    }
    for page_id, to in zip(source, target, strict=True):
        for key, view in mine.items():
            write_bytes(view(to), pages[page_id, key])
    for here, there in zip(after, memory.copy(), strict=True):
        assert torch.equal(here, there), "unpack left other bytes than the engine's own writes"


def untold_bytes(layouts: Iterable[CacheLayout], memory: Memory) -> list[int]:
    """Return, for each storage, how many bytes no page of the layouts reaches."""
    memory.fill(0)
    for layout in layouts:
        for space in layout.spaces:
            num_pages, num_bytes = layout.num_pages[space], layout.object_bytes[space]
            packer = Packer(layout, space)
            ones = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
            for page_id in range(num_pages):
                packer.unpack(torch.tensor([page_id]), ones)
    return [int((storage == 0).sum()) for storage in memory.storages]
