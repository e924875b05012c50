"""Moves checked byte for byte: telling pages, poisoned and guarded destinations, torch's indexing.

Nothing here trusts the code under test: what objects and pages must hold is made without a pack.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.buffers import Buffer
from kvferry.kernels.checksum import layer_sums_reference
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.pools import dtype_named
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    object_bytes_of,
    poison,
    write_telling,
)

GUARD_BYTES = 256
CHUNK_PAGES = 16
"""Pages that are compared at once: telling bytes take some ten times their own memory."""


@dataclass(frozen=True)
class Way:
    """How a round trip is made.

    Attributes:
        num_pages: pages packed, and as many others written.
        id_bytes: width of the page ids, 4 or 8.
        object_misalign_bytes: how far the objects are from a multiple of 16.
        stride_slack_bytes: between one object and the next.
        with_sums: whether checksums are asked for, in both directions.
        tail: what becomes of the last page's other tokens: `""` for whole pages, `zero`, `keep`.
        splits: the layers of each call; all at once by default.
        pinned: objects in pinned host memory, which a GPU reaches too.
        seed: of the choice of pages.
    """

    num_pages: int = 3
    id_bytes: int = 8
    object_misalign_bytes: int = 0
    stride_slack_bytes: int = 0
    with_sums: bool = False
    tail: str = ""
    splits: Sequence[Sequence[int] | None] = (None,)
    pinned: bool = False
    seed: int = 0


def guarded(
    num_bytes: int, device: torch.device, misalign: int = 0, *, pinned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return poisoned memory so far from a multiple of 16, and the whole of it with its guards."""
    whole = torch.full(
        (num_bytes + 2 * GUARD_BYTES + 16,), POISON, dtype=torch.uint8,
        device="cpu" if pinned else device, pin_memory=pinned,
    )  # fmt: skip
    start = GUARD_BYTES + -whole.data_ptr() % 16 + misalign
    return whole[start : start + num_bytes], whole


def guarded_layout(
    plain: CacheLayout,
    num_pages: int | Mapping[str, int],
    device: torch.device,
    misalign: int = 0,
) -> tuple[CacheLayout, list[torch.Tensor]]:
    """Bind a layout to poisoned memory with guards around every tensor; return the memory too."""
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    wholes = []
    for pool in plain.pools:
        pages = num_pages if isinstance(num_pages, int) else num_pages[pool.space]
        rows = pages * (plain.page_size if pool.rows == "token" else 1)
        tensors[pool.name] = {}
        for layer_id in pool.layer_ids:
            memory, whole = guarded(pages * pool.page_bytes, device, misalign)
            rows_of = memory.view(dtype_named(pool.dtype, pool.name)).view(rows, *pool.row_shape)
            tensors[pool.name][layer_id] = rows_of
            wholes.append(whole)
    return plain.bind(tensors), wholes


def round_trip(
    layout: CacheLayout,
    space: str,
    config: LaunchConfig | None,
    way: Way,
    wholes: Sequence[torch.Tensor] = (),
) -> int:
    """Pack pages and unpack them elsewhere by the kernels, and compare every byte of everything.

    Args:
        layout: bound; its pages are overwritten, and poisoned at the end.
        space: index space to move.
        config: of the launches; tuned numbers if None.
        way: how.
        wholes: the memory that the pools are views of, poisoned; looked through at the end.

    Returns:
        How many bytes were packed.

    Raises:
        AssertionError: a byte, or a checksum, is wrong; says where.
    """
    assert layout.device is not None
    packer = Packer(layout, space, config)
    sources, targets = _choose(layout.num_pages[space], way)
    poison(layout)
    for some in _chunks(sources):
        write_telling(layout, space, some, some)
    size = layout.object_bytes[space]
    stride = size + way.stride_slack_bytes
    objects, memory = guarded(
        way.num_pages * stride, layout.device, way.object_misalign_bytes, pinned=way.pinned
    )
    packed_sums, wanted_sums = _sums(layout, way), None
    for layers in way.splits:
        packer.pack(
            _ids(layout, sources, way), objects, stride_bytes=stride, layers=layers,
            sums=packed_sums, backend="triton",
        )  # fmt: skip
    if way.pinned:
        torch.cuda.synchronize(layout.device)  # the host reads what the GPU wrote
    rows = objects.view(way.num_pages, stride).to(layout.device)
    for first, some in zip(range(0, way.num_pages, CHUNK_PAGES), _chunks(sources), strict=True):
        wanted = object_bytes_of(layout, space, some)
        _same(rows[first : first + len(some), :size], wanted, f"packed pages {some}")
    rest = memory.clone()
    start = objects.storage_offset()
    rest[start : start + way.num_pages * stride].view(way.num_pages, stride)[:, :size] = POISON
    _same(rest, torch.full_like(rest, POISON), "memory around the objects")
    if packed_sums is not None:
        wanted_sums = _wanted_sums(layout, space, rows, stride)
        _same(packed_sums, wanted_sums, "checksums of the pack")

    read_sums = _sums(layout, way)
    tokens = (layout.page_size * 5) // 8
    for layers in way.splits:
        packer.unpack(
            _ids(layout, targets, way), objects, stride_bytes=stride, layers=layers,
            sums=read_sums, tail_tokens=tokens if way.tail else None, tail=way.tail or "zero",
            backend="triton",
        )  # fmt: skip
    if wanted_sums is not None:
        _same(read_sums, wanted_sums, "checksums of the unpack")
    if way.tail:
        _check_tail(layout, space, targets[-1], sources[-1], tokens, way.tail)
    for some, tags in zip(_chunks(targets), _chunks(sources), strict=True):
        check_telling(layout, space, some, tags)
    for some in _chunks(sources):
        check_telling(layout, space, some, some)
    for other in layout.spaces:
        check_poison(layout, other, [*sources, *targets] if other == space else [])
    poison(layout)
    for whole in wholes:
        plain = whole.flatten().view(torch.uint8)
        _same(plain, torch.full_like(plain, POISON), "memory around the pages")
    return way.num_pages * size


