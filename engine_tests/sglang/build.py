"""SGLang's own pools, small, and the engine's own views of their pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from prove import PageView
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry.linker.sglang_pools import SGLangPools, read_sglang_pools

P = 64
"""Page size of most cases."""


@dataclass
class Case:
    """A pool, and the views of its pages that the engine's accessors give.

    Attributes:
        kvcache: SGLang's pool.
        views: pool name and stage-local layer to view.
        page_size: of the prefix tree.
        req_to_token_pool: SGLang's request pool, where it has states.
        drafts: pools of draft models.
        rest: bytes of the pools' memory that no page has, by the sizes chosen.
    """

    kvcache: Any
    views: dict[tuple[str, int], PageView]
    page_size: int = P
    req_to_token_pool: Any = None
    drafts: Sequence[Any] = ()
    rest: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def read(self, **changes: Any) -> SGLangPools:
        """Read the case's pools."""
        arguments: dict[str, Any] = {
            "page_size": self.page_size,
            "req_to_token_pool": self.req_to_token_pool,
            "draft_pools": self.drafts,
            **self.more,
        }
        return read_sglang_pools(self.kvcache, **{**arguments, **changes})


def tokens(tensor: torch.Tensor, page_size: int = P) -> PageView:
    """View of pages in a tensor whose rows are slots."""
    return lambda page_id: tensor[page_id * page_size : (page_id + 1) * page_size]


def rows(tensor: torch.Tensor) -> PageView:
    """View of pages in a tensor whose rows are pages."""
    return lambda page_id: tensor[page_id]


def rings(state: Any, page_size: int) -> PageView:
    """View of the state rows that SGLang's own translation gives for a window page's slots."""

    def view(page_id: int) -> torch.Tensor:
        slots = torch.arange(page_id * page_size, (page_id + 1) * page_size)
        ring = state.translate_from_swa_loc_to_state_loc(slots).unique()
        first, last = int(ring[0]), int(ring[-1])
        assert ring.tolist() == list(range(first, last + 1))
        return state.kv_score_buffer.kv_score[first : last + 1]

    return view


def mha(cls: Callable[..., Any] | None = None, **changes: Any) -> Any:
    """Make an MHA pool."""
    arguments = {
        "size": 4 * P,
        "page_size": P,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 16,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
    }
    return (cls or pools.MHATokenToKVPool)(**{**arguments, **changes})


def mha_views(
    pool: Any, layers: Mapping[int, int], prefix: str = "", view: Any = tokens
) -> dict[tuple[str, int], PageView]:
    """Views of K and V by the pool's accessors; `layers` is stage-local id to SGLang's id."""
    views = {}
    for local, layer_id in layers.items():
        views[f"{prefix}k", local] = view(pool.get_key_buffer(layer_id))
        views[f"{prefix}v", local] = view(pool.get_value_buffer(layer_id))
    return views


def same(number: int) -> dict[int, int]:
    """Layers whose two ids agree."""
    return {layer_id: layer_id for layer_id in range(number)}


def mha_case() -> Case:
    """K and V as halves of one allocation."""
    pool = mha()
    return Case(pool, mha_views(pool, same(3)))


