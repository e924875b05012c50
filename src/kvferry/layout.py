"""The frozen description of a model's pools: which bytes a page has, and their place in its object.

A layout is first a description (`CacheLayout.from_description`: sizes and offsets, no memory), then
bound to the pools' tensors (`bind`, or `from_tensors` for both at once). Everything is in bytes.

The order of bytes in an object: layers in model order, in a layer the pools in the order given, in
a page the bytes in the order they have in memory; or by head, see `object_order`. Nothing is padded
between them; a pool whose page lengths are not multiples of 16 is moved by a narrower path.
Strides, storage offsets and the element order come from the tensors, never from a shape: pages that
are head-major and pages that are token-major can have equal shapes.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.object_order import (
    ORDERS,
    Place,
    canonical_meaning,
    check_groups,
    dense_strides,
    places,
    strided_segments,
)
from kvferry.runs import Run, page_runs
from kvferry.segments import Segment
from kvferry.sharding import Sharding

FORMAT_VERSION = 1
"""Version of the object's bytes; part of every fingerprint."""

SPACES = ("full", "swa", "state")
"""Index spaces: every page of a prefix, a trailing window of them, the last one alone."""

MAX_OBJECT_BYTES = 2**31 - 1
"""Mooncake returns byte counts of ranged calls as 32-bit integers."""


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree before one engine may read another's pages; part of the fingerprint.

    Attributes:
        model: the model's id, as its users name it.
        revision: commit or tag of the weights.
        kv_dtype: the engine's KV-cache dtype, where the pools' own dtype does not tell (raw bytes).
        draft: id of a draft model whose layers ride in the same pools.
        tp, pp, cp, dcp: (rank, size) of tensor, pipeline, context and decode-context parallelism.
    """

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    draft: str = ""
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, name)
            if not 0 <= rank < size:
                raise LayoutError(f"{name} is (rank {rank}, size {size}), wanted 0 <= rank < size")

    @property
    def share(self) -> str:
        """This rank's part of the model, as it stands in object keys: `tp0of8-pp0of1-...`."""
        parts = (
            f"{name}{getattr(self, name)[0]}of{getattr(self, name)[1]}"
            for name in ("tp", "pp", "cp", "dcp")
        )
        return "-".join(parts)


