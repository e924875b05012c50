"""Engines with windows, states, or both, beside full attention; DeepSeek-V4."""

from collections.abc import Callable, Sequence
from typing import Any

import hybrids
import torch
from attention import P
from deepseek_v4 import deepseek_v4
from kind import NUM_PAGES, NUM_STATES, NUM_SWA_PAGES, Kind, full_allocator, windowed


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


def kda_dsa_kind() -> Kind:
    """Latents, index keys and states."""
    requests = state_requests(hybrids.kda_params([0, 1]))
    pool = hybrids.hybrid(
        requests,
        [2],
        size=NUM_PAGES * P,
        dtype=torch.float8_e4m3fn,
        use_mla=True,
        use_dsa=True,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        kv_cache_dim=656,
    )
    read_layer = read_states(requests, pool.get_index_k_with_scale_buffer, [0, 1])
    return Kind(pool, requests, full_allocator(pool), 3, read_layer)


def swa_asymmetric_kind() -> Kind:
    """Unequal K and V, and other numbers of heads in the sliding-window layers."""
    pool = swa_pool(
        head_num=1,
        head_dim=24,
        v_head_dim=16,
        swa_head_num=2,
        swa_head_dim=24,
        swa_v_head_dim=16,
    )
    return windowed(pool, pool.get_kv_buffer, 5, 128)


def swa_states_kind() -> Kind:
    """Full and sliding-window layers and states."""
    requests = state_requests(hybrids.gdn_params([5]))
    pool = swa_pool()
    read_layer = read_states(requests, pool.get_kv_buffer, [5])
    return windowed(pool, read_layer, 6, 128, requests=requests)


def big_deepseek_v4(ratios: Sequence[int]) -> Any:
    """Make DeepSeek-V4's pools."""
    return deepseek_v4(
        ratios,
        swa_size=NUM_SWA_PAGES * 256,
        c4_size=NUM_PAGES * 64,
        c128_size=NUM_PAGES * 2,
        c4_state_pool_size=NUM_SWA_PAGES * 8 + 8,
    )


def deepseek_v4_kind() -> Kind:
    """Window, compressed pages, index keys and compression states, in pages of 256 tokens."""
    ratios = [0, 4, 128, 4]
    pool = big_deepseek_v4(ratios)

    def read_layer(layer: int) -> object:
        read = [pool.get_swa_key_buffer_radix(layer)]
        if ratios[layer]:
            read.append(pool.get_extra_key_buffer(layer))
        if ratios[layer] == 4:
            read.append(pool.get_index_k_with_scale_buffer(layer))
        return read

    return windowed(pool, read_layer, 4, 128)


def deepseek_v4_draft_kind() -> Kind:
    """The same, and a draft layer's window in the target's objects."""
    kind = deepseek_v4_kind()
    kind.packed = (big_deepseek_v4([0]),)
    return kind
