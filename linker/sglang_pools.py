"""A `CacheLayout` from SGLang's own pools, and how SGLang's slots become page ids.

The adapter calls `read_cache_params` in its constructor, where every pool exists, and keeps the
answer. Nothing of SGLang is imported here: its objects come in, and are recognised by the exact
names of their classes. What is not known is refused. Facts are those of SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.pool_tensors import (
    Excluded,
    held_tensors,
    qualified_name,
    required,
    undescribed,
)
from kvferry.linker.sglang_families import HYBRID_LINEAR, read_drafts, read_target
from kvferry.linker.sglang_layers import read_mamba
from kvferry.linker.sglang_reading import Reading

TRANSFERS = {"full": "kv", "swa": "swa", "state": "mamba"}
"""Index space: the name of SGLang's `PoolTransfer` whose `device_indices` address it."""

_TABLES = "the engine's own addresses and index tables, made anew by each process"
_SCRATCH = "scratch of a running step; no page refers to it"
_WEIGHTS = "scales of the model's weights, loaded with them"
_STEP = "rollback of one verify step, gone before its tokens are kept"
_RECORDS = "records since the last flush; SGLang keeps flushed states only, and resets the count"

NOT_CONTENT: Mapping[tuple[str, str], str] = {
    **{
        (owner, attribute): _TABLES
        for owner, attributes in {
            "MHATokenToKVPool": ("k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides"),
            "MHATokenToKVPoolFP4": ("k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides"),
            "MHATokenToKVPoolMXFP8": ("k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides"),
            "MLATokenToKVPool": ("data_ptrs",),
            "MLATokenToKVPoolFP4": ("data_ptrs",),
            "DSATokenToKVPool": ("data_ptrs",),
            "SWAKVPool": ("full_to_swa_index_mapping",),
            "DeepSeekV4TokenToKVPool": ("full_to_swa_index_mapping",),
            "HybridReqToTokenPool": (
                "req_to_token",
                "req_generation",
                "req_index_to_mamba_index_mapping",
                "req_index_to_mamba_ping_pong_track_buffer_mapping",
            ),
            "MambaSlotAllocator": ("free_slots",),
        }.items()
        for attribute in attributes
    },
    ("MHATokenToKVPool", "dq_k_buffer"): _SCRATCH,
    ("MHATokenToKVPool", "dq_v_buffer"): _SCRATCH,
    ("NVFP4KVCacheMethod", "k_scales_gpu"): _WEIGHTS,
    ("NVFP4KVCacheMethod", "v_scales_gpu"): _WEIGHTS,
    ("MambaPool", "_intermediate_conv_window_phys"): _STEP,
    ("MambaPool", "replayssm_write_pos"): _RECORDS,
    ("MambaPool", "replayssm_spec_write_pos"): _RECORDS,
    ("MambaPool", "replayssm_cache_base"): _RECORDS,
    ("MambaPool", "replayssm_is_flush"): _RECORDS,
    ("MambaPool.SpeculativeState", "intermediate_ssm"): _STEP,
    ("MambaPool.SpeculativeState", "intermediate_conv_window"): _STEP,
    **{
        (owner, f"replayssm_{name}"): _RECORDS
        for owner in ("MambaPool.State", "MambaPool.SpeculativeState")
        for name in ("d", "k", "g", "rawv", "rawk", "beta")
    },
}
"""By class and attribute: tensors that do not travel, and why a page is whole without them."""


@dataclass(frozen=True)
class SGLangPools:
    """SGLang's pools as kvferry sees them.

    Attributes:
        layout: bound to the pools' tensors.
        slots_per_page: by index space, how many of SGLang's slots a page id stands for: the page
            size, or 1 for state slots. Page id 0 is SGLang's padding page and is never saved.
        replicated: index spaces whose objects are equal on every tensor-parallel rank, so that
            one rank's suffices.
        excluded: tensors that do not travel, with the reasons.
    """

    layout: CacheLayout
    slots_per_page: Mapping[str, int]
    replicated: frozenset[str]
    excluded: tuple[Excluded, ...]

    def page_ids(self, space: str, slots: torch.Tensor) -> torch.Tensor:
        """Return the page ids of slots, on the slots' device, without waiting for it.

        Args:
            space: the index space; `TRANSFERS` names the transfer whose slots are meant. Slots of
                `swa` are those of the sliding-window pool, not of the full one.
            slots: int64 `[num_pages * slots_per_page]`, whole pages one after the other, each in
                ascending order, as SGLang's paged allocator hands them out.

        Raises:
            LayoutError: no such space, or a number of slots that is not whole pages.
        """
        per_page = self._per_page(space, slots)
        return slots if per_page == 1 else slots[::per_page] // per_page

    def check_slots(self, space: str, slots: torch.Tensor) -> None:
        """Check that slots are whole pages in order; waits for the device, so not for every step.

        Raises:
            LayoutError: a page is torn, or lies outside the pools.
        """
        per_page = self._per_page(space, slots)
        pages = slots.reshape(-1, per_page).cpu()
        wanted = pages[:, :1] // per_page * per_page + torch.arange(per_page)
        if not torch.equal(pages, wanted):
            torn = int((pages != wanted).any(dim=1).nonzero()[0])
            raise LayoutError(
                f"index space {space!r}: page {torn} of the slots is {pages[torn].tolist()}, "
                f"wanted {wanted[torn].tolist()}"
            )
        num_pages = self.layout.num_pages[space]
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages * per_page:
            raise LayoutError(
                f"index space {space!r}: slots {int(pages.min())} .. {int(pages.max())}, wanted "
                f"0 .. {num_pages * per_page - 1}"
            )

    def _per_page(self, space: str, slots: torch.Tensor) -> int:
        per_page = self.slots_per_page.get(space)
        if per_page is None:
            raise LayoutError(f"space is {space!r}, wanted one of {sorted(self.slots_per_page)}")
        if len(slots) % per_page:
            raise LayoutError(
                f"index space {space!r}: got {len(slots)} slots, wanted pages of {per_page}"
            )
        return per_page


