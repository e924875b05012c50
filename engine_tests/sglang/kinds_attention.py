"""Engines whose layers all attend to the whole prefix: MHA, MLA, DSA, with drafts and without."""

from typing import Any

import torch
from attention import P, dsa, mha, mla
from kind import NUM_PAGES, Kind, full
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.mem_cache import memory_pool as pools


def plain_mha(page_size: int = P, cls: Any = None, **changes: Any) -> Kind:
    """Full attention."""
    changes.setdefault("size", NUM_PAGES * page_size)
    pool = mha(cls, page_size=page_size, **changes)
    return full(pool, pool.get_kv_buffer, page_size)


def mha_kind() -> Kind:
    """Full attention."""
    return plain_mha()


def mha_page1_kind() -> Kind:
    """Full attention, every token a page."""
    return plain_mha(1)


def hnd_kind() -> Kind:
    """Full attention with head-major pages; the variable is set by the test."""
    kind = plain_mha()
    assert kind.kvcache.kv_cache_layout == "hnd"
    return kind


def asymmetric_kind() -> Kind:
    """K and V of different widths."""
    return plain_mha(head_dim=24, v_head_dim=16)


def stage_kind() -> Kind:
    """A pipeline stage that begins at layer 5."""
    kind = plain_mha(start_layer=5, end_layer=7)
    kind.read_layer = lambda layer: kind.kvcache.get_kv_buffer(layer + 5)
    return kind


def fp8_kind() -> Kind:
    """Eight-bit KV."""
    return plain_mha(dtype=torch.float8_e4m3fn)


def fp4_kind() -> Kind:
    """Four-bit KV and its scales."""
    return plain_mha(cls=pools.MHATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2, head_dim=64)


def nvfp4_kind() -> Kind:
    """NVFP4 KV, its scales, and their second copy."""
    method = NVFP4KVCacheMethod(num_layers=3, device="cpu", page_size=P, native_scale_layout=True)
    kind = plain_mha(head_dim=64, quant_method=method)
    kind.read_layer = kind.kvcache.get_raw_kv_buffer
    return kind


def mxfp8_kind() -> Kind:
    """MXFP8 KV and its scales."""
    return plain_mha(cls=pools.MHATokenToKVPoolMXFP8, dtype=torch.float8_e4m3fn, head_dim=64)


def latents(pool: Any, **more: Any) -> Kind:
    """Latent attention."""
    return full(pool, pool.get_key_buffer, **more)


def mla_kind() -> Kind:
    """Latents in bfloat16."""
    return latents(mla(size=NUM_PAGES * P))


def mla_fp8_kind() -> Kind:
    """Latents in eight bits."""
    return latents(mla(size=NUM_PAGES * P, dtype=torch.float8_e4m3fn))


def mla_fp4_kind() -> Kind:
    """Latents in four bits, and their scales."""
    pool = mla(pools.MLATokenToKVPoolFP4, dtype=torch.float4_e2m1fn_x2, size=NUM_PAGES * P)
    return latents(pool)


def big_dsa(layers: int = 3) -> Any:
    """Make a pool with index keys."""
    return dsa(layers, size=NUM_PAGES * P)


def dsa_kind() -> Kind:
    """Latents and index keys."""
    pool = big_dsa()
    kind = latents(pool)

    def read_layer(layer: int) -> object:
        return pool.get_index_k_with_scale_buffer(layer), pool.get_key_buffer(layer)

    kind.read_layer = read_layer
    return kind


def packed_drafts_kind() -> Kind:
    """Two layers of draft models that travel in the target's objects."""
    pool = big_dsa()
    return latents(pool, packed=(big_dsa(1), big_dsa(1)))


def mha_draft_kind() -> Kind:
    """Full attention, and a draft model's layer in the target's objects."""
    kind = plain_mha()
    kind.packed = (mha(layer_num=1, size=NUM_PAGES * P),)
    return kind


def sidecar_draft_kind() -> Kind:
    """A draft model of another kind than the target's."""
    draft = mha(layer_num=2, head_num=1, head_dim=8, size=NUM_PAGES * P)
    return latents(mla(size=NUM_PAGES * P), sidecar=(draft,))
