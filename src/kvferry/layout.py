"""The frozen description of a model's pools: which bytes a page has, and their place in its object.

A layout is first a description (`CacheLayout.from_description`: sizes and offsets, no memory), then
bound to the pools' tensors (`bind`, or `from_tensors` for both at once). Everything is in bytes.

The order of bytes in an object: layers in model order, in a layer the pools in the order given, in
a page the bytes in the order they have in memory; or by head, see `object_order`. Nothing is padded
between them; a pool whose page lengths are not multiples of 16 is moved by a narrower path.
Strides, storage offsets and the element order come from the tensors, never from a shape: pages that
are head-major and pages that are token-major can have equal shapes.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvferry.arguments import flag, mapping, of_type, one_of, shown, whole_number
from kvferry.buffers import (
    Buffer,
    make_buffer,
    not_cut,
    one_device,
    order_and_runs,
)
from kvferry.errors import LayoutError
from kvferry.fingerprint import fingerprint_of
from kvferry.identity import ModelIdentity
from kvferry.object_order import (
    ORDERS,
    check_groups,
    places,
    strided_segments,
)
from kvferry.overlaps import no_shared_memory
from kvferry.pools import (
    MOST,
    SPACES,
    Pool,
    PoolTensors,
    check_tensor,
    dtype_name,
    parse_pool,
    positive,
    same_names,
)
from kvferry.runs import Run
from kvferry.segments import Segment

MAX_OBJECT_BYTES = 2**31 - 1
"""Mooncake returns byte counts of ranged calls as 32-bit integers."""


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
        mapping("description", description, "a mapping", error=LayoutError)
        page_size = positive(description, "page_size", "description")
        num_layers = positive(description, "num_layers", "description")
        identity = _identity(identity)
        pools = tuple(
            parse_pool(entry, page_size, num_layers, identity.tp[1])
            for entry in _sequence("description: pools", description.get("pools"))
        )
        window_tokens = description.get("window_tokens")
        if window_tokens is not None:
            window_tokens = positive(description, "window_tokens", "description")
        layout = _assemble(
            page_size,
            num_layers,
            pools,
            identity,
            None if window_tokens is None else -(-window_tokens // page_size),
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
        num_layers = whole_number("num_layers", num_layers, 1, MOST, error=LayoutError)
        entries = []
        for pool in _sequence("pools", pools):
            of_type("pools", pool, PoolTensors, error=LayoutError)
            if not isinstance(pool.tensors, Mapping) or not pool.tensors:
                raise LayoutError(f"pool {pool.name!r}: got no tensors, wanted one per layer")
            first = next(iter(pool.tensors.values()))
            of_type(f"pool {pool.name!r}: tensors", first, torch.Tensor, error=LayoutError)
            if not first.dim():
                raise LayoutError(f"pool {pool.name!r}: a tensor has no dimensions, wanted rows")
            for layer_id in pool.tensors:
                whole_number(
                    f"pool {pool.name!r}: layers", layer_id, 0, num_layers - 1, error=LayoutError
                )
            entries.append(
                {
                    "name": pool.name,
                    "index": pool.space,
                    "rows": pool.rows,
                    "row_shape": list(first.shape[1:]),
                    "dtype": dtype_name(first.dtype),
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
        mapping("tensors", tensors, "a mapping of pool names", error=LayoutError)
        for name, of_pool in tensors.items():
            mapping(f"tensors of pool {name!r}", of_pool, "a mapping", error=LayoutError)
        same_names("pools", set(tensors), {pool.name for pool in self.pools})
        pools = []
        for pool in self.pools:
            given = tensors[pool.name]
            same_names(f"layers of pool {pool.name!r}", set(given), set(pool.layer_ids))
            orders = {}
            for layer_id in pool.layer_ids:
                check_tensor(pool, layer_id, given[layer_id], self.page_size)
                orders[layer_id] = order_and_runs(pool, layer_id, given[layer_id])[0]
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
        of_type("identity", identity, ModelIdentity, error=LayoutError)
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
            raise LayoutError(f"pool_name is {shown(pool_name)}, wanted one of {names}")
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
        flag("by_token", by_token)
        segments = []
        for buffer in self._buffers_of(space):
            if self.order == "canonical" and not (by_token and buffer.has_planes):
                if by_token and buffer.pool.token_axis is None:
                    raise not_cut(buffer)
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
            raise not_cut(buffer)
        return order_and_runs(pool, buffer.layer_id, buffer.tensor, by_token=True)[1]

    def fingerprint_of_space(self, space: str, identity: ModelIdentity) -> str:
        """Return the fingerprint of one index space's objects alone, for another identity.

        It holds that space's pools and nothing of the others', so that it stays when those change.
        """
        pools = tuple(pool for pool in self.pools if pool.space == space)
        return fingerprint_of(self.page_size, self.num_layers, pools, identity, self.order)

    def num_ranges(self, space: str) -> int:
        """Return how many contiguous ranges a page has before it is packed."""
        return sum(run.count for buffer in self._buffers_of(space) for run in buffer.runs)

    def _buffers_of(self, space: str) -> tuple[Buffer, ...]:
        return self.buffers[one_of("space", space, self.spaces)]


def _identity(identity: ModelIdentity | None) -> ModelIdentity:
    if identity is None:
        return ModelIdentity()
    return of_type("identity", identity, ModelIdentity, error=LayoutError)


def _sequence(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise LayoutError(f"{name} are {shown(value)}, wanted a sequence")
    return list(value)


def _assemble(
    page_size: int,
    num_layers: int,
    pools: tuple[Pool, ...],
    identity: ModelIdentity,
    window_pages: int | None,
    tensors: Mapping[str, Mapping[int, torch.Tensor]],
    object_order: str,
) -> CacheLayout:
    if not isinstance(object_order, str) or object_order not in ORDERS:
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
                row.append(make_buffer(pool, layer_id, offset, place, tensor, object_order))
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
    device = one_device(buffers) if tensors else None
    if tensors:
        no_shared_memory(buffers, num_pages)
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
        fingerprint_of(page_size, num_layers, pools, identity, object_order),
        object_order,
    )
