"""Pools as they are described: kind, index space, geometry, where their tokens and heads are."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvferry.arguments import integers, mapping, string, whole_number
from kvferry.errors import LayoutError
from kvferry.sharding import Sharding

MOST = 2**48
"""Of sizes and counts: what an address space holds."""

SPACES = ("full", "swa", "state")
"""Index spaces: every page of a prefix, a trailing window of them, the last one alone."""


@dataclass(frozen=True)
class Pool:
    """The buffers of one kind, over all layers that have it, with one row geometry.

    What a field says of the bytes' meaning is in the fingerprint: see `fingerprint.MEANING`.

    Attributes:
        name: unique in the layout, for example `kv` or `index_k`.
        space: the index space whose page ids address it.
        rows: `token` if a row of the tensors is a token (a page is `page_size` rows), `page` if a
            row is a page.
        row_shape: shape of a row; without the leading dimension of the tensors.
        dtype: torch's name of the dtype, for example `bfloat16`.
        layer_ids: layers that own a buffer of this kind, ascending.
        page_shape: shape of a page, `row_shape` preceded by `page_size` where rows are tokens.
        page_bytes: bytes of one page in one layer.
        order: the page's dimensions of more than one entry, from slowest to fastest in memory.
        token_axis: the page's dimension that counts tokens; 0 where rows are tokens, None where no
            dimension does.
        token_planes: for pages that hold one plane after another (keys, then scales), the bytes of
            one token in each plane; empty where `token_axis` tells.
        shard_axis: the axis of `row_shape` that tensor-parallel ranks share out; None where every
            rank holds the same bytes.
        shard_parts: this rank's entries of each part that is concatenated along that axis.
        shard_totals: all ranks' entries of each part; see `sharding`.
        head_group: pools of one group are interleaved by head in canonical order.
    """

    name: str
    space: str
    rows: str
    row_shape: tuple[int, ...]
    dtype: str
    layer_ids: tuple[int, ...]
    page_shape: tuple[int, ...]
    page_bytes: int
    order: tuple[int, ...]
    token_axis: int | None
    token_planes: tuple[int, ...]
    shard_axis: int | None = None
    shard_parts: tuple[int, ...] = ()
    shard_totals: tuple[int, ...] = ()
    head_group: str = ""

    @property
    def shard_dim(self) -> int | None:
        """The page's dimension that is sharded, None where every rank holds the same bytes."""
        if self.shard_axis is None:
            return None
        return self.shard_axis + (1 if self.rows == "token" else 0)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return dtype_named(self.dtype, self.name).itemsize


@dataclass(frozen=True)
class PoolTensors:
    """A pool by its tensors: the argument of `CacheLayout.from_tensors`.

    Attributes:
        name, space, rows: as in `Pool`.
        tensors: layer id to tensor `[num_rows, *row_shape]`. Any strides that do not overlap, so
            views (`permute`, `select`, a half of an allocation) are described without a copy.
        token_axis, token_planes, shard_axis, shard_parts, shard_totals, head_group: as in `Pool`.
            `shard_parts` is the whole axis by default, `shard_totals` the parts times the ranks.
    """

    name: str
    space: str
    rows: str
    tensors: Mapping[int, torch.Tensor]
    token_axis: int | None = None
    token_planes: tuple[int, ...] = ()
    shard_axis: int | None = None
    shard_parts: tuple[int, ...] = ()
    shard_totals: tuple[int, ...] = ()
    head_group: str = ""


def dtype_named(name: str, pool_name: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        LayoutError: torch has none; names the pool.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"pool {pool_name!r}: dtype is {name!r}, wanted a torch dtype's name")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def positive(entry: Mapping[str, Any], key: str, owner: str) -> int:
    """Return an entry that must be a positive integer, or raise a LayoutError that names it."""
    return whole_number(f"{owner}: {key}", entry.get(key), 1, MOST, error=LayoutError)


def same_names(what: str, got: set[Any], wanted: set[Any]) -> None:
    """Raise a LayoutError that lists names too many and too few."""
    if got != wanted:
        raise LayoutError(
            f"{what}: missing {sorted(wanted - got)}, not described "
            f"{sorted(got - wanted, key=repr)}, wanted {sorted(wanted)}"
        )


