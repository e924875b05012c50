"""SGLang's own pools of several kinds, small, and the engine's own views of their pages."""

from collections.abc import Sequence
from typing import Any

import torch
from attention import Case, P, mha_views, mla_views, rows
from prove import PageView
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool


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