def read_cache_params(
    params: Any,
    *,
    num_layers: int | None = None,
    identity: ModelIdentity | None = None,
    dcp_size: int = 1,
) -> SGLangPools:
    """Read the pools that SGLang's `CacheInitParams` lead to; see `read_sglang_pools`.

    Raises:
        LayoutError: as `read_sglang_pools`; a draft model with Mamba states.
    """
    if getattr(params, "mtp_draft_mamba_pools", ()):
        raise LayoutError("mtp_draft_mamba_pools: Mamba states of draft models are not described")
    return read_sglang_pools(
        required(params, "token_to_kv_pool_allocator").get_kvcache(),
        page_size=required(params, "page_size"),
        req_to_token_pool=required(params, "req_to_token_pool"),
        draft_pools=(
            *getattr(params, "mtp_draft_device_pools", ()),
            *getattr(params, "sidecar_draft_device_pools", ()),
        ),
        window_tokens=getattr(params, "swa_retain_window", None),
        num_layers=num_layers,
        identity=identity,
        dcp_size=dcp_size,
    )


def read_sglang_pools(
    kvcache: Any,
    *,
    page_size: int,
    req_to_token_pool: Any = None,
    draft_pools: Sequence[Any] = (),
    window_tokens: int | None = None,
    num_layers: int | None = None,
    identity: ModelIdentity | None = None,
    dcp_size: int = 1,
) -> SGLangPools:
    """Build a bound layout from SGLang's pools, and see that no tensor of theirs is left out.

    Args:
        kvcache: what `token_to_kv_pool_allocator.get_kvcache()` returns.
        page_size: the prefix tree's, `CacheInitParams.page_size`.
        req_to_token_pool: needed where there are Mamba states, which hang on it.
        draft_pools: pools of draft models that share the target's slots, in order. Depth n of the
            drafts travels with the target's layer n.
        window_tokens: the sliding window, where `kvcache` has one and does not know it.
        num_layers: layers of this pipeline stage; by default up to the last one with a buffer.
        identity: who writes these bytes. Its `kv_dtype` matters: fp8 pools are raw bytes.
        dcp_size: ranks of decode context parallelism: the tree's pages are so many times as long as
            the pools', since each rank keeps every dcp-th token of a page.

    Raises:
        LayoutError: an unknown pool class or variant, a page size that differs, a tensor that
            nobody described, or pools smaller than the page ids in use; names class, attribute
            and layer.
    """
    if dcp_size > 1:
        _check_dcp(kvcache, draft_pools, page_size, dcp_size)
    tree_page_size, page_size = page_size, page_size // dcp_size
    reading = read_target(kvcache, page_size)
    mamba_pool = getattr(req_to_token_pool, "mamba_pool", None)
    if mamba_pool is not None:
        reading.join(read_mamba(mamba_pool, required(kvcache, "start_layer")))
    if qualified_name(kvcache) == HYBRID_LINEAR and mamba_pool is not kvcache.mamba_pool:
        raise LayoutError(
            "HybridLinearKVPool: its Mamba pool is not that of req_to_token_pool, wanted the "
            "request pool it was made with: side states hang on it"
        )
    last = max(layer_id for pool in reading.pools for layer_id in pool.tensors)
    reading.join(read_drafts(draft_pools, page_size))
    layout = CacheLayout.from_tensors(
        reading.pools,
        page_size=page_size,
        num_layers=last + 1 if num_layers is None else num_layers,
        window_tokens=window_tokens or reading.window_tokens,
        identity=identity,
    )
    _check_page_ids(layout, reading)
    described = [tensor for pool in reading.pools for tensor in pool.tensors.values()]
    roots = [kvcache, *draft_pools, *([] if mamba_pool is None else [req_to_token_pool])]
    left_out = undescribed(
        held_tensors(roots, ("sglang",)),
        [*described, *reading.covers],
        NOT_CONTENT,
        reading.kept_back,
    )
    shared = {pool.space for pool in reading.pools if pool.name not in reading.replicated}
    return SGLangPools(
        layout,
        {space: 1 if space == "state" else tree_page_size for space in layout.spaces},
        frozenset(set(layout.spaces) - shared),
        (*reading.excluded, *left_out),
    )


def _check_dcp(kvcache: Any, draft_pools: Sequence[Any], page_size: int, dcp_size: int) -> None:
    """Refuse what does not keep row `slot // dcp_size` of every slot of its rank.

    A slot s is token s of the pool that all ranks make up together: rank s % dcp_size has it, in
    row s // dcp_size. So page ids stay what they are: slot // the tree's page size.
    """
    known = ("MHATokenToKVPool", "MLATokenToKVPool")
    name = type(kvcache).__qualname__
    if name not in known or draft_pools or page_size % dcp_size:
        raise LayoutError(
            f"decode context parallelism of {dcp_size} over a {name} with {len(draft_pools)} draft "
            f"pools and pages of {page_size} tokens, wanted one of {known}, no drafts, and pages "
            "that divide evenly"
        )


def _check_page_ids(layout: CacheLayout, reading: Reading) -> None:
    for space, buffers in layout.buffers.items():
        for buffer in buffers:
            if buffer.num_pages < reading.page_ids[space]:
                raise LayoutError(
                    f"pool {buffer.pool.name!r} layer {buffer.layer_id}: has {buffer.num_pages} "
                    f"pages, wanted {reading.page_ids[space]}, as many as SGLang hands out"
                )
