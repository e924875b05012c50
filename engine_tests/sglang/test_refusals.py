"""What the readers of SGLang's pools refuse, and what they say."""

from typing import Any

import attention
import deepseek_v4 as v4
import hybrids
import pytest
import torch
from build import CASES
from sglang.srt.mem_cache import memory_pool as pools

from kvferry.errors import LayoutError


class SubclassedPool(pools.MHATokenToKVPool):
    """A pool of somebody else."""


def test_unknown_classes_are_refused() -> None:
    case = attention.mha_case()
    case.kvcache = attention.mha(SubclassedPool)
    with pytest.raises(LayoutError, match=r"kvcache is a .*SubclassedPool, wanted one of"):
        case.read()
    case = hybrids.swa_case()
    case.kvcache = hybrids.swa(token_to_kv_pool_class=SubclassedPool)
    with pytest.raises(LayoutError, match=r"pool 'full' is a .*SubclassedPool"):
        case.read()
    case = attention.mha_case()
    case.kvcache = attention.mha(pools.NoOpMHATokenToKVPool)
    with pytest.raises(LayoutError, match="NoOpMHATokenToKVPool"):
        case.read()


def test_unknown_tensors_are_refused() -> None:
    case = attention.mha_case()
    case.kvcache.side_buffer = [None, torch.zeros(8), torch.zeros(8)]
    with pytest.raises(LayoutError, match=r"MHATokenToKVPool.side_buffer\[.\]: a tensor \[8\]"):
        case.read()
    case = attention.dsa_case()
    case.kvcache.index_key_cache.extra = {"a": (torch.zeros(3),)}
    with pytest.raises(LayoutError, match=r"DSATokenToKVPool.index_key_cache.extra\['a'\]\[0\]"):
        case.read()


def test_side_states_are_refused() -> None:
    case = hybrids.gdn_case(short_conv_layer_ids=[1], short_conv_state_shape=(8, 3))
    with pytest.raises(LayoutError, match=r"conv_state: a tensor"):
        case.read()
    case = hybrids.gdn_case(ngram_context_len=2)
    with pytest.raises(LayoutError, match=r"\.context: a tensor"):
        case.read()


def test_states_need_their_request_pool() -> None:
    case = hybrids.gdn_case()
    case.req_to_token_pool = None
    with pytest.raises(LayoutError, match="HybridLinearKVPool: its Mamba pool is not that of"):
        case.read()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mha", {"page_size": 32}, "MHATokenToKVPool: page_size is 64, wanted the tree's 32"),
        ("swa", {"page_size": 128}, "SWAKVPool: page_size is 64, wanted the tree's 128"),
        ("deepseek_v4", {"page_size": 64}, "page_size is 256, wanted the tree's 64"),
        ("mha", {"num_layers": 2}, "layers is 2, wanted 0 .. 1"),
    ],
)
def test_sizes_that_differ(name: str, changes: dict[str, Any], message: str) -> None:
    case = CASES[name]()
    with pytest.raises(LayoutError, match=message):
        case.read(**changes)


def test_fewer_pages_than_the_engine_hands_out() -> None:
    case = attention.dsa_case()
    keys = case.kvcache.index_key_cache.buffer
    keys[1] = keys[1][:-1]
    with pytest.raises(LayoutError, match="pool 'index_k' layer 1: has 4 pages, wanted 5"):
        case.read()


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("_unified_kv", True, "_unified_kv is True, wanted False"),
        ("request_window", object(), "request_window is"),
        ("swa_req_ring_size", 256, "swa_req_ring_size is 256, wanted None"),
        ("swa_page_size", 64, "swa_page_size is 64, wanted the tree's 256"),
        ("compression_ratios", [0, 4, 2, 4], r"compression ratios \[2\]"),
    ],
)
def test_variants_of_deepseek_v4_are_refused(attribute: str, value: Any, message: str) -> None:
    case = v4.deepseek_v4_case()
    setattr(case.kvcache, attribute, value)
    with pytest.raises(LayoutError, match=message):
        case.read()


def test_other_variants_are_refused() -> None:
    case = attention.mha_case()
    case.kvcache.kv_cache_layout = "vectorized_5d"
    with pytest.raises(LayoutError, match="kv_cache_layout is 'vectorized_5d', wanted one of"):
        case.read()
    case = attention.dsa_case()
    case.kvcache.index_kpool = 4
    with pytest.raises(LayoutError, match="index_kpool is 4, wanted 1"):
        case.read()
    case = hybrids.swa_case()
    case.kvcache.swa_uses_full_indices = True
    with pytest.raises(LayoutError, match="do not use page ids of their own"):
        case.read()
    case = attention.mha_case()
    del case.kvcache.kv_cache_layout
    with pytest.raises(LayoutError, match="MHATokenToKVPool has no attribute 'kv_cache_layout'"):
        case.read()
