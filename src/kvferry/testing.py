"""Pools with telling bytes: every 8 bytes tell their pool, layer, page and place.

For kvferry's own tests and demo, and for whoever tests an adapter: a byte that lands one page, one
layer or one word off shows as a difference, whatever the layout. The bytes run through all bit
patterns, NaNs with payloads and negative zeros among them, and are written and compared as
integers by torch's own indexing, never by the code under test.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from kvferry.buffers import Buffer
from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout
from kvferry.pools import Pool, dtype_named

POISON = 0xA5
"""What `make_tensors` fills pools with, so that a byte nobody wrote shows."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_tensors(
    layout: CacheLayout, num_pages: int | Mapping[str, int], device: torch.device | str = "cpu"
) -> dict[str, dict[int, torch.Tensor]]:
    """Return poisoned tensors for every pool of a layout, ready for `layout.bind`.

    Args:
        layout: bound or not.
        num_pages: pages of every pool, or by index space.
        device: where to allocate.
    """
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    for pool in layout.pools:
        pages = num_pages if isinstance(num_pages, int) else num_pages[pool.space]
        rows = pages * (layout.page_size if pool.rows == "token" else 1)
        row_bytes = pool.page_bytes // (layout.page_size if pool.rows == "token" else 1)
        tensors[pool.name] = {
            layer_id: torch.full((rows * row_bytes,), POISON, dtype=torch.uint8, device=device)
            .view(dtype_named(pool.dtype, pool.name))
            .view(rows, *pool.row_shape)
            for layer_id in pool.layer_ids
        }
    return tensors


