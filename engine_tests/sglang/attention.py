"""SGLang's own MHA, MLA and DSA pools, small, and the engine's own views of their pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from prove import PageView
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.mem_cache import memory_pool as pools

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


def layer(layer_id: int) -> Any:
    """What SGLang's `set_kv_buffer` takes as the layer."""
    return SimpleNamespace(layer_id=layer_id, is_cross_attention=False)
