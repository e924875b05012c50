"""`CacheLayout`s from vLLM's `KVCacheConfig` and the tensors that it registers with a connector.

vLLM has one pool of blocks, and groups of layers that take blocks from it by turns, each with a
block table of its own. The groups lie over each other in memory, so each has a layout of its own
here, and an object per page key and group. Nothing of vLLM is imported: its objects come in. What
is not known is refused. Facts are those of vLLM 0.33.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.pool_tensors import Excluded, required
from kvferry.linker.vllm_overlay import Extent, check_overlay
from kvferry.linker.vllm_specs import is_replicated, space_of, specs_of, window_tokens
from kvferry.pools import PoolTensors

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
    extents: list[Extent] = []
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
        extents += [Extent.of(group_id, tensor, num_blocks) for tensor in tensors.values()]
        reason = "between the group's pages: padding, and room of groups with larger blocks"
        excluded.append(Excluded(f"group {group_id}", reason, rest))
    if unread:
        raise LayoutError(
            f"kv_caches: layers {sorted(unread)} belong to no group, wanted every registered "
            f"tensor in one"
        )
    check_overlay(extents)
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
    specs = specs_of(group, list(tensors))
    spaces = {name: space_of(group_id, name, spec) for name, spec in specs.items()}
    if not spaces:
        raise LayoutError(f"group {group_id}: no layer has a spec, wanted the cache's own layer")
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
    window = max((window_tokens(spec) for spec in specs.values()), default=0)
    layout = CacheLayout.from_tensors(
        [PoolTensors(names[key], space, "page", views) for key, views in pools.items()],
        page_size=required(required(group, "kv_cache_spec"), "block_size"),
        num_layers=num_layers,
        window_tokens=window or None,
        identity=identity,
    )
    replicated = all(is_replicated(spec) for spec in specs.values())
    return VllmGroup(group_id, space, layout, layer_ids, replicated)


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
