"""Plain torch doing what the kernels do: a gather or scatter of rows for each run.

On a CPU this is the fast path, not only the truth that kernels are tested against: rows move in the
widest integer dtype that their alignment allows, 5 to 8 times faster than as bytes.
"""

import math
from collections.abc import Iterator

import torch

from kvferry.layout import Buffer

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PageView:
    """One run of one buffer as a tensor of rows, and its offset in the object.

    Attributes:
        pages: `[num_pages, words]` or `[num_pages, count, words]` over the pool's own memory.
        object_offset: where the run begins in the object, in bytes.
    """

    def __init__(self, pages: torch.Tensor, object_offset: int) -> None:
        self.pages = pages
        self.object_offset = object_offset

    def in_objects(
        self, objects: torch.Tensor, origin_bytes: int, num_objects: int, stride_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages, and this run's place in every object, as tensors of equal words."""
        start = objects.storage_offset() + self.object_offset - origin_bytes
        storage = objects.untyped_storage()
        pages = self.pages
        if math.gcd(start, stride_bytes, storage.data_ptr()) % pages.element_size():
            pages = pages.view(torch.uint8)
        width = pages.element_size()
        inner = (pages.shape[-1], 1) if pages.dim() == 3 else (1,)
        packed = torch.empty(0, dtype=pages.dtype, device=objects.device).set_(
            storage,
            start // width,
            (num_objects, *pages.shape[1:]),
            (stride_bytes // width, *inner),
        )
        return pages, packed


def page_views(buffer: Buffer) -> Iterator[PageView]:
    """Yield each run of a bound buffer."""
    assert buffer.tensor is not None
    storage = buffer.tensor.untyped_storage()
    offset = buffer.object_offset
    for run in buffer.runs:
        start = buffer.address - storage.data_ptr() + run.offset_bytes
        width = math.gcd(8, start, storage.data_ptr(), buffer.page_stride_bytes, run.length_bytes)
        if run.count > 1:
            width = math.gcd(width, run.pitch_bytes)
        pages = torch.empty(0, dtype=_WORDS[width], device=buffer.tensor.device).set_(
            storage,
            start // width,
            (buffer.num_pages, run.count, run.length_bytes // width),
            (buffer.page_stride_bytes // width, run.pitch_bytes // width, 1),
        )
        yield PageView(pages[:, 0] if run.count == 1 else pages, offset)
        offset += run.length_bytes * run.count


def pack_reference(
    views: list[PageView], page_ids: torch.Tensor, objects: torch.Tensor, stride_bytes: int,
    origin_bytes: int,
) -> None:  # fmt: skip
    """Gather pages `page_ids` `[num_pages]` of each view into `objects`; see `Packer.pack`."""
    for view in views:
        pages, packed = view.in_objects(objects, origin_bytes, len(page_ids), stride_bytes)
        torch.index_select(pages, 0, page_ids, out=packed)


def unpack_reference(
    views: list[PageView], page_ids: torch.Tensor, objects: torch.Tensor, stride_bytes: int,
    origin_bytes: int,
) -> None:  # fmt: skip
    """Scatter `objects` into pages `page_ids` `[num_pages]` of each view; see `Packer.unpack`."""
    ids = page_ids.to(torch.int64)
    for view in views:
        pages, packed = view.in_objects(objects, origin_bytes, len(ids), stride_bytes)
        pages[ids] = packed