def telling_bytes(salt: int, tags: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return uint8 `[len(tags), num_bytes]`: mixed 64-bit words, unique by salt, tag and place.

    Args:
        salt: tells buffers apart.
        tags: int64 `[num_pages]`, tells pages apart.
        num_bytes: bytes of a page.
    """
    num_words = -(-num_bytes // 8)
    words = torch.arange(num_words, device=tags.device)
    mixed = (tags[:, None] * 0x9E3779B97F4A7C1 + salt * 0x2545F4914F6CDD1D % (1 << 62)) ^ (
        words[None, :] * 0x14D049BB133111EB
    )
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * 0x3F58476D1CE4E5B9
    mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    return mixed.view(torch.uint8)[:, :num_bytes]


def pages_of(pool: Pool, tensor: torch.Tensor) -> torch.Tensor:
    """Return a pool's tensor as integers, a view `[num_pages, *page dimensions in memory order]`.

    Flattened, a page has the bytes that its object has.
    """
    whole = tensor.view(_INTEGERS[tensor.element_size()])
    if pool.rows == "token":
        page_size = pool.page_shape[0]
        num_pages = tensor.shape[0] // page_size
        row = whole.stride()
        whole = whole.as_strided(
            (num_pages, page_size, *whole.shape[1:]),
            (row[0] * page_size, *row),
            whole.storage_offset(),
        )
    flat = [dim for dim in range(len(pool.page_shape)) if dim not in pool.order]
    return whole.permute(0, *(1 + dim for dim in (*flat, *pool.order)))


def write_telling(
    layout: CacheLayout,
    space: str,
    page_ids: Sequence[int],
    tags: Sequence[int],
    *,
    layers: Collection[int] | None = None,
) -> None:
    """Fill pages of a space's buffers with the telling bytes of `tags`, one per page.

    Args:
        layout: bound to tensors.
        space: the index space.
        page_ids: the pages.
        tags: what each page is to tell.
        layers: of these layers alone; of every layer by default.
    """
    ids = torch.tensor(page_ids, dtype=torch.int64, device=layout.device)
    for salt, buffer, pages in _buffers(layout, space, layers):
        wanted = telling_bytes(salt, _tags(layout, tags), buffer.pool.page_bytes)
        pages[ids] = wanted.contiguous().view(pages.dtype).view(len(ids), *pages.shape[1:])


def poison(layout: CacheLayout) -> None:
    """Fill every page of a bound layout with `POISON`; bytes outside the pages stay."""
    for space in layout.spaces:
        for _, _, pages in _buffers(layout, space):
            byte = torch.full((pages.element_size(),), POISON, dtype=torch.uint8)
            pages.fill_(byte.view(pages.dtype).item())


def check_telling(
    layout: CacheLayout,
    space: str,
    page_ids: Sequence[int],
    tags: Sequence[int],
    *,
    layers: Collection[int] | None = None,
) -> None:
    """Compare pages with the telling bytes of `tags`, byte for byte; arguments as `write_telling`.

    Raises:
        AssertionError: they differ; says how many bytes, and where the first one is.
    """
    ids = torch.tensor(page_ids, dtype=torch.int64, device=layout.device)
    for salt, buffer, pages in _buffers(layout, space, layers):
        wanted = telling_bytes(salt, _tags(layout, tags), buffer.pool.page_bytes)
        got = _rows(pages, ids)
        _compare(got, wanted, f"{buffer.pool.name!r} layer {buffer.layer_id}", page_ids)


def check_poison(layout: CacheLayout, space: str, written: Sequence[int]) -> None:
    """Check that every page but `written` still holds the poison of `make_tensors`.

    Raises:
        AssertionError: one does not; says which.
    """
    others = [page for page in range(layout.num_pages[space]) if page not in set(written)]
    ids = torch.tensor(others, dtype=torch.int64, device=layout.device)
    for _, buffer, pages in _buffers(layout, space):
        got = _rows(pages, ids)
        wanted = torch.full_like(got, POISON)
        where = f"{buffer.pool.name!r} layer {buffer.layer_id}, untouched"
        _compare(got, wanted, where, others)


def object_bytes_of(layout: CacheLayout, space: str, tags: Sequence[int]) -> torch.Tensor:
    """Return telling pages' objects, made without a pack: uint8 `[len(tags), object_bytes]`."""
    parts = [
        (buffer, telling_bytes(salt, _tags(layout, tags), buffer.pool.page_bytes))
        for salt, buffer, _ in _buffers(layout, space)
    ]
    if layout.order == "canonical":
        return torch.cat([part for group in _groups(parts) for part in _by_head(group)], dim=1)
    return torch.cat([part for _, part in parts], dim=1)


def _groups(
    parts: Sequence[tuple[Buffer, torch.Tensor]],
) -> list[list[tuple[Buffer, torch.Tensor]]]:
    """Return the parts of each head group of each layer, in object order."""
    groups: dict[tuple[int, str], list[tuple[Buffer, torch.Tensor]]] = {}
    for buffer, part in parts:
        name = buffer.pool.head_group or f"pool {buffer.pool.name}"
        groups.setdefault((buffer.layer_id, name), []).append((buffer, part))
    return list(groups.values())


def _by_head(group: Sequence[tuple[Buffer, torch.Tensor]]) -> list[torch.Tensor]:
    """Return pages of a group, `[num_pages, page_bytes]` in memory order, head after head."""
    heads = []
    for buffer, part in group:
        pool = buffer.pool
        flat = [dim for dim in range(len(pool.page_shape)) if dim not in pool.order]
        memory = [*flat, *pool.order]
        first = [dim for dim in (pool.shard_dim, pool.token_axis) if dim is not None]
        wanted = [*first, *(dim for dim in range(len(memory)) if dim not in first)]
        sizes = [len(part), *(pool.page_shape[dim] for dim in memory), pool.item_bytes]
        dims = [0, *(1 + memory.index(dim) for dim in wanted), len(memory) + 1]
        num_heads = 1 if pool.shard_dim is None else pool.page_shape[pool.shard_dim]
        heads.append(part.reshape(sizes).permute(dims).reshape(len(part), num_heads, -1))
    return [head for by_head in zip(*(each.unbind(1) for each in heads), strict=True)
            for head in by_head]  # fmt: skip


def _rows(pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return pages[ids].reshape(len(ids), pages[0].numel()).view(torch.uint8)


def _tags(layout: CacheLayout, tags: Sequence[int]) -> torch.Tensor:
    return torch.tensor(tags, dtype=torch.int64, device=layout.device)


def _buffers(
    layout: CacheLayout, space: str, layers: Collection[int] | None = None
) -> list[tuple[int, Buffer, torch.Tensor]]:
    if not layout.is_bound:
        raise ArgumentError("layout is not bound to tensors, wanted a bound one")
    names = [pool.name for pool in layout.pools]
    row = []
    for buffer in layout.buffers[space]:
        if layers is not None and buffer.layer_id not in layers:
            continue
        assert buffer.tensor is not None
        salt = names.index(buffer.pool.name) * 10007 + buffer.layer_id + 1
        row.append((salt, buffer, pages_of(buffer.pool, buffer.tensor)))
    return row


def _compare(got: torch.Tensor, wanted: torch.Tensor, where: str, page_ids: Sequence[int]) -> None:
    if torch.equal(got, wanted):
        return
    page, byte = (int(index) for index in (got != wanted).nonzero()[0])
    raise AssertionError(
        f"pool {where}: {int((got != wanted).sum())} of {got.numel()} bytes differ, the first in "
        f"page {page_ids[page]} at byte {byte}: got {int(got[page, byte]):#04x}, wanted "
        f"{int(wanted[page, byte]):#04x}"
    )