def mha_uneven_case() -> Case:
    """Slots that do not fill whole pages: some rows belong to no page."""
    pool = mha(size=250)
    kept = (250 + P) // P * P
    padded = -(-(250 + P) // P) * P
    return Case(pool, mha_views(pool, same(3)), rest=3 * 2 * (padded - kept) * 2 * 16 * 2)


def mha_stage_case() -> Case:
    """A pipeline stage that begins at layer 5."""
    pool = mha(start_layer=5, end_layer=7)
    return Case(pool, mha_views(pool, {0: 5, 1: 6, 2: 7}))


def mha_page1_case() -> Case:
    """Every slot is a page."""
    pool = mha(size=6, page_size=1)
    return Case(pool, mha_views(pool, same(3), view=rows), page_size=1)


def asymmetric_case() -> Case:
    """K and V of different widths."""
    pool = mha(head_dim=24, v_head_dim=16)
    return Case(pool, mha_views(pool, same(3)))


def fp8_case() -> Case:
    """Eight-bit KV, which SGLang keeps as raw bytes."""
    pool = mha(dtype=torch.float8_e4m3fn)
    return Case(pool, mha_views(pool, same(3)))


def hnd_case() -> Case:
    """Pages that are head-major; the variable is set by the test."""
    pool = mha()
    assert pool.kv_cache_layout == "hnd"
    return Case(pool, mha_views(pool, same(3), view=rows))


def raw_views(pool: Any, names: Mapping[str, str], view: Any = tokens) -> dict[Any, PageView]:
    """Views of lists of tensors, where the accessors would dequantise them."""
    return {
        (name, layer_id): view(tensor)
        for name, attribute in names.items()
        for layer_id, tensor in enumerate(getattr(pool, attribute))
    }


SCALED = {
    "k": "k_buffer",
    "v": "v_buffer",
    "k_scale": "k_scale_buffer",
    "v_scale": "v_scale_buffer",
}


def fp4_case() -> Case:
    """Four-bit KV and its scales."""
    pool = mha(pools.MHATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2, head_dim=64)
    return Case(pool, raw_views(pool, SCALED))


def nvfp4_case(native: bool = False) -> Case:
    """NVFP4 KV, its scales, and workspace that all layers share."""
    method = NVFP4KVCacheMethod(num_layers=3, device="cpu", page_size=P, native_scale_layout=native)
    pool = mha(head_dim=64, quant_method=method)
    views = raw_views(pool, SCALED)
    if native:
        names = {"k_native_scale": "native_k_scale_buffer"}
        names["v_native_scale"] = "native_v_scale_buffer"
        views |= raw_views(pool, names, rows)
    return Case(pool, views)


def nvfp4_native_case() -> Case:
    """NVFP4 KV whose scales are kept a second time, page-wise."""
    return nvfp4_case(native=True)


def mxfp8_case(page_size: int = P) -> Case:
    """MXFP8 KV and its scales, token by token."""
    pool = mha(
        pools.MHATokenToKVPoolMXFP8,
        dtype=torch.float8_e4m3fn,
        head_dim=64,
        page_size=page_size,
        size=4 * page_size,
    )
    views = {}
    for layer_id in range(3):
        by_name = dict(zip("kv", pool.get_kv_buffer(layer_id), strict=True))
        scales = zip(("k_scale", "v_scale"), pool.get_kv_scale_buffer(layer_id), strict=True)
        for name, tensor in [*by_name.items(), *scales]:
            paged = name.endswith("scale") and page_size == 128
            views[name, layer_id] = rows(tensor) if paged else tokens(tensor, page_size)
    return Case(pool, views, page_size=page_size)


def mxfp8_interleaved_case() -> Case:
    """MXFP8 KV with pages of 128: scales in the order of the kernel that reads them."""
    return mxfp8_case(128)


def mla(cls: Any = None, layers: int = 3, **changes: Any) -> Any:
    """Make an MLA pool."""
    arguments = {
        "size": 4 * P,
        "page_size": P,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "layer_num": layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return (cls or pools.MLATokenToKVPool)(**{**arguments, **changes})


def mla_views(pool: Any, layers: Mapping[int, int], prefix: str = "") -> dict[Any, PageView]:
    """Views of the latents."""
    return {
        (f"{prefix}kv", local): tokens(pool.get_key_buffer(layer_id))
        for local, layer_id in layers.items()
    }


def mla_case() -> Case:
    """Latents in bfloat16."""
    pool = mla()
    return Case(pool, mla_views(pool, same(3)))


def mla_fp8_case() -> Case:
    """Latents in eight bits, without scales."""
    pool = mla(dtype=torch.float8_e4m3fn)
    return Case(pool, mla_views(pool, same(3)))


def mla_fp4_case() -> Case:
    """Latents in four bits, and their scales."""
    pool = mla(pools.MLATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2)
    return Case(pool, raw_views(pool, {"kv": "kv_buffer", "kv_scale": "kv_scale_buffer"}))


def dsa(layers: int = 3, **changes: Any) -> Any:
    """Make a pool with index keys."""
    return mla(
        pools.DSATokenToKVPool,
        layers,
        dtype=torch.float8_e4m3fn,
        index_head_dim=128,
        kv_cache_dim=656,
        **changes,
    )


def dsa_views(pool: Any, layers: Mapping[int, int], prefix: str = "") -> dict[Any, PageView]:
    """Views of latents and index keys."""
    views = mla_views(pool, layers, prefix)
    for local, layer_id in layers.items():
        index = pool.get_index_k_with_scale_buffer(layer_id)
        if len(index):
            views[f"{prefix}index_k", local] = rows(index)
    return views


def dsa_case() -> Case:
    """Latents and index keys."""
    pool = dsa()
    return Case(pool, dsa_views(pool, same(3)))


def dsa_elided_case() -> Case:
    """A layer that reuses another layer's choice owns no index keys."""
    pool = dsa(skip_topk_layers=[False, True, False])
    return Case(pool, dsa_views(pool, same(3)))


def dsa_draft_case() -> Case:
    """Two draft models' layers ride on the target's."""
    pool, drafts = dsa(), (dsa(1), dsa(1))
    views = dsa_views(pool, same(3))
    for depth, draft in enumerate(drafts):
        views |= dsa_views(draft, {depth: 0}, "draft_")
    return Case(pool, views, drafts=drafts)


def mha_draft_case() -> Case:
    """A draft model with another head width rides on the target's layers."""
    pool, draft = mha(), mha(layer_num=2, head_num=1, head_dim=8)
    views = mha_views(pool, same(3)) | mha_views(draft, same(2), "draft_")
    return Case(pool, views, drafts=(draft,))


def swa(cls: Any = None, **changes: Any) -> Any:
    """Make a pool with sliding-window layers."""
    arguments = {
        "size": 4 * P,
        "size_swa": 2 * P,
        "page_size": P,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 16,
        "swa_attention_layer_ids": [0, 2, 3],
        "full_attention_layer_ids": [1, 4],
        "device": "cpu",
        "enable_alt_stream": False,
    }
    return (cls or SWAKVPool)(**{**arguments, **changes})


def swa_views(pool: Any) -> dict[Any, PageView]:
    """Views of both kinds of layers."""
    views: dict[Any, PageView] = {}
    for layer_id, (_, is_swa) in pool.layers_mapping.items():
        views |= mha_views(pool, {layer_id: layer_id}, "swa_" if is_swa else "")
    return views


def swa_case() -> Case:
    """Full and sliding-window layers, each with page ids of its own."""
    pool = swa()
    pool.register_mapping(torch.zeros(5 * P + 1, dtype=torch.int64))
    return Case(pool, swa_views(pool), more={"window_tokens": 100})


def swa_asymmetric_case() -> Case:
    """Unequal K and V, and other numbers of heads in the sliding-window layers."""
    pool = swa(
        head_num=1,
        head_dim=24,
        v_head_dim=16,
        swa_head_num=2,
        swa_head_dim=24,
        swa_v_head_dim=16,
    )
    return Case(pool, swa_views(pool), more={"window_tokens": 128})


def gdn_params(layers: Sequence[int], **changes: Any) -> Mamba2CacheParams:
    """States of a gated delta net."""
    shape = {
        "tp_world_size": 1,
        "intermediate_size": 64,
        "n_groups": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
    }
    return Mamba2CacheParams(
        shape=Mamba2StateShape.create(**{**shape, **changes}), layers=list(layers)
    )


def kda_params(layers: Sequence[int], heads: int = 2, dim: int = 16) -> KimiLinearCacheParams:
    """States of Kimi's delta attention."""
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=heads, head_dim=dim)
    return KimiLinearCacheParams(shape=shape, layers=list(layers))


def req_pool(params: Any, **changes: Any) -> Any:
    """Make a request pool with Mamba states."""
    arguments = {
        "size": 3,
        "mamba_size": 5,
        "mamba_spec_state_size": 2,
        "max_context_len": 64,
        "device": "cpu",
        "enable_memory_saver": False,
        "cache_params": params,
        "mamba_layer_ids": params.layers,
        "enable_mamba_extra_buffer": True,
    }
    return pools.HybridReqToTokenPool(**{**arguments, **changes})


def hybrid(requests: Any, full: Sequence[int], **changes: Any) -> Any:
    """Make a pool of full-attention layers between linear ones."""
    arguments = {
        "size": 4 * P,
        "dtype": torch.bfloat16,
        "page_size": P,
        "head_num": 2,
        "head_dim": 16,
        "full_attention_layer_ids": list(full),
        "device": "cpu",
        "mamba_pool": requests.mamba_pool,
    }
    return pools.HybridLinearKVPool(**{**arguments, **changes})


def state_views(requests: Any, start: int = 0) -> dict[Any, PageView]:
    """Views of the states by the engine's per-layer accessor."""
    views = {}
    for layer_id in requests.mamba_map:
        state = requests.mamba2_layer_cache(layer_id)
        views["conv", layer_id - start] = rows(state.conv[0])
        views["ssm", layer_id - start] = rows(state.temporal)
    return views


def gdn_case(**changes: Any) -> Case:
    """Full attention and states."""
    requests = req_pool(gdn_params([0, 1, 2, 4]), **changes)
    pool = hybrid(requests, [3, 5])
    views = mha_views(pool, {3: 3, 5: 5}) | state_views(requests)
    return Case(pool, views, req_to_token_pool=requests)


def gdn_envelope_case() -> Case:
    """States of all layers side by side in each slot."""
    return gdn_case(mamba_envelope_layout=True)


def gdn_draft_case() -> Case:
    """States with the scratch of speculative decoding, which does not travel."""
    return gdn_case(speculative_num_draft_tokens=3)


def gdn_stage_case() -> Case:
    """A pipeline stage that begins at layer 4."""
    requests = req_pool(gdn_params([4, 5, 6]), start_layer=4)
    pool = hybrid(requests, [7], start_layer=4)
    views = mha_views(pool, {3: 7}) | state_views(requests, 4)
    return Case(pool, views, req_to_token_pool=requests)


def kda_mla_case() -> Case:
    """MLA latents and states."""
    requests = req_pool(kda_params([0, 1, 2]))
    pool = hybrid(requests, [3], use_mla=True, kv_lora_rank=512, qk_rope_head_dim=64)
    views = mla_views(pool, {3: 3}) | state_views(requests)
    return Case(pool, views, req_to_token_pool=requests)


def kda_dsa_case() -> Case:
    """Latents, index keys and states."""
    requests = req_pool(kda_params([0, 1]))
    pool = hybrid(
        requests,
        [2],
        dtype=torch.float8_e4m3fn,
        use_mla=True,
        use_dsa=True,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        kv_cache_dim=656,
    )
    views = mla_views(pool, {2: 2}) | state_views(requests)
    views["index_k", 2] = rows(pool.get_index_k_with_scale_buffer(2))
    return Case(pool, views, req_to_token_pool=requests)


def swa_states_case() -> Case:
    """Full and sliding-window layers and states."""
    requests = req_pool(gdn_params([5]))
    pool = swa()
    views = swa_views(pool) | state_views(requests)
    return Case(pool, views, req_to_token_pool=requests, more={"window_tokens": 128})


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


def layer(layer_id: int) -> Any:
    """What SGLang's `set_kv_buffer` takes as the layer."""
    return SimpleNamespace(layer_id=layer_id, is_cross_attention=False)


CASES: dict[str, Callable[[], Case]] = {
    name.removesuffix("_case"): function
    for name, function in list(globals().items())
    if name.endswith("_case") and callable(function)
}
