"""Pools as they lie in memory: addresses, strides, runs and page counts of their tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvferry.errors import LayoutError
from kvferry.object_order import Place, dense_strides, strided_segments
from kvferry.pools import Pool
from kvferry.runs import Run, page_runs


@dataclass(frozen=True)
class Buffer:
    """One layer's tensor of one pool: where its pages lie, and where their bytes go.

    Attributes:
        pool: the pool it belongs to.
        layer_id: the layer that owns it.
        object_offset: where its page's first entry lies in the object.
        tensor: the tensor itself, held so that its memory stays; None while unbound.
        address: address of page 0's first byte; 0 while unbound.
        page_stride_bytes: from one page to the next, which is not the page's size.
        num_pages: how many pages the tensor holds.
        runs: the page's contiguous parts, in object order; their lengths add up to `page_bytes`.
        alignment_bytes: 16, 8, 4, 2 or 1: the widest access that is aligned at every run of every
            page, in the pool and in an object that begins at a multiple of 16.
        page_strides: bytes from one entry to the next of each of the page's dimensions.
        object_strides: the same in the object.
    """

    pool: Pool
    layer_id: int
    object_offset: int
    tensor: torch.Tensor | None
    address: int
    page_stride_bytes: int
    num_pages: int
    runs: tuple[Run, ...]
    alignment_bytes: int
    page_strides: tuple[int, ...]
    object_strides: tuple[int, ...]

    @property
    def has_planes(self) -> bool:
        """Whether a page lies whole in memory and in the object, as planes of tokens."""
        whole = len(self.runs) == 1 and self.runs[0].count == 1
        same = all(
            size == 1 or inner == outer
            for size, inner, outer in zip(
                self.pool.page_shape, self.page_strides, self.object_strides, strict=True
            )
        )
        return bool(self.pool.token_planes) and whole and same


def order_and_runs(
    pool: Pool, layer_id: int, tensor: torch.Tensor, *, by_token: bool = False
) -> tuple[tuple[int, ...], tuple[Run, ...], int, int]:
    """Return the page's dimension order, its runs, the page stride in bytes, and the page count."""
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    rows_per_page = pool.page_shape[0] if pool.rows == "token" else 1
    num_pages = tensor.shape[0] // rows_per_page
    page_strides = strides if pool.rows == "token" else strides[1:]
    page_stride = strides[0] * rows_per_page
    try:
        order, runs = page_runs(
            pool.page_shape,
            page_strides,
            item,
            num_pages,
            page_stride,
            pool.token_axis if by_token else None,
        )
    except LayoutError as error:
        raise LayoutError(f"pool {pool.name!r} layer {layer_id}: {error}") from None
    return order, runs, page_stride, num_pages


def make_buffer(
    pool: Pool,
    layer_id: int,
    layer_offset: int,
    place: Place,
    tensor: torch.Tensor | None,
    object_order: str,
) -> Buffer:
    """Return a layer's buffer, from its tensor or, without memory, as the description has it."""
    if tensor is None:
        runs: tuple[Run, ...] = (Run(0, pool.page_bytes, 1, pool.page_bytes),)
        address, page_stride, num_pages = 0, pool.page_bytes, 0
        page_strides = dense_strides(pool.page_shape, pool.order, pool.item_bytes)
    else:
        _, runs, page_stride, num_pages = order_and_runs(pool, layer_id, tensor)
        address = tensor.data_ptr()
        strides = [stride * pool.item_bytes for stride in tensor.stride()]
        page_strides = tuple(strides if pool.rows == "token" else strides[1:])
    offset = layer_offset + place.offset_bytes
    alignment = math.gcd(16, address, page_stride, offset)
    for run in runs:
        alignment = math.gcd(alignment, run.offset_bytes, run.length_bytes)
        if run.count > 1:
            alignment = math.gcd(alignment, run.pitch_bytes)
    buffer = Buffer(
        pool, layer_id, offset, tensor, address, page_stride, num_pages, runs, alignment,
        page_strides, place.strides_bytes,
    )  # fmt: skip
    if object_order == "pool":
        return buffer
    segments = strided_segments(buffer)
    return replace(buffer, alignment_bytes=min(segment.alignment_bytes for segment in segments))


def one_device(buffers: Mapping[str, tuple[Buffer, ...]]) -> torch.device:
    """Return the device of all tensors, or raise a LayoutError that names one on another."""
    device: torch.device | None = None
    for buffer in (buffer for row in buffers.values() for buffer in row):
        assert buffer.tensor is not None
        device = device or buffer.tensor.device
        if device.type not in ("cpu", "cuda"):
            raise LayoutError(
                f"pool {buffer.pool.name!r} layer {buffer.layer_id}: tensor is on {device}, wanted "
                "a CPU or CUDA device"
            )
        if buffer.tensor.device != device:
            raise LayoutError(
                f"pool {buffer.pool.name!r} layer {buffer.layer_id}: tensor is on "
                f"{buffer.tensor.device}, wanted {device} as the others"
            )
    assert device is not None
    return device


def not_cut(buffer: Buffer) -> LayoutError:
    """Return the error of a page that would have to be cut by tokens and cannot be."""
    return LayoutError(
        f"pool {buffer.pool.name!r} layer {buffer.layer_id}: its pages cannot be cut by tokens; "
        "describe token_axis or token_planes, or move whole pages"
    )
