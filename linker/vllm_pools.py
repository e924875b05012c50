"""`CacheLayout`s from vLLM's `KVCacheConfig` and the tensors that it registers with a connector.

vLLM has one pool of blocks, and groups of layers that take blocks from it by turns, each with a
block table of its own. The groups lie over each other in memory, so each has a layout of its own
here, and an object per page key and group. Nothing of vLLM is imported: its objects come in, and
are recognised by the exact names of their classes. What is not known is refused. Facts are those
of vLLM 0.33.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.pool_tensors import Excluded, qualified_name, required
from kvferry.pools import PoolTensors

_MODULE = "vllm.v1.kv_cache_interface"
_SPACE_OF_SPEC = {
    f"{_MODULE}.FullAttentionSpec": "full",
    f"{_MODULE}.MLAAttentionSpec": "full",
    f"{_MODULE}.SlidingWindowSpec": "swa",
    f"{_MODULE}.SlidingWindowMLASpec": "swa",
    f"{_MODULE}.MambaSpec": "state",
}
_UNIFORM = f"{_MODULE}.UniformTypeKVCacheSpecs"
_LATENT = (f"{_MODULE}.MLAAttentionSpec", f"{_MODULE}.SlidingWindowMLASpec")

NULL_BLOCK_ID = 0
"""vLLM's block that stands for positions without one: skipped window positions and states."""


