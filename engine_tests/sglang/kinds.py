"""SGLang's pools with its own allocators, as an engine makes them: what a prefix tree needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hybrids
import torch
from attention import P, dsa, mha, mla
from deepseek_v4 import deepseek_v4
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

NUM_PAGES, NUM_SWA_PAGES, NUM_STATES = 16, 10, 12


@dataclass
class Kind:
    """Pools of one kind, of a whole engine.

    Attributes:
        kvcache: SGLang's pool.
        requests: SGLang's request pool.
        allocator: SGLang's allocator of the pool.
        num_layers: of the pipeline stage, up to the last one that owns anything.
        read_layer: reads a stage-local layer as a forward pass does, by the engine's accessors.
        page_size: of the prefix tree.
        window: sliding window in tokens.
        packed: draft pools that SGLang packs with the target's.
        sidecar: draft pools that SGLang keeps apart.
    """

    kvcache: Any
    requests: Any
    allocator: Any
    num_layers: int
    read_layer: Callable[[int], object]
    page_size: int = P
    window: int | None = None
    packed: Sequence[Any] = ()
    sidecar: Sequence[Any] = ()

    @property
    def has_states(self) -> bool:
        """Whether there are Mamba states."""
        return isinstance(self.requests, pools.HybridReqToTokenPool)


def plain_requests() -> Any:
    """Make a request pool without states."""
    return pools.ReqToTokenPool(8, 1024, "cpu", False)


def full_allocator(pool: Any, num_pages: int = NUM_PAGES, page_size: int = P) -> Any:
    """Make the allocator of a pool with one index space."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, torch.bfloat16, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(
        num_pages * page_size, page_size, torch.bfloat16, "cpu", pool, False
    )


def full(pool: Any, read_layer: Any, page_size: int = P, **more: Any) -> Kind:
    """A pool whose pages all have one index space."""
    allocator = full_allocator(pool, NUM_PAGES, page_size)
    return Kind(
        pool, plain_requests(), allocator, pool.layer_num, read_layer, page_size=page_size, **more
    )


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


def windowed(pool: Any, read_layer: Any, num_layers: int, window: int, **more: Any) -> Kind:
    """Pools with a sliding window."""
    page_size = pool.page_size
    allocator = SWATokenToKVPoolAllocator(
        NUM_PAGES * page_size,
        NUM_SWA_PAGES * page_size,
        page_size,
        torch.bfloat16,
        "cpu",
        pool,
        False,
    )
    arguments = {"requests": plain_requests(), "page_size": page_size, **more}
    return Kind(
        pool,
        allocator=allocator,
        num_layers=num_layers,
        read_layer=read_layer,
        window=window,
        **arguments,
    )


def swa_pool(page_size: int = P, **changes: Any) -> Any:
    """Make full and sliding-window layers."""
    return hybrids.swa(
        size=NUM_PAGES * page_size,
        size_swa=NUM_SWA_PAGES * page_size,
        page_size=page_size,
        **changes,
    )


def swa_kind(window: int = 100, page_size: int = P) -> Kind:
    """Full and sliding-window layers; a window of two pages, not of whole ones."""
    pool = swa_pool(page_size)
    return windowed(pool, pool.get_kv_buffer, 5, window)


def swa_page1_kind() -> Kind:
    """Full and sliding-window layers, every token a page."""
    return swa_kind(3, 1)


def read_states(requests: Any, attention: Any, linear: Sequence[int]) -> Callable[[int], object]:
    """Return how the layers of a hybrid are read."""

    def read_layer(layer: int) -> object:
        if layer in linear:
            return requests.mamba2_layer_cache(layer)
        return attention(layer)

    return read_layer


def state_requests(params: Any) -> Any:
    """Make a request pool with Mamba states."""
    return hybrids.req_pool(params, size=8, max_context_len=1024, mamba_size=NUM_STATES)


def gdn_kind(page_size: int = P) -> Kind:
    """Full attention and states."""
    requests = state_requests(hybrids.gdn_params([0, 1, 2, 4]))
    pool = hybrids.hybrid(requests, [3, 5], size=NUM_PAGES * page_size, page_size=page_size)
    read_layer = read_states(requests, pool.get_kv_buffer, [0, 1, 2, 4])
    allocator = full_allocator(pool, NUM_PAGES, page_size)
    return Kind(pool, requests, allocator, 6, read_layer, page_size=page_size)


def gdn_page1_kind() -> Kind:
    """Full attention and states, every token a page."""
    return gdn_kind(1)


def empty_layers_kind() -> Kind:
    """Full attention and states, and layers between them that own nothing."""
    requests = state_requests(hybrids.gdn_params([0]))
    pool = hybrids.hybrid(requests, [3], size=NUM_PAGES * P)
    wait_until = pool._wait_for_layer

    def read_layer(layer: int) -> object:
        attention = pool.get_kv_buffer if layer == 3 else wait_until
        return read_states(requests, attention, [0])(layer)

    return Kind(pool, requests, full_allocator(pool), 4, read_layer)


def kda_mla_kind() -> Kind:
    """Latents and states."""
    requests = state_requests(hybrids.kda_params([0, 1, 2]))
    pool = hybrids.hybrid(
        requests, [3], size=NUM_PAGES * P, use_mla=True, kv_lora_rank=512, qk_rope_head_dim=64
    )
    read_layer = read_states(requests, pool.get_key_buffer, [0, 1, 2])
    return Kind(pool, requests, full_allocator(pool), 4, read_layer)


def swa_states_kind() -> Kind:
    """Full and sliding-window layers and states."""
    requests = state_requests(hybrids.gdn_params([5]))
    pool = swa_pool()
    read_layer = read_states(requests, pool.get_kv_buffer, [5])
    return windowed(pool, read_layer, 6, 128, requests=requests)


def deepseek_v4_kind() -> Kind:
    """Window, compressed pages, index keys and compression states, in pages of 256 tokens."""
    ratios = [0, 4, 128, 4]
    pool = deepseek_v4(
        ratios,
        swa_size=NUM_SWA_PAGES * 256,
        c4_size=NUM_PAGES * 64,
        c128_size=NUM_PAGES * 2,
        c4_state_pool_size=NUM_SWA_PAGES * 8 + 8,
    )

    def read_layer(layer: int) -> object:
        read = [pool.get_swa_key_buffer_radix(layer)]
        if ratios[layer]:
            read.append(pool.get_extra_key_buffer(layer))
        if ratios[layer] == 4:
            read.append(pool.get_index_k_with_scale_buffer(layer))
        return read

    return windowed(pool, read_layer, 4, 128)


KINDS: dict[str, Callable[[], Kind]] = {
    name.removesuffix("_kind"): function
    for name, function in list(globals().items())
    if name.endswith("_kind")
}
