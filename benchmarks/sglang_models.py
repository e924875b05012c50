"""SGLang's own pools of whole models, with all their layers and as many pages as are asked for.

Needs SGLang on a CPU: `standins.install()` of `engine_tests/sglang` comes first.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import attention
import deepseek_v4 as v4
import hybrids
import torch
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

TRANSFERS = {"full": PoolName.KV, "swa": PoolName.SWA, "state": PoolName.MAMBA}
COMPONENTS = {
    "full": ComponentType.FULL,
    "swa": ComponentType.SWA,
    "state": ComponentType.MAMBA,
}


@dataclass
class Model:
    """Pools of one model, and what the prefix tree asks linkers to move.

    Attributes:
        kvcache: SGLang's pool.
        page_size: of the prefix tree, in tokens.
        trailing: by index space beside `full`, how many pages of a prefix's end travel.
        req_to_token_pool: SGLang's request pool, with states where there are some.
        window_tokens: of the sliding window.
    """

    kvcache: Any
    page_size: int
    trailing: Mapping[str, int] = field(default_factory=dict)
    req_to_token_pool: Any = None
    window_tokens: int | None = None

    @property
    def components(self) -> set[ComponentType]:
        """The prefix tree's components."""
        return {COMPONENTS[space] for space in ("full", *self.trailing)}

    def params(self) -> CacheInitParams:
        """Return what SGLang makes linkers with. Both ask its allocator for its pool alone."""
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_to_token_pool or pools.ReqToTokenPool(8, 64, "cpu", False),
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.kvcache),
            page_size=self.page_size,
            sliding_window_size=self.window_tokens,
            tree_components=tuple(self.components),
        )

    def transfers(
        self, keys: Sequence[str], page_ids: Mapping[str, Sequence[int]]
    ) -> list[PoolTransfer]:
        """Return what the tree's components hand over for one prefix.

        Args:
            keys: of its pages.
            page_ids: by index space, where they are or go; for trailing spaces the last ones alone.
        """
        found = []
        for space in ("full", *self.trailing):
            per_page = 1 if space == "state" else self.page_size
            first = torch.tensor(list(page_ids[space]), dtype=torch.int64)[:, None] * per_page
            number = self.trailing.get(space, len(keys))
            policy = PoolHitPolicy.ALL_PAGES if space == "full" else PoolHitPolicy.TRAILING_PAGES
            found.append(
                PoolTransfer(
                    name=TRANSFERS[space],
                    keys=list(keys[-number:]),
                    device_indices=(first + torch.arange(per_page)).flatten(),
                    hit_policy=policy,
                )
            )
        return found


@dataclass(frozen=True)
class Places:
    """Which pages of the pools a prefix is stored from and loaded into, by index space.

    Attributes:
        num_pages: of the prefix.
        sources, destinations: page ids; of trailing spaces the last pages alone.
    """

    num_pages: int
    sources: Mapping[str, Sequence[int]]
    destinations: Mapping[str, Sequence[int]]

    @classmethod
    def draw(cls, model: Model, num_pages: int, chance: random.Random) -> "Places":
        """Draw pages in no order, all different, and not SGLang's padding page 0."""
        sources, destinations = {}, {}
        for space in ("full", *model.trailing):
            number = model.trailing.get(space, num_pages)
            drawn = chance.sample(range(1, 2 * number + 1), 2 * number)
            sources[space], destinations[space] = drawn[:number], drawn[number:]
        return cls(num_pages, sources, destinations)


def _dsa(num_pages: int, num_layers: int = 61) -> Model:
    return Model(attention.dsa(num_layers, size=num_pages * 64), 64)


def _deepseek_v4(num_pages: int) -> Model:
    ratios = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, 43))]
    # Of the window a prefix keeps its last page alone. The engine says where the model ends; by
    # default SGLang's pool, and with it SGLang's linker, leaves the last layer out.
    pool = v4.deepseek_v4(
        ratios,
        num_pages,
        swa_size=4 * 256,
        c4_state_pool_size=5 * 8,
        start_layer=0,
        end_layer=len(ratios),
    )
    return Model(pool, 256, {"swa": 1}, window_tokens=128)


def _mha(num_pages: int) -> Model:
    return Model(attention.mha(size=num_pages * 64, head_num=8, head_dim=128, layer_num=32), 64)


def _mxfp8(num_pages: int) -> Model:
    pool = attention.mha(
        pools.MHATokenToKVPoolMXFP8,
        dtype=torch.float8_e4m3fn,
        size=num_pages * 64, head_num=8, head_dim=128, layer_num=32,
    )  # fmt: skip
    return Model(pool, 64)


def _mla(num_pages: int) -> Model:
    return Model(attention.mla(layers=61, size=num_pages * 64), 64)


def _gpt_oss(num_pages: int) -> Model:
    pool = hybrids.swa(
        size=num_pages * 64,
        size_swa=8 * 64,
        full_attention_layer_ids=list(range(1, 36, 2)),
        swa_attention_layer_ids=list(range(0, 36, 2)),
        head_num=8, head_dim=64,
    )  # fmt: skip
    return Model(pool, 64, {"swa": 2}, window_tokens=128)


def _qwen3_next(num_pages: int) -> Model:
    full = list(range(3, 48, 4))
    params = hybrids.gdn_params(
        [i for i in range(48) if i not in full],
        intermediate_size=4096, n_groups=16, num_heads=32, head_dim=128, state_size=128,
    )  # fmt: skip
    requests = hybrids.req_pool(params, mamba_size=4)
    pool = hybrids.hybrid(requests, full, size=num_pages * 64, head_num=2, head_dim=256)
    return Model(pool, 64, {"state": 1}, req_to_token_pool=requests)


def tiny(num_pages: int) -> Model:
    """DeepSeek-V3.2 with three layers."""
    return _dsa(num_pages, 3)


Build = Callable[[int], Model]
"""From the pages of the full pools, beside SGLang's padding page, to the pools."""

MODELS: dict[str, Build] = {
    "DeepSeek-V3.2": _dsa,
    "DeepSeek-V4-Flash": _deepseek_v4,
    "Llama-3.1-8B": _mha,
    "Llama-3.1-8B MXFP8": _mxfp8,
    "DeepSeek-V3": _mla,
    "GPT-OSS-120B": _gpt_oss,
    "Qwen3-Next-80B": _qwen3_next,
}
