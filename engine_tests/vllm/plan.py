"""vLLM's own plans and tensors for a few models' layers, small, on a CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups, allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32
    from vllm.v1.core import kv_cache_utils as planning

from kvferry.linker.vllm_pools import VllmGroup, VllmPools, read_vllm_pools

BLOCK = 16
"""Tokens of the manager's blocks in most plans."""

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=40
)
STATE = MambaSpec(
    block_size=3 * BLOCK,
    shapes=((3, 64), (4, 16, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=3 * FULL.page_size_bytes,  # as long as a page of the attention layers
    mamba_cache_mode="align",
)
LATENT = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"
)
INDEX = MLAAttentionSpec(
    block_size=64,
    num_kv_heads=1,
    head_size=132,
    dtype=torch.uint8,
    cache_role=SparseCacheRole.INDEXER,
)


def llama(layers: int = 3) -> dict[str, KVCacheSpec]:
    """Full attention."""
    return {f"model.layers.{i}.self_attn.attn": FULL for i in range(layers)}


def gpt_oss(layers: int = 4) -> dict[str, KVCacheSpec]:
    """Sliding-window and full layers by turns."""
    return {f"model.layers.{i}.self_attn.attn": FULL if i % 2 else WINDOW for i in range(layers)}


def qwen3_next(layers: int = 8) -> dict[str, KVCacheSpec]:
    """Three layers with states, then one with full attention."""
    full = replace(FULL, block_size=3 * BLOCK)
    return {
        f"model.layers.{i}.self_attn.attn" if i % 4 == 3 else f"model.layers.{i}.linear_attn": (
            full if i % 4 == 3 else STATE
        )
        for i in range(layers)
    }


def deepseek_v32(layers: int = 2) -> dict[str, KVCacheSpec]:
    """Latents and index keys, in pages of two sizes."""
    latents = {f"model.layers.{i}.self_attn.attn": LATENT for i in range(layers)}
    return latents | {f"model.layers.{i}.self_attn.indexer.k_cache": INDEX for i in range(layers)}


MODELS = {
    "llama": llama,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "deepseek_v32": deepseek_v32,
}


@dataclass
class Plan:
    """What a connector gets from vLLM."""

    config: KVCacheConfig
    caches: dict[str, torch.Tensor]
    more: dict[str, Any] = field(default_factory=dict)

    def read(self, **changes: Any) -> VllmPools:
        """Read the plan."""
        return read_vllm_pools(self.config, self.caches, **{**self.more, **changes})

    def spec(self, group: VllmGroup, name: str) -> KVCacheSpec:
        """A layer's own spec."""
        spec = self.config.kv_cache_groups[group.group_id].kv_cache_spec
        by_name: Mapping[str, KVCacheSpec] = getattr(spec, "kv_cache_specs", {})
        return by_name.get(name, spec)


def make(
    specs: Mapping[str, KVCacheSpec],
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    *,
    num_blocks: int = 5,
    kernel_block_sizes: Sequence[int] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Plan:
    """Let vLLM group the layers, place them and make their tensors."""
    settings = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=num_blocks,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        model_config=SimpleNamespace(max_model_len=1024),
        kv_transfer_config=None,
        speculative_config=None,
        max_in_flight_tokens=64,
    )
    groups = planning.get_kv_cache_groups(settings, dict(specs))
    config = planning.get_kv_cache_config_from_groups(settings, groups, 1 << 20)
    caches = allocate_kv_cache(
        config,
        torch.device("cpu"),
        layout,
        None if kernel_block_sizes is None else list(kernel_block_sizes),
    )
    if shared:
        add_kv_sharing_layers_to_kv_cache_groups(dict(shared), config.kv_cache_groups)
        caches.update({name: caches[target] for name, target in shared.items()})
    return Plan(config, caches)


def bound(spec: KVCacheSpec, cache: torch.Tensor) -> list[torch.Tensor]:
    """What the model's layer reads: the registered tensor, unpacked by vLLM's own layer classes."""
    if isinstance(spec, MambaSpec):
        layer = SimpleNamespace(
            get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
        )
        MambaBase.bind_kv_cache(layer, cache)
        return list(layer.kv_cache)
    if isinstance(spec, MLAAttentionSpec):
        settings = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False))
        layer = SimpleNamespace(_vllm_config=settings)
        MLAAttention.bind_kv_cache(layer, cache)
        return [layer.kv_cache]
    layer = SimpleNamespace()
    AttentionLayerBase.bind_kv_cache(layer, cache)
    return [layer.kv_cache]


def has_layout(specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout) -> bool:
    """Whether vLLM can lay out pages of several sizes so."""
    sizes = {one.page_size_bytes for spec in specs.values() for one in iter_layer_specs(spec)}
    return len(sizes) == 1 or layout.is_block_compact


def is_served(specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout) -> bool:
    """Whether vLLM has such a layout, and keeps blocks of different groups apart in it."""
    has_states = any(isinstance(spec, MambaSpec) for spec in specs.values())
    return has_layout(specs, layout) and not (has_states and layout is KVCacheLayout.LHBNC)
