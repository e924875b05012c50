"""Layouts of vLLM's own caches: every byte of a block, by the views that its layers read."""

from dataclasses import replace
from math import prod
from typing import Any

import plan
import pytest
import torch
from plan import BLOCK, MODELS, Plan, make
from prove import Memory, as_bytes, memory_of, prove_bytes, untold_bytes, write_bytes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.errors import LayoutError
from kvferry.kernels.pack import Packer
from kvferry.linker.vllm_pools import NULL_BLOCK_ID, VllmGroup
from kvferry.models import description

LAYOUTS = list(KVCacheLayout)


def block_views(made: Plan, group: VllmGroup) -> dict[tuple[str, int], Any]:
    """Views of blocks in the registered tensors, by pool and layer."""
    pools = {(b.pool.name, b.layer_id): b for b in group.layout.buffers[group.space]}
    views = {}
    for name, layer_id in group.layer_ids.items():
        cache = made.caches[name]
        ratio = cache.shape[0] // made.config.num_blocks

        def view(block: int, cache: torch.Tensor = cache, ratio: int = ratio) -> torch.Tensor:
            rows = cache[block * ratio : (block + 1) * ratio]
            return rows[0] if ratio == 1 else rows

        role = ".".join(part for part in name.split(".") if not part.isdecimal())
        views[role, layer_id] = view
    assert set(views) == set(pools)
    return views


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_bytes(model: str, layout: KVCacheLayout) -> None:
    specs = MODELS[model]()
    if not plan.has_layout(specs, layout):
        with pytest.raises(ValueError, match="cannot express"):
            make(specs, layout)
        return
    made = make(specs, layout)
    if not plan.is_served(specs, layout):
        with pytest.raises(LayoutError, match="groups 0 and 3 share memory in blocks of 6144 and"):
            made.read()
        return
    read = made.read()
    assert len(read.groups) == len(made.config.kv_cache_groups)
    for group in read.groups:
        assert group.layout.num_pages[group.space] == made.config.num_blocks
        prove_bytes(group.layout, group.space, block_views(made, group), [4, 1], [2, 3])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_no_byte_is_forgotten(model: str, layout: KVCacheLayout) -> None:
    specs = MODELS[model]()
    if not plan.is_served(specs, layout):
        return
    made = make(specs, layout)
    read = made.read()
    memory = Memory.of(made.caches.values())
    assert len(memory.storages) == 1  # all of vLLM's caches are one allocation
    for group in read.groups:
        per_block = sum(
            prod(cache.shape[1:]) * cache.element_size() * (len(cache) // made.config.num_blocks)
            for name, cache in made.caches.items()
            if name in group.layer_ids
        )
        assert group.layout.object_bytes[group.space] == per_block
        rest = memory.storages[0].numel() - per_block * made.config.num_blocks
        assert untold_bytes([group.layout], memory) == [rest]
        stated = {item.path: item.num_bytes for item in read.excluded}
        assert stated[f"group {group.group_id}"] == rest
        # Of the rest, nothing is the group's: it is the padding that its specs ask for.
        padded = sum(
            made.spec(group, name).page_size_bytes
            for name in made.config.kv_cache_groups[group.group_id].layer_names
        )
        assert padded * made.config.num_blocks == memory.storages[0].numel()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_model_layers_read_what_was_moved(model: str) -> None:
    """VLLM's layer classes unpack the tensors; what they see in one block, they see in another."""
    made = make(MODELS[model](), KVCacheLayout.BLHNC)
    for group in made.read().groups:
        layout, space = group.layout, group.space
        memory_of(layout).fill(0)
        parts = {
            name: plan.bound(made.spec(group, name), made.caches[name]) for name in group.layer_ids
        }
        generator = torch.Generator().manual_seed(group.group_id)
        for tensors in parts.values():
            for tensor in tensors:
                num_bytes = tensor[2].numel() * tensor.element_size()
                data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
                write_bytes(tensor[2], data)
        objects = torch.zeros(layout.object_bytes[space], dtype=torch.uint8)
        Packer(layout, space).pack(torch.tensor([2]), objects)
        assert int((objects == 0).sum()) < len(objects) // 50  # the layers' parts fill the object
        Packer(layout, space).unpack(torch.tensor([4]), objects)
        for tensors in parts.values():
            for tensor in tensors:
                assert torch.equal(as_bytes(tensor[2]), as_bytes(tensor[4]))
                assert not as_bytes(tensor[3]).any()


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_kernel_blocks_smaller_than_the_managers(layout: KVCacheLayout) -> None:
    specs = {name: replace(spec, block_size=4 * BLOCK) for name, spec in plan.llama().items()}
    made = make(specs, layout, kernel_block_sizes=[BLOCK])
    (name, *_) = made.caches
    assert made.caches[name].shape[0] == 4 * made.config.num_blocks
    (group,) = made.read().groups
    assert group.layout.page_size == 4 * BLOCK
    assert group.layout.num_pages["full"] == made.config.num_blocks
    assert group.layout.pools[0].row_shape == (4, 2, BLOCK, 32)
    prove_bytes(group.layout, "full", block_views(made, group), [4, 1], [2, 3])
    memory = Memory.of(made.caches.values())
    assert untold_bytes([group.layout], memory) == [0]
    # A token of the manager's block is where the kernel's slot is.
    memory.fill(0)
    objects = torch.full((group.layout.object_bytes["full"],), 7, dtype=torch.uint8)
    Packer(group.layout, "full").unpack(torch.tensor([3]), objects)
    for cache in made.caches.values():
        written = [
            slot
            for slot in range(made.config.num_blocks * 4 * BLOCK)
            if cache[slot // BLOCK, :, slot % BLOCK].any()
        ]
        assert written == list(range(3 * 4 * BLOCK, 4 * 4 * BLOCK))


def test_layers_that_share_a_cache() -> None:
    specs = plan.llama(3)
    shared = {
        "model.layers.3.self_attn.attn": "model.layers.1.self_attn.attn",
        "model.layers.4.self_attn.attn": "model.layers.1.self_attn.attn",
    }
    made = make(specs, shared=shared)
    (group,) = made.read().groups
    alone = make(specs).read(num_layers=5).groups[0]
    assert group.layout.object_bytes == alone.layout.object_bytes
    assert group.layout.num_layers == 5
    assert group.layer_ids["model.layers.4.self_attn.attn"] == 1
    assert group.layer_ids["model.layers.2.self_attn.attn"] == 2
    prove_bytes(
        group.layout,
        "full",
        block_views(made, group),
        [1, 4],
        [3, 2],
    )


def test_null_block() -> None:
    made = make(plan.gpt_oss())
    pool = BlockPool(made.config.num_blocks, enable_caching=True, hash_block_size=BLOCK)
    assert pool.null_block.block_id == NULL_BLOCK_ID
    (window, full) = made.read().groups
    blocks = [pool.null_block, pool.null_block, *pool.get_new_blocks(2)]
    ids = [block.block_id for block in blocks]
    assert window.pages(ids) == ([2, 3], ids[2:])
    assert full.pages([]) == ([], [])
    with pytest.raises(LayoutError, match=r"group 1: block ids 1 \.\. 5, wanted 0 \.\. 4"):
        full.pages([1, 5])


def test_groups_of_hybrids() -> None:
    window, full = make(plan.gpt_oss()).read().groups
    assert (window.space, full.space) == ("swa", "full")
    assert window.layout.pools[0].layer_ids == (0, 2)
    assert full.layout.pools[0].layer_ids == (1, 3)
    assert window.layout.num_layers == full.layout.num_layers == 4
    assert window.layout.window_pages == 3  # 39 tokens below the next one
    assert window.layout.fingerprint != full.layout.fingerprint

    *states, full = make(plan.qwen3_next()).read().groups
    assert [group.space for group in states] == ["state"] * 3
    assert [group.layout.pools[0].layer_ids for group in states] == [(0, 4), (1, 5), (2, 6)]
    assert len({group.layout.fingerprint for group in states}) == 3
    assert states[0].layout.object_bytes["state"] == 2 * plan.STATE.state_content_size_bytes
    assert full.layout.pools[0].layer_ids == (3, 7)
    assert not any(group.replicated for group in (*states, full))

    (both,) = make(plan.deepseek_v32()).read().groups
    assert [pool.page_bytes for pool in both.layout.pools] == [41984, 8448]
    assert both.replicated


def test_order_of_bytes_is_in_the_fingerprint() -> None:
    prints = {
        layout.name: make(plan.llama(), layout).read().groups[0].layout.fingerprint
        for layout in LAYOUTS
    }
    # Where the layers and blocks lie does not matter; whether heads or tokens come first does.
    assert prints["LBHNC"] == prints["LHBNC"] == prints["BLHNC"] == prints["BHLNC"]
    assert prints["LBNHC"] == prints["BLNHC"] != prints["LBHNC"]


def test_equal_shapes_with_different_orders() -> None:
    """With as many heads as tokens nothing but strides tells the orders apart."""
    spec = replace(plan.FULL, block_size=2)
    heads, toks = (
        make({"layers.0": spec}, layout).read().groups[0].layout
        for layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
    )
    assert heads.pools[0].row_shape == toks.pools[0].row_shape == (2, 2, 32)
    assert heads.fingerprint != toks.fingerprint


def test_sizes_agree_with_the_descriptions() -> None:
    wanted = description("deepseek-v3.2-dsa-fp8")
    (group,) = make(plan.deepseek_v32(61), num_blocks=2).read().groups
    assert group.layout.object_bytes == wanted["object_bytes"]

    wanted = description("vllm-bhnc")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(32)}
    (group,) = make(specs, KVCacheLayout.LBHNC, num_blocks=2).read().groups
    assert group.layout.object_bytes == wanted["object_bytes"]
    assert group.layout.pools[0].row_shape == tuple(wanted["pools"][0]["row_shape"])

    wanted = description("gpt-oss-120b")
    full = replace(plan.FULL, block_size=64, num_kv_heads=8, head_size=64, head_size_v=64)
    window = replace(
        plan.WINDOW, block_size=64, num_kv_heads=8, head_size=64, head_size_v=64, sliding_window=128
    )
    specs = {f"model.layers.{i}.self_attn.attn": full if i % 2 else window for i in range(36)}
    groups = make(specs, num_blocks=2).read().groups
    assert {group.space: group.layout.object_bytes[group.space] for group in groups} == (
        wanted["object_bytes"]
    )

    wanted = description("qwen3-next-80b")
    full = replace(plan.FULL, block_size=1088, head_size=256, head_size_v=256)
    state = replace(
        plan.STATE,
        block_size=1088,
        shapes=((3, 8192), (32, 128, 128)),
        page_size_padded=full.page_size_bytes,
    )
    assert state.page_size_padded >= state.state_content_size_bytes
    specs = {f"model.layers.{i}.attn": full if i % 4 == 3 else state for i in range(48)}
    groups = make(specs, num_blocks=2).read().groups
    states = [g.layout.object_bytes["state"] for g in groups if g.space == "state"]
    assert sum(states) == wanted["object_bytes"]["state"]
    (tokens,) = (g.layout for g in groups if g.space == "full")
    assert tokens.object_bytes["full"] * 64 // 1088 == wanted["object_bytes"]["full"]


def test_a_pipeline_stage() -> None:
    specs = {f"model.layers.{i}.self_attn.attn": plan.FULL for i in range(6, 9)}
    (group,) = make(specs).read(first_layer=6, num_layers=4).groups
    assert group.layout.pools[0].layer_ids == (0, 1, 2)
    assert group.layout.num_layers == 4
    with pytest.raises(LayoutError, match=r"layers is 6, wanted 0 \.\. 3"):
        make(specs).read(num_layers=4)


def test_groups_that_do_not_travel() -> None:
    made = make(plan.gpt_oss())
    made.config.kv_cache_groups[0].enable_kv_transfer = False
    read = made.read()
    assert [group.group_id for group in read.groups] == [1]
    left = {item.path: item for item in read.excluded}
    assert left["model.layers.0.self_attn.attn"].reason.startswith("vLLM does not keep")
    assert "model.layers.1.self_attn.attn" not in left


def test_what_is_refused() -> None:
    made = make(plan.llama())
    made.caches["model.layers.9.self_attn.attn"] = torch.zeros(5, 8)
    with pytest.raises(LayoutError, match=r"layers \['model.layers.9.self_attn.attn'\] belong to"):
        made.read()
    made = make(plan.llama())
    del made.caches["model.layers.1.self_attn.attn"]
    with pytest.raises(LayoutError, match=r"\['model.layers.1.self_attn.attn'\] have no regist"):
        made.read()
    made = make(plan.llama())
    made.caches["model.layers.1.self_attn.attn"] = torch.zeros(7, 2, 16, 32).bfloat16()
    with pytest.raises(LayoutError, match="has 7 rows, wanted a multiple of 5 blocks"):
        made.read()
    chunked = ChunkedLocalAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=16,
        dtype=torch.bfloat16,
        attention_chunk_size=64,
    )
    with pytest.raises(LayoutError, match="ChunkedLocalAttentionSpec, wanted one of"):
        make({"layers.0": chunked}).read()
    with pytest.raises(LayoutError, match="no number in its name"):
        make({"attn": plan.FULL}).read()
    made = make(plan.llama())
    made.config.kv_cache_groups[0].host_resident = True
    with pytest.raises(LayoutError, match="in host memory, wanted one kind on the device"):
        made.read()
    made = make(plan.llama())
    group = made.config.kv_cache_groups[0]
    group.kv_cache_spec = UniformTypeKVCacheSpecs(BLOCK, {"elsewhere": group.kv_cache_spec})
    with pytest.raises(LayoutError, match="group 0: no layer has a spec"):
        made.read()
    with pytest.raises(LayoutError, match="has no attribute 'num_blocks'"):
        Plan(KVCacheTensor(1, [], 1, 1), {}).read()


def test_two_layers_with_one_number_are_refused() -> None:
    made = make({"model.layers.0.attn": plan.FULL, "model.layers.attn.0": plan.FULL})
    with pytest.raises(LayoutError, match="two layers named like"):
        made.read()


def test_state_specs_keep_their_padding_out() -> None:
    made = make(plan.qwen3_next())
    group = made.read().groups[0]
    spec = made.spec(group, "model.layers.0.linear_attn")
    assert isinstance(spec, MambaSpec)
    assert spec.page_size_bytes > spec.state_content_size_bytes
    assert group.layout.pools[0].page_bytes == spec.state_content_size_bytes