@dataclass(frozen=True)
class VllmGroup:
    """One of vLLM's KV cache groups as kvferry sees it.

    Attributes:
        group_id: its index in `KVCacheConfig.kv_cache_groups`.
        space: the layout's only index space: `full`, `swa` or `state`. Page ids are block ids of
            this group's block table.
        layout: bound to the group's tensors; its page size is the group's block size.
        layer_ids: layer name to the layer id whose counter its reader waits for. Layers that share
            another layer's cache have that layer's id.
        replicated: whether the objects are equal on every tensor-parallel rank.
    """

    group_id: int
    space: str
    layout: CacheLayout
    layer_ids: Mapping[str, int]
    replicated: bool

    def pages(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the positions in a request's block table that hold a block, and their page ids.

        Positions of the null block are left out: their pages are neither saved nor loaded.

        Raises:
            LayoutError: a block id outside the pool.
        """
        positions = [at for at, block_id in enumerate(block_ids) if block_id != NULL_BLOCK_ID]
        page_ids = [block_ids[at] for at in positions]
        num_pages = self.layout.num_pages[self.space]
        if page_ids and not 0 < min(page_ids) <= max(page_ids) < num_pages:
            raise LayoutError(
                f"group {self.group_id}: block ids {min(page_ids)} .. {max(page_ids)}, wanted "
                f"{NULL_BLOCK_ID} .. {num_pages - 1}"
            )
        return positions, page_ids


@dataclass(frozen=True)
class VllmPools:
    """vLLM's groups.

    Attributes:
        groups: those that travel, in vLLM's order.
        excluded: what does not travel: whole groups by their layers, and bytes between pages.
    """

    groups: tuple[VllmGroup, ...]
    excluded: tuple[Excluded, ...]


def read_vllm_pools(
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    first_layer: int = 0,
    num_layers: int | None = None,
    identity: ModelIdentity | None = None,
) -> VllmPools:
    """Build a bound layout for each group whose blocks vLLM keeps under prefix hashes.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`, as a connector's constructor gets it.
        kv_caches: layer name to tensor, as `register_kv_caches` gets them.
        first_layer: number of this pipeline stage's first layer in the layers' names.
        num_layers: layers of this pipeline stage; by default up to the last one with a cache.
        identity: who writes these bytes. Its `kv_dtype` matters where caches are raw bytes.

    Raises:
        LayoutError: an unknown kind of group, a layer without a tensor, a tensor without a group,
            a tensor that is not made of the group's blocks, or groups whose blocks do not lie over
            each other one by one; names group and layer.
    """
    num_blocks = required(kv_cache_config, "num_blocks")
    travels = set(required(kv_cache_config, "prefix_cacheable_group_ids"))
    groups, excluded = [], []
    extents: list[_Extent] = []
    unread = dict(kv_caches)
    all_groups = list(required(kv_cache_config, "kv_cache_groups"))
    ids = [
        _layer_id(name, first_layer)[0]
        for group_id in sorted(travels)
        for name in required(all_groups[group_id], "layer_names")
    ]
    stage = num_layers if num_layers is not None else max(ids, default=0) + 1
    for group_id, group in enumerate(all_groups):
        names = list(required(group, "layer_names"))
        tensors = {name: unread.pop(name) for name in names if name in unread}
        if group_id not in travels:
            excluded += [
                Excluded(name, "vLLM does not keep this group's blocks", _num_bytes(tensor))
                for name, tensor in tensors.items()
            ]
            continue
        if not names:
            continue  # none of the group's layers is on this pipeline stage
        if len(tensors) < len(names):
            missing = [name for name in names if name not in tensors]
            raise LayoutError(f"group {group_id}: layers {missing} have no registered tensor")
        read = _read_group(group_id, group, tensors, num_blocks, first_layer, stage, identity)
        groups.append(read)
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
        rest = sum(storage.nbytes() for storage in memory.values())
        rest -= num_blocks * read.layout.object_bytes[read.space]
        extents += [_Extent.of(group_id, tensor, num_blocks) for tensor in tensors.values()]
        reason = "between the group's pages: padding, and room of groups with larger blocks"
        excluded.append(Excluded(f"group {group_id}", reason, rest))
    if unread:
        raise LayoutError(
            f"kv_caches: layers {sorted(unread)} belong to no group, wanted every registered "
            f"tensor in one"
        )
    _check_overlay(extents)
    return VllmPools(tuple(groups), tuple(excluded))


def _read_group(
    group_id: int,
    group: Any,
    tensors: Mapping[str, torch.Tensor],
    num_blocks: int,
    first_layer: int,
    num_layers: int,
    identity: ModelIdentity | None,
) -> VllmGroup:
    specs = _specs(group, list(tensors))
    spaces = {name: _space(group_id, name, spec) for name, spec in specs.items()}
    (space, *others) = sorted(set(spaces.values()))
    if others or getattr(group, "host_resident", False):
        raise LayoutError(
            f"group {group_id}: its layers are {sorted(set(spaces.values()))}"
            f"{' in host memory' if not others else ''}, wanted one kind on the device"
        )
    owners: dict[tuple[Any, ...], str] = {}
    layer_ids: dict[str, int] = {}
    pools: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: _layer_id(name, first_layer)):
        layer_id, role = _layer_id(name, first_layer)
        view = _pages(group_id, name, tensors[name], num_blocks)
        # Layers that share a cache register one view: it is described once, for the first reader.
        same = (view.data_ptr(), tuple(view.shape), view.stride(), view.dtype)
        owner = owners.setdefault(same, name)
        if owner != name:
            layer_ids[name] = layer_ids[owner]
            continue
        layer_ids[name] = layer_id
        pool = pools.setdefault((role, tuple(view.shape[1:]), view.dtype), {})
        if layer_id in pool:
            raise LayoutError(
                f"group {group_id}: two layers named like {name!r} have number {layer_id}"
            )
        pool[layer_id] = view
    names = _pool_names(list(pools))
    window = max((_window_tokens(spec) for spec in specs.values()), default=0)
    layout = CacheLayout.from_tensors(
        [PoolTensors(names[key], space, "page", views) for key, views in pools.items()],
        page_size=required(required(group, "kv_cache_spec"), "block_size"),
        num_layers=num_layers,
        window_tokens=window or None,
        identity=identity,
    )
    replicated = all(_is_replicated(spec) for spec in specs.values())
    return VllmGroup(group_id, space, layout, layer_ids, replicated)


def space_of_group(group_id: int, group: Any) -> str:
    """Return the index space of a group's layers, without their tensors.

    Raises:
        LayoutError: a kind of layer that is not described, or several in one group.
    """
    names = list(required(group, "layer_names")) or ["?"]  # none on this pipeline stage
    spaces = {_space(group_id, name, spec) for name, spec in _specs(group, names).items()}
    if len(spaces) != 1:
        raise LayoutError(f"group {group_id}: its layers are {sorted(spaces)}, wanted one kind")
    return spaces.pop()


def _specs(group: Any, names: Sequence[str]) -> dict[str, Any]:
    """Each layer's own spec; groups of one kind of layers in several sizes keep one per layer."""
    spec = required(group, "kv_cache_spec")
    if qualified_name(spec) != _UNIFORM:
        return dict.fromkeys(names, spec)
    by_name = required(spec, "kv_cache_specs")
    # A layer that shares another's cache has no spec of its own; its tensor is the other's.
    return {name: by_name[name] for name in names if name in by_name}


def _space(group_id: int, name: str, spec: Any) -> str:
    space = _SPACE_OF_SPEC.get(qualified_name(spec))
    if space is None:
        raise LayoutError(
            f"group {group_id} layer {name!r}: a {qualified_name(spec)}, wanted one of "
            f"{sorted(_SPACE_OF_SPEC)}"
        )
    return space


def _window_tokens(spec: Any) -> int:
    if _SPACE_OF_SPEC[qualified_name(spec)] != "swa":
        return 0
    # As `num_retained_tokens`, which vLLM has from 0.33 on: the last token needs no more before it.
    window, extra = required(spec, "sliding_window"), required(spec, "extra_retained_tokens")
    return max(1, int(window) - 1 + int(extra))


def _is_replicated(spec: Any) -> bool:
    if qualified_name(spec) in _LATENT:
        return True  # decode context parallelism shards it, and is part of the share
    return bool(getattr(spec, "tp_replicated", False))


def _pages(group_id: int, name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a registered tensor with the manager's blocks as rows.

    Backends may read a block as several smaller ones, which then are the tensor's rows.
    """
    where = f"group {group_id} layer {name!r}"
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        raise LayoutError(f"{where}: got {type(tensor).__name__}, wanted a tensor of blocks")
    if tensor.shape[0] % num_blocks or not tensor.numel():
        raise LayoutError(
            f"{where}: tensor has {tensor.shape[0]} rows, wanted a multiple of {num_blocks} blocks"
        )
    parts = tensor.shape[0] // num_blocks
    return tensor if parts == 1 else tensor.view(num_blocks, parts, *tensor.shape[1:])


@dataclass(frozen=True)
class _Extent:
    """Memory of one layer's tensor.

    Attributes:
        group_id: the layer's group.
        begin: address of the first byte.
        end: address behind the last byte.
        block_stride: bytes from one block to the next.
    """

    group_id: int
    begin: int
    end: int
    block_stride: int

    @classmethod
    def of(cls, group_id: int, tensor: torch.Tensor, num_blocks: int) -> "_Extent":
        """Measure a tensor of blocks."""
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size, begin = tensor.element_size(), tensor.data_ptr()
        stride = tensor.stride(0) * (len(tensor) // num_blocks) * size
        return cls(group_id, begin, begin + (last + 1) * size, stride)


def _check_overlay(extents: Sequence[_Extent]) -> None:
    """Refuse groups where a block of one lies over several of another's.

    vLLM keeps a block in one group at a time, so that groups may share memory block by block. With
    heads before blocks (LHBNC) and states, which have no heads, they share it in another way, and
    blocks of one request would be overwritten by another's.
    """
    seen: set[tuple[int, int, int]] = set()
    for one in extents:
        if (one.group_id, one.begin, one.block_stride) in seen:
            continue
        seen.add((one.group_id, one.begin, one.block_stride))
        for other in extents:
            if (
                one.group_id < other.group_id
                and one.begin < other.end
                and other.begin < one.end
                and one.block_stride != other.block_stride
            ):
                raise LayoutError(
                    f"groups {one.group_id} and {other.group_id} share memory in blocks of "
                    f"{one.block_stride} and {other.block_stride} bytes, wanted equal ones: choose "
                    "another kv_cache_layout"
                )


def _layer_id(name: str, first_layer: int) -> tuple[int, str]:
    """Return a layer's number in the stage, and its name without it."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        raise LayoutError(
            f"layer {name!r}: no number in its name, wanted one, as in model.layers.7"
        )
    return int(parts[at]) - first_layer, ".".join([*parts[:at], *parts[at + 1 :]])


def _pool_names(keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """Return pool names: the layers' role, and a number where one role has several geometries."""
    names, seen = {}, dict.fromkeys((key[0] for key in keys), 0)
    for key in keys:
        seen[key[0]] += 1
        names[key] = key[0] if seen[key[0]] == 1 else f"{key[0]}.{seen[key[0]]}"
    return names


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