@dataclass(frozen=True)
class Pool:
    """The buffers of one kind, over all layers that have it, with one row geometry.

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
            rank holds the same bytes. It says what may be read by other ranks, and is no part of
            the fingerprint.
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


@dataclass(frozen=True)
class CacheLayout:
    """Pools, their order in objects, and (once bound) their memory. Built by the class methods.

    Attributes:
        page_size: tokens of a page.
        num_layers: layers that this pipeline stage runs, with or without buffers.
        pools: in object order.
        identity: who wrote these bytes.
        buffers: per index space, in object order.
        object_bytes: per index space, the size of a page object.
        layer_offsets: per index space, `num_layers + 1` ascending offsets: layer i's bytes are
            `[layer_offsets[i], layer_offsets[i + 1])` of the object.
        num_pages: per index space, how many page ids are valid; empty while unbound.
        window_pages: trailing pages that the `swa` space needs; None means the whole prefix.
        device: the device of all tensors; None while unbound.
        fingerprint: 32 hex digits, a hash of all that changes the bytes' meaning.
        order: `pool` or `canonical`, the order of bytes in objects; see `object_order`.
    """

    page_size: int
    num_layers: int
    pools: tuple[Pool, ...]
    identity: ModelIdentity
    buffers: Mapping[str, tuple[Buffer, ...]] = field(repr=False)
    object_bytes: Mapping[str, int]
    layer_offsets: Mapping[str, tuple[int, ...]] = field(repr=False)
    num_pages: Mapping[str, int]
    window_pages: int | None
    device: torch.device | None
    fingerprint: str
    order: str = "pool"

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], *, identity: ModelIdentity | None = None
    ) -> "CacheLayout":
        """Build an unbound layout from plain data, for planning without memory.

        Args:
            description: `page_size`, `num_layers`, `pools` (each with `name`, `index`, `rows`,
                `row_shape`, `dtype`, `layers`, and optionally `page_bytes`, `token_axis`,
                `token_planes`, the memory's `order`, `shard_axis`, `shard_parts`, `shard_totals`
                and `head_group`), and optionally the objects' `order`, `window_tokens` and
                `object_bytes`. The optional sizes are compared with what comes out. Other entries
                (`note`, `source`, `detail`) are ignored.
            identity: who writes these bytes.

        Raises:
            LayoutError: an entry is missing, contradictory or unknown; names pool and layer.
        """
        page_size = _positive(description, "page_size", "description")
        num_layers = _positive(description, "num_layers", "description")
        identity = identity or ModelIdentity()
        pools = tuple(
            _pool(entry, page_size, num_layers, identity.tp[1]) for entry in description["pools"]
        )
        window_tokens = description.get("window_tokens")
        layout = _assemble(
            page_size,
            num_layers,
            pools,
            identity,
            None if window_tokens is None else -(-int(window_tokens) // page_size),
            {},
            description.get("order", "pool"),
        )
        for space, wanted in description.get("object_bytes", {}).items():
            got = layout.object_bytes.get(space)
            if got != wanted:
                raise LayoutError(f"object_bytes of {space!r}: pools add up to {got}, not {wanted}")
        return layout

    @classmethod
    def from_tensors(
        cls,
        pools: Sequence[PoolTensors],
        *,
        page_size: int,
        num_layers: int,
        window_tokens: int | None = None,
        identity: ModelIdentity | None = None,
        order: str = "pool",
    ) -> "CacheLayout":
        """Build a bound layout from tensors alone; shapes and dtypes are taken from them.

        Raises:
            LayoutError: as `from_description` and `bind`.
        """
        entries = []
        for pool in pools:
            if not pool.tensors:
                raise LayoutError(f"pool {pool.name!r}: got no tensors, wanted one per layer")
            first = next(iter(pool.tensors.values()))
            entries.append(
                {
                    "name": pool.name,
                    "index": pool.space,
                    "rows": pool.rows,
                    "row_shape": list(first.shape[1:]),
                    "dtype": _dtype_name(first.dtype),
                    "layers": sorted(pool.tensors),
                    "token_axis": pool.token_axis,
                    "token_planes": pool.token_planes,
                    "shard_axis": pool.shard_axis,
                    "shard_parts": pool.shard_parts,
                    "shard_totals": pool.shard_totals,
                    "head_group": pool.head_group,
                }
            )
        description: dict[str, Any] = {
            "page_size": page_size,
            "num_layers": num_layers,
            "pools": entries,
            "order": order,
        }
        if window_tokens is not None:
            description["window_tokens"] = window_tokens
        unbound = cls.from_description(description, identity=identity)
        return unbound.bind({pool.name: pool.tensors for pool in pools})

    def bind(self, tensors: Mapping[str, Mapping[int, torch.Tensor]]) -> "CacheLayout":
        """Return this layout with the pools' memory: addresses, strides, runs, page counts.

        Args:
            tensors: pool name to layer id to tensor `[num_rows, *row_shape]`, all on one device.
                The layout holds them, so that their memory outlives it; it never resizes them.

        Raises:
            LayoutError: a pool or layer too many or too few; a dtype, shape or device that differs;
                overlapping elements; two buffers over the same memory; names pool, layer, got and
                wanted.
        """
        _same_names("pools", set(tensors), {pool.name for pool in self.pools})
        pools = []
        for pool in self.pools:
            given = tensors[pool.name]
            _same_names(f"layers of pool {pool.name!r}", set(given), set(pool.layer_ids))
            orders = {}
            for layer_id in pool.layer_ids:
                _check_tensor(pool, layer_id, given[layer_id], self.page_size)
                orders[layer_id] = _order_and_runs(pool, layer_id, given[layer_id])[0]
            first = orders[pool.layer_ids[0]]
            for layer_id, order in orders.items():
                if order != first:
                    raise LayoutError(
                        f"pool {pool.name!r} layer {layer_id}: dimensions lie in memory in order "
                        f"{order}, wanted {first} as in layer {pool.layer_ids[0]}"
                    )
            pools.append(replace(pool, order=first))
        return self._assembled(tuple(pools), self.identity, tensors)

    def of_rank(self, identity: ModelIdentity) -> "CacheLayout":
        """Return the unbound layout of another rank of the same model, pools alike."""
        return self._assembled(self.pools, identity, {})

    def _assembled(
        self,
        pools: tuple[Pool, ...],
        identity: ModelIdentity,
        tensors: Mapping[str, Mapping[int, torch.Tensor]],
    ) -> "CacheLayout":
        return _assemble(
            self.page_size, self.num_layers, pools, identity, self.window_pages, tensors, self.order
        )

    def description(self) -> dict[str, Any]:
        """Return the plain data (JSON's types) from which an unbound twin can be built."""
        pools = [
            {
                "name": pool.name,
                "index": pool.space,
                "rows": pool.rows,
                "row_shape": list(pool.row_shape),
                "dtype": pool.dtype,
                "layers": list(pool.layer_ids),
                "token_axis": pool.token_axis,
                "token_planes": list(pool.token_planes),
                "order": list(pool.order),
                "shard_axis": pool.shard_axis,
                "shard_parts": list(pool.shard_parts),
                "shard_totals": list(pool.shard_totals),
                "head_group": pool.head_group,
            }
            for pool in self.pools
        ]
        plain = {
            "page_size": self.page_size,
            "num_layers": self.num_layers,
            "order": self.order,
            "pools": pools,
        }
        if self.window_pages is not None:
            plain["window_tokens"] = self.window_pages * self.page_size
        return plain

    @property
    def spaces(self) -> tuple[str, ...]:
        """Index spaces that have a pool, in the order full, swa, state."""
        return tuple(space for space in SPACES if space in self.object_bytes)

    @property
    def is_bound(self) -> bool:
        """Whether the layout has memory."""
        return self.device is not None

    def alignment_bytes(self, pool_name: str) -> int:
        """Return the pool's alignment class: the narrowest of its buffers' (16, 8, 4, 2 or 1).

        Raises:
            LayoutError: no such pool.
        """
        classes = [
            buffer.alignment_bytes
            for buffers in self.buffers.values()
            for buffer in buffers
            if buffer.pool.name == pool_name
        ]
        if not classes:
            names = [pool.name for pool in self.pools]
            raise LayoutError(f"pool_name is {pool_name!r}, wanted one of {names}")
        return min(classes)

    def segments(self, space: str, *, by_token: bool = False) -> tuple[Segment, ...]:
        """Return what a move of whole pages is made of, in object order.

        Args:
            space: an index space of the layout.
            by_token: such that every segment's tokens can be told, for pages that are moved in
                part; there may be more segments then.

        Raises:
            LayoutError: `by_token`, and a pool's pages cannot be cut by tokens; names it.
        """
        segments = []
        for buffer in self.buffers[space]:
            if self.order == "canonical" and not (by_token and buffer.has_planes):
                if by_token and buffer.pool.token_axis is None:
                    raise _not_cut(buffer)
                segments.extend(strided_segments(buffer, by_token=by_token))
                continue
            offset = buffer.object_offset
            for run in self._token_runs(buffer) if by_token else buffer.runs:
                segments.append(
                    Segment.of_run(
                        buffer.layer_id,
                        buffer.tensor,
                        buffer.address,
                        buffer.page_stride_bytes,
                        buffer.num_pages,
                        offset,
                        run,
                    )
                )
                offset += run.length_bytes * run.count
        return tuple(segments)

    def _token_runs(self, buffer: Buffer) -> Sequence[Run]:
        pool = buffer.pool
        if buffer.has_planes:
            starts = itertools.accumulate(
                (w * self.page_size for w in pool.token_planes), initial=0
            )
            return [
                Run(start, width * self.page_size, 1, width * self.page_size, token_bytes=width)
                for start, width in zip(starts, pool.token_planes, strict=False)
            ]
        if pool.token_axis is None or buffer.tensor is None:
            raise _not_cut(buffer)
        return _order_and_runs(pool, buffer.layer_id, buffer.tensor, by_token=True)[1]

    def num_ranges(self, space: str) -> int:
        """Return how many contiguous ranges a page has before it is packed."""
        return sum(run.count for buffer in self.buffers[space] for run in buffer.runs)


def _not_cut(buffer: Buffer) -> LayoutError:
    return LayoutError(
        f"pool {buffer.pool.name!r} layer {buffer.layer_id}: its pages cannot be cut by tokens; "
        "describe token_axis or token_planes, or move whole pages"
    )


def dtype_named(name: str, pool_name: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        LayoutError: torch has none; names the pool.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"pool {pool_name!r}: dtype is {name!r}, wanted a torch dtype's name")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _positive(entry: Mapping[str, Any], key: str, owner: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or value < 1:
        raise LayoutError(f"{owner}: {key} is {value!r}, wanted a positive integer")
    return value


def _same_names(what: str, got: set[Any], wanted: set[Any]) -> None:
    if got != wanted:
        raise LayoutError(
            f"{what}: missing {sorted(wanted - got)}, not described {sorted(got - wanted)}"
        )


def _pool(entry: Mapping[str, Any], page_size: int, num_layers: int, tp_size: int) -> Pool:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise LayoutError(f"pool: name is {name!r}, wanted a non-empty string")
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
    layer_ids = tuple(entry["layers"])
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise LayoutError(f"{owner}: layers are {layer_ids}, wanted at least one, ascending")
    if layer_ids[0] < 0 or layer_ids[-1] >= num_layers:
        raise LayoutError(
            f"{owner}: layer {layer_ids[-1] if layer_ids[0] >= 0 else layer_ids[0]} is outside "
            f"0 .. {num_layers - 1}"
        )
    row_shape = tuple(int(size) for size in entry["row_shape"])
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
    order = tuple(entry.get("order") or dims)
    if sorted(order) != dims:
        raise LayoutError(
            f"{owner}: order is {order}, wanted dimensions {dims} of page_shape {page_shape}, "
            "slowest first"
        )
    token_axis = 0 if entry["rows"] == "token" else entry.get("token_axis")
    if token_axis is not None and page_shape[token_axis : token_axis + 1] != (page_size,):
        raise LayoutError(
            f"{owner}: token_axis is {token_axis}, but page_shape {page_shape} has not "
            f"{page_size} tokens there"
        )
    token_planes = tuple(int(width) for width in entry.get("token_planes") or ())
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


def _check_tensor(pool: Pool, layer_id: int, tensor: torch.Tensor, page_size: int) -> None:
    where = f"pool {pool.name!r} layer {layer_id}"
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise LayoutError(f"{where}: got {type(tensor).__name__}, wanted a strided tensor")
    if _dtype_name(tensor.dtype) != pool.dtype:
        raise LayoutError(f"{where}: dtype is {_dtype_name(tensor.dtype)}, wanted {pool.dtype}")
    if tuple(tensor.shape[1:]) != pool.row_shape:
        raise LayoutError(
            f"{where}: rows have shape {tuple(tensor.shape[1:])}, wanted {pool.row_shape}"
        )
    rows_per_page = page_size if pool.rows == "token" else 1
    if tensor.shape[0] < rows_per_page:
        raise LayoutError(
            f"{where}: tensor has {tensor.shape[0]} rows, wanted at least a page of {rows_per_page}"
        )


def _order_and_runs(
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


def _assemble(
    page_size: int,
    num_layers: int,
    pools: tuple[Pool, ...],
    identity: ModelIdentity,
    window_pages: int | None,
    tensors: Mapping[str, Mapping[int, torch.Tensor]],
    object_order: str,
) -> CacheLayout:
    if object_order not in ORDERS:
        raise LayoutError(f"order is {object_order!r}, wanted one of {ORDERS}")
    check_groups(pools)
    names = [pool.name for pool in pools]
    if len(set(names)) != len(names) or not names:
        raise LayoutError(f"pools are named {names}, wanted at least one, each name once")
    buffers: dict[str, tuple[Buffer, ...]] = {}
    object_bytes: dict[str, int] = {}
    layer_offsets: dict[str, tuple[int, ...]] = {}
    num_pages: dict[str, int] = {}
    for space in SPACES:
        members = [pool for pool in pools if pool.space == space]
        if not members:
            continue
        owners = {(pool.name, layer_id) for pool in members for layer_id in pool.layer_ids}
        offset, offsets, row = 0, [0], []
        for layer_id in range(num_layers):
            present = [pool for pool in members if (pool.name, layer_id) in owners]
            for pool, place in zip(present, places(present, object_order), strict=True):
                tensor = tensors[pool.name][layer_id] if tensors else None
                row.append(_buffer(pool, layer_id, offset, place, tensor, object_order))
            offset += sum(pool.page_bytes for pool in present)
            offsets.append(offset)
        if offset > MAX_OBJECT_BYTES:
            raise LayoutError(
                f"index space {space!r}: an object has {offset} bytes, wanted at most "
                f"{MAX_OBJECT_BYTES}: use a smaller page_size"
            )
        buffers[space], object_bytes[space] = tuple(row), offset
        layer_offsets[space] = tuple(offsets)
        if tensors:
            num_pages[space] = min(buffer.num_pages for buffer in row)
    device = _one_device(buffers) if tensors else None
    if tensors:
        _no_shared_memory(buffers)
    return CacheLayout(
        page_size,
        num_layers,
        pools,
        identity,
        buffers,
        object_bytes,
        layer_offsets,
        num_pages,
        window_pages,
        device,
        _fingerprint(page_size, num_layers, pools, identity, object_order),
        object_order,
    )


def _buffer(
    pool: Pool,
    layer_id: int,
    layer_offset: int,
    place: Place,
    tensor: torch.Tensor | None,
    object_order: str,
) -> Buffer:
    if tensor is None:
        runs: tuple[Run, ...] = (Run(0, pool.page_bytes, 1, pool.page_bytes),)
        address, page_stride, num_pages = 0, pool.page_bytes, 0
        page_strides = dense_strides(pool.page_shape, pool.order, pool.item_bytes)
    else:
        _, runs, page_stride, num_pages = _order_and_runs(pool, layer_id, tensor)
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


def _one_device(buffers: Mapping[str, tuple[Buffer, ...]]) -> torch.device:
    device: torch.device | None = None
    for buffer in (buffer for row in buffers.values() for buffer in row):
        assert buffer.tensor is not None
        device = device or buffer.tensor.device
        if buffer.tensor.device != device:
            raise LayoutError(
                f"pool {buffer.pool.name!r} layer {buffer.layer_id}: tensor is on "
                f"{buffer.tensor.device}, wanted {device} as the others"
            )
    assert device is not None
    return device


def _no_shared_memory(buffers: Mapping[str, tuple[Buffer, ...]]) -> None:
    # Interleaved views share an allocation, not bytes: only an equal first byte is surely a fault.
    seen: dict[int, Buffer] = {}
    for buffer in (buffer for row in buffers.values() for buffer in row):
        other = seen.setdefault(buffer.address, buffer)
        if other is not buffer:
            raise LayoutError(
                f"pool {buffer.pool.name!r} layer {buffer.layer_id}: begins at the same address as "
                f"pool {other.pool.name!r} layer {other.layer_id}; describe shared memory once"
            )


def _fingerprint(
    page_size: int,
    num_layers: int,
    pools: tuple[Pool, ...],
    identity: ModelIdentity,
    object_order: str,
) -> str:
    meaning: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "page_size": page_size,
        "num_layers": num_layers,
        "padding": "none",
        "pools": [
            [
                pool.name,
                pool.space,
                pool.rows,
                pool.row_shape,
                pool.dtype,
                pool.layer_ids,
                pool.order,
            ]
            for pool in pools
        ],
        "identity": asdict(identity),
    }
    if object_order == "canonical":  # the order in memory no longer matters
        meaning |= {"order": object_order, "pools": [canonical_meaning(pool) for pool in pools]}
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
