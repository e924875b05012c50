"""Sizes of whole models' objects, from SGLang's own pools and from kvferry's descriptions."""

import attention
import deepseek_v4 as v4
import hybrids
import pytest
from attention import Case, P

from kvferry.models import description


def full_size(model: str) -> Case:
    """A model's pools with all its layers, and a page or two."""
    if model == "deepseek-v3.2-dsa-fp8":
        return Case(attention.dsa(61, size=P), {})
    if model == "glm-5.2-dsa-fp8":
        owners = {0, 1, *range(2, 78, 4)}
        return Case(
            attention.dsa(78, size=P, skip_topk_layers=[i not in owners for i in range(78)]), {}
        )
    if model == "deepseek-v3-mla-bf16":
        return Case(attention.mla(layers=61, size=P), {})
    if model == "deepseek-v4-flash":
        ratios = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, 43))]
        return Case(v4.deepseek_v4(ratios, 1), {}, page_size=256)
    if model in ("gpt-oss-120b", "mimo-v2-flash"):
        count = 36 if model == "gpt-oss-120b" else 48
        full = [i for i in range(count) if i % 2] if count == 36 else []
        full = full or [i for i in range(48) if i == 0 or (i + 1) % 6 == 0]
        shape = {"head_num": 8, "head_dim": 64}
        if count == 48:
            shape = {"head_num": 4, "head_dim": 192, "v_head_dim": 128}
            shape |= {"swa_head_num": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
        pool = hybrids.swa(
            size=P,
            size_swa=P,
            full_attention_layer_ids=full,
            swa_attention_layer_ids=[i for i in range(count) if i not in full],
            **shape,
        )
        return Case(pool, {}, more={"window_tokens": 128})
    if model == "qwen3-next-80b":
        full = [i for i in range(48) if i % 4 == 3]
        params = hybrids.gdn_params(
            [i for i in range(48) if i not in full],
            intermediate_size=4096,
            n_groups=16,
            num_heads=32,
            head_dim=128,
            state_size=128,
        )
        requests = hybrids.req_pool(params, mamba_size=1)
        pool = hybrids.hybrid(requests, full, size=P, head_num=2, head_dim=256)
        return Case(pool, {}, req_to_token_pool=requests)
    assert model == "kimi-linear-48b"
    full = [3, 7, 11, 15, 19, 23, 26]
    params = hybrids.kda_params([i for i in range(27) if i not in full], 32, 128)
    requests = hybrids.req_pool(params, mamba_size=1)
    pool = hybrids.hybrid(
        requests, full, size=P, use_mla=True, kv_lora_rank=512, qk_rope_head_dim=64
    )
    return Case(pool, {}, req_to_token_pool=requests)


@pytest.mark.parametrize(
    "model",
    [
        "deepseek-v3.2-dsa-fp8",
        "glm-5.2-dsa-fp8",
        "deepseek-v3-mla-bf16",
        "deepseek-v4-flash",
        "gpt-oss-120b",
        "mimo-v2-flash",
        "qwen3-next-80b",
        "kimi-linear-48b",
    ],
)
def test_sizes_agree_with_the_descriptions(model: str) -> None:
    wanted = description(model)
    layout = full_size(model).read().layout
    assert layout.object_bytes == wanted["object_bytes"]
    assert layout.num_layers == wanted["num_layers"]
    for entry in wanted["pools"]:
        (pool,) = [pool for pool in layout.pools if pool.name == entry["name"]]
        assert pool.layer_ids == tuple(entry["layers"])
        assert pool.space == entry["index"]
        assert pool.page_bytes == entry["page_bytes"]
    window = wanted.get("window_tokens")
    assert layout.window_pages == (None if window is None else -(-window // wanted["page_size"]))