def parse_pool(entry: Mapping[str, Any], page_size: int, num_layers: int, tp_size: int) -> Pool:
    """Return the pool of a description's entry.

    Raises:
        LayoutError: an entry is missing, wrong or contradictory; names pool and entry.
    """
    mapping("pools", entry, "a mapping for each pool", error=LayoutError)
    name = string("pool: name", entry.get("name"), error=LayoutError)
    owner = f"pool {name!r}"
    for key in ("index", "rows", "row_shape", "dtype", "layers"):
        if key not in entry:
            raise LayoutError(f"{owner}: entry {key!r} is missing")
    if entry["index"] not in SPACES:
        raise LayoutError(f"{owner}: index is {entry['index']!r}, wanted one of {SPACES}")
    if entry["rows"] not in ("token", "page"):
        raise LayoutError(f"{owner}: rows is {entry['rows']!r}, wanted 'token' or 'page'")
    if entry["rows"] == "token" and entry["index"] == "state":
        raise LayoutError(f"{owner}: rows is 'token', wanted 'page': a state slot has no tokens")
    layer_ids = integers(owner, "layers", entry["layers"])
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise LayoutError(f"{owner}: layers are {layer_ids}, wanted at least one, ascending")
    if layer_ids[0] < 0 or layer_ids[-1] >= num_layers:
        outside = layer_ids[-1] if layer_ids[0] >= 0 else layer_ids[0]
        raise LayoutError(f"{owner}: layer {outside} is outside, wanted 0 .. {num_layers - 1}")
    row_shape = integers(owner, "row_shape", entry["row_shape"])
    if any(size < 1 for size in row_shape):
        raise LayoutError(f"{owner}: row_shape is {row_shape}, wanted positive sizes")
    page_shape = (page_size, *row_shape) if entry["rows"] == "token" else row_shape
    page_bytes = math.prod(page_shape) * dtype_named(entry["dtype"], name).itemsize
    if entry.get("page_bytes", page_bytes) != page_bytes:
        raise LayoutError(
            f"{owner}: page_bytes is {entry['page_bytes']}, but page_shape {page_shape} of "
            f"{entry['dtype']} has {page_bytes}"
        )
    dims = [dim for dim, size in enumerate(page_shape) if size > 1]
    order = integers(owner, "order", entry.get("order") or dims)
    if sorted(order) != dims:
        raise LayoutError(
            f"{owner}: order is {order}, wanted dimensions {dims} of page_shape {page_shape}, "
            "slowest first"
        )
    token_axis = 0 if entry["rows"] == "token" else entry.get("token_axis")
    if token_axis is not None:
        most = len(page_shape) - 1
        token_axis = whole_number(f"{owner}: token_axis", token_axis, 0, most, error=LayoutError)
    if token_axis is not None and page_shape[token_axis : token_axis + 1] != (page_size,):
        raise LayoutError(
            f"{owner}: token_axis is {token_axis}, but page_shape {page_shape} has not "
            f"{page_size} tokens there"
        )
    token_planes = integers(owner, "token_planes", entry.get("token_planes") or ())
    if any(width < 1 for width in token_planes):
        raise LayoutError(f"{owner}: token_planes are {token_planes}, wanted positive widths")
    if token_planes and sum(token_planes) * page_size > page_bytes:
        raise LayoutError(
            f"{owner}: token_planes {token_planes} of {page_size} tokens exceed the page's "
            f"{page_bytes} bytes"
        )
    sharding = Sharding.of_entry(entry, row_shape, tp_size, owner)
    pool = Pool(
        name, entry["index"], entry["rows"], row_shape, entry["dtype"], layer_ids, page_shape,
        page_bytes, order, token_axis, token_planes, **asdict(sharding),
    )  # fmt: skip
    if pool.shard_dim is not None and (pool.shard_dim == token_axis or token_planes):
        raise LayoutError(
            f"{owner}: shard_axis is {pool.shard_axis}, wanted an axis that holds no tokens"
        )
    return pool


def check_tensor(pool: Pool, layer_id: int, tensor: torch.Tensor, page_size: int) -> None:
    """Raise a LayoutError if a tensor's kind, dtype or shape is not its pool's."""
    where = f"pool {pool.name!r} layer {layer_id}"
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise LayoutError(f"{where}: got {type(tensor).__name__}, wanted a strided tensor")
    if dtype_name(tensor.dtype) != pool.dtype:
        raise LayoutError(f"{where}: dtype is {dtype_name(tensor.dtype)}, wanted {pool.dtype}")
    if tuple(tensor.shape[1:]) != pool.row_shape:
        raise LayoutError(
            f"{where}: rows have shape {tuple(tensor.shape[1:])}, wanted {pool.row_shape}"
        )
    rows_per_page = page_size if pool.rows == "token" else 1
    if tensor.shape[0] < rows_per_page:
        raise LayoutError(
            f"{where}: tensor has {tensor.shape[0]} rows, wanted at least a page of {rows_per_page}"
        )
