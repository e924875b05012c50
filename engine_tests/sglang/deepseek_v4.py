"""SGLang's own DeepSeek-V4 pools, small, and the engine's own views of their pages."""

from collections.abc import Sequence
from typing import Any

import torch
from attention import Case, rows
from prove import PageView
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool


def rings(state: Any, page_size: int) -> PageView:
    """View of the state rows that SGLang's own translation gives for a window page's slots."""

    def view(page_id: int) -> torch.Tensor:
        slots = torch.arange(page_id * page_size, (page_id + 1) * page_size)
        ring = state.translate_from_swa_loc_to_state_loc(slots).unique()
        first, last = int(ring[0]), int(ring[-1])
        assert ring.tolist() == list(range(first, last + 1))
        return state.kv_score_buffer.kv_score[first : last + 1]

    return view


def deepseek_v4(ratios: Sequence[int], num_pages: int = 3, **changes: Any) -> Any:
    """Make DeepSeek-V4's pools for `num_pages` pages of 256 tokens."""
    arguments = {
        "max_num_reqs": 2,
        "swa_size": num_pages * 256,
        "c4_size": num_pages * 64,
        "c128_size": num_pages * 2,
        "c4_state_pool_size": num_pages * 8 + 8,
        "c128_state_pool_size": 256,
        "page_size": 256,
        "swa_page_size": 256,
        "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "indexer_head_dim": 128,
        "layer_num": len(ratios),
        "device": "cpu",
        "enable_memory_saver": False,
        "compression_ratios": list(ratios),
    }
    return DeepSeekV4TokenToKVPool(**{**arguments, **changes})


def deepseek_v4_views(pool: Any, prefix: str = "", first: int = 0) -> dict[Any, PageView]:
    """Views of the window, the compressed pages, their index keys, and the states' rings."""
    views: dict[Any, PageView] = {}
    for layer_id, item in enumerate(pool.layer_mapping):
        local, ratio = layer_id + first, item.compress_ratio
        views[f"{prefix}swa", local] = rows(pool.swa_kv_pool.get_key_buffer(layer_id))
        if ratio:
            kept = item.compress_kv_pool.get_key_buffer(item.compress_layer_id)
            views[f"{prefix}c{ratio}", local] = rows(kept)
        if ratio == 4:
            index = pool.c4_indexer_kv_pool.get_index_k_with_scale_buffer(item.compress_layer_id)
            views[f"{prefix}c4_index", local] = rows(index)
            state = pool.compress_state_pools[layer_id]
            views[f"{prefix}c4_state", local] = rings(state, 256)
            state = pool.indexer_compress_state_pools[layer_id]
            views[f"{prefix}c4_index_state", local] = rings(state, 256)
    return views


def deepseek_v4_rest(pool: Any) -> int:
    """Bytes that no page has: states behind the last ring, and compressed pages made in excess.

    SGLang rounds each compressed pool up by a page of the uncompressed size.
    """
    compressed = [*pool.kv_pools.values(), *pool.index_pools.values()]
    by_layer = [
        tensor
        for kept in compressed
        for tensor in getattr(kept, "kv_buffer", None) or kept.index_k_with_scale_buffer
    ]
    num_pages = min((len(tensor) for tensor in by_layer), default=0)
    excess = sum(tensor[num_pages:].nbytes for tensor in by_layer)
    states = (*pool.compress_state_pools, *pool.indexer_compress_state_pools)
    tensors = [
        (state.kv_score_buffer.kv_score, state.ring_size)
        for state in states
        if state is not None and state.ratio == 4
    ]
    swa_pages = min(len(tensor) for tensor in pool.swa_kv_pool.kv_buffer)
    return excess + sum(tensor[swa_pages * ring :].nbytes for tensor, ring in tensors)


def deepseek_v4_case() -> Case:
    """Window, compressed pages and states."""
    pool = deepseek_v4([0, 4, 128, 4])
    return Case(pool, deepseek_v4_views(pool), page_size=256, rest=deepseek_v4_rest(pool))


def deepseek_v4_draft_case() -> Case:
    """A draft layer's window rides on the target's first layer."""
    pool, draft = deepseek_v4([0, 4, 128]), deepseek_v4([0])
    views = deepseek_v4_views(pool) | deepseek_v4_views(draft, "draft_")
    return Case(pool, views, page_size=256, drafts=(draft,), rest=deepseek_v4_rest(pool))