def _choose(num_pool_pages: int, way: Way) -> tuple[list[int], list[int]]:
    """Return sources and destinations, out of order; the first and the last page among them."""
    others = random.Random(way.seed).sample(range(1, num_pool_pages - 1), 2 * way.num_pages - 2)
    sources = [num_pool_pages - 1, *others[: way.num_pages - 1]]
    targets = [*others[way.num_pages - 1 :], 0]
    return sources, targets


def _chunks(pages: Sequence[int]) -> list[Sequence[int]]:
    return [pages[first : first + CHUNK_PAGES] for first in range(0, len(pages), CHUNK_PAGES)]


def _ids(layout: CacheLayout, pages: Sequence[int], way: Way) -> PageIds:
    dtype = torch.int32 if way.id_bytes == 4 else torch.int64
    return PageIds(torch.tensor(pages, dtype=dtype, device=layout.device), unique=True)


def _sums(layout: CacheLayout, way: Way) -> torch.Tensor | None:
    if not way.with_sums:
        return None
    return torch.zeros(way.num_pages, layout.num_layers, dtype=torch.int64, device=layout.device)


def _wanted_sums(layout: CacheLayout, space: str, rows: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the layers' checksums of objects whose bytes have been found right."""
    objects = rows.reshape(-1).cpu()
    sums = torch.zeros(len(rows), layout.num_layers, dtype=torch.int64)
    ranges, offsets = ((0, layout.num_layers),), layout.layer_offsets[space]
    layer_sums_reference(objects, len(rows), offsets, ranges, stride, 0, sums)
    return sums.to(rows.device)


def _check_tail(
    layout: CacheLayout, space: str, page: int, tag: int, tokens: int, tail: str
) -> None:
    """Compare the last page, moved in part; afterwards it is whole, for the checks that follow."""
    got = [_page(layout, buffer, page).clone() for buffer in layout.buffers[space]]
    write_telling(layout, space, [page], [tag])
    for buffer, mine in zip(layout.buffers[space], got, strict=True):
        wanted = _page(layout, buffer, page).clone()
        axis = buffer.pool.token_axis
        assert axis is not None
        rest = wanted.narrow(axis, tokens, layout.page_size - tokens)
        byte = torch.full(
            (rest.element_size(),), 0 if tail == "zero" else POISON, dtype=torch.uint8
        )
        rest.fill_(byte.view(rest.dtype).item())
        _same(mine, wanted, f"the last page of {buffer.pool.name!r} layer {buffer.layer_id}")


def _page(layout: CacheLayout, buffer: Buffer, page: int) -> torch.Tensor:
    """Return one page as integers, in the order of the tensor's dimensions."""
    assert buffer.tensor is not None
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = buffer.tensor.view(words[buffer.tensor.element_size()])
    if buffer.pool.rows == "page":
        return rows[page]
    return rows[page * layout.page_size : (page + 1) * layout.page_size]


def _same(got: torch.Tensor | None, wanted: torch.Tensor, what: str) -> None:
    assert got is not None
    if not torch.equal(got, wanted):
        where = (got != wanted).nonzero()
        raise AssertionError(
            f"{what}: {len(where)} of {got.numel()} differ, the first at {where[0].tolist()}"
        )
