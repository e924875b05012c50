"""Layouts of SGLang's own pools: every byte of a page, by SGLang's own accessors."""

from types import SimpleNamespace
from typing import Any

import attention
import deepseek_v4 as v4
import hybrids
import pytest
import torch
from attention import Case, P
from build import CASES
from prove import Memory, prove_bytes, untold_bytes
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.kernels.pack import Packer
from kvferry.linker.pool_tensors import held_tensors
from kvferry.linker.sglang_pools import SGLangPools, read_cache_params


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Each kind of pool."""
    if request.param == "hnd":
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    return CASES[request.param]()


def test_bytes(case: Case) -> None:
    layout = case.read().layout
    assert {(b.pool.name, b.layer_id) for row in layout.buffers.values() for b in row} == set(
        case.views
    )
    for space in layout.spaces:
        last = layout.num_pages[space] - 1
        prove_bytes(layout, space, case.views, [last, 1], [0, 2])


def test_no_byte_is_forgotten(case: Case) -> None:
    read = case.read()
    roots = [case.kvcache, *case.drafts, case.req_to_token_pool]
    excluded = {item.path for item in read.excluded}
    travels, stays = [], []
    for held in held_tensors(roots, ("sglang",)):
        (stays if held.path in excluded else travels).append(held.tensor)
    memory = Memory.of(travels)
    assert sum(untold_bytes([read.layout], memory)) == case.rest
    kept = {tensor.untyped_storage().data_ptr() for tensor in stays if tensor.numel()}
    assert not kept & {storage.data_ptr() for storage in memory.storages}
    assert all(item.reason and item.num_bytes >= 0 for item in read.excluded)


@pytest.mark.parametrize("space", ["full", "swa"])
def test_page_ids_of_the_engines_slots(space: str) -> None:
    read = hybrids.swa_case().read()
    allocator = PagedTokenToKVPoolAllocator(4 * P, P, torch.bfloat16, "cpu", None, False)
    slots = allocator.alloc(2 * P)
    assert slots.dtype == torch.int64
    read.check_slots(space, slots)
    page_ids = read.page_ids(space, slots)
    assert page_ids.tolist() == [1, 2]  # page 0 is SGLang's padding page
    assert torch.equal(slots, (page_ids[:, None] * P + torch.arange(P)).reshape(-1))


def test_page_ids_of_state_slots() -> None:
    case = hybrids.gdn_case()
    read = case.read()
    allocator = case.req_to_token_pool.mamba_allocator
    assert isinstance(allocator, MambaSlotAllocator)
    slots = torch.cat([allocator.alloc(1) for _ in range(case.req_to_token_pool.mamba_pool.size)])
    read.check_slots("state", slots)
    assert read.page_ids("state", slots).tolist() == [1, 2, 3, 4, 5]
    assert read.layout.num_pages["state"] == 6
    assert allocator.alloc(1) is None


def test_slots_that_are_no_pages() -> None:
    read = attention.mha_case().read()
    with pytest.raises(LayoutError, match="got 65 slots, wanted pages of 64"):
        read.page_ids("full", torch.arange(65))
    with pytest.raises(LayoutError, match="space is 'swa', wanted one of"):
        read.page_ids("swa", torch.arange(64))
    slots = torch.cat([torch.arange(64), torch.arange(1, 65)])
    with pytest.raises(LayoutError, match="page 1 of the slots"):
        read.check_slots("full", slots)
    with pytest.raises(LayoutError, match=r"wanted 0 \.\. 319"):
        read.check_slots("full", torch.arange(320, 384))


def move(read: SGLangPools, space: str, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy pages of slots to other slots by kvferry."""
    objects = torch.zeros(read.layout.object_bytes[space] * 8, dtype=torch.uint8)
    packer = Packer(read.layout, space)
    packer.pack(read.page_ids(space, source), objects)
    packer.unpack(read.page_ids(space, target), objects)


FROM, TO = torch.arange(P, 2 * P), torch.arange(3 * P, 4 * P)


@pytest.mark.parametrize("name", ["mha", "asymmetric", "fp8", "hnd", "fp4", "mha_stage"])
def test_engine_writes_kvferry_moves_engine_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hnd":
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    case = CASES[name]()
    pool = case.kvcache
    heads, k_dim, v_dim = pool.head_num, pool.head_dim, pool.v_head_dim
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    for layer_id in layers:
        k = torch.randn(P, heads, k_dim).bfloat16()
        v = torch.randn(P, heads, v_dim).bfloat16()
        pool.set_kv_buffer(attention.layer(layer_id), FROM, k, v)
    move(case.read(), "full", FROM, TO)
    paged = name == "hnd"
    here, there = (1, 3) if paged else (FROM, TO)
    for layer_id in layers:
        for buffer in pool.get_kv_buffer(layer_id):
            raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
            assert raw[here].any()
            assert torch.equal(raw[here], raw[there])


def test_engine_writes_and_reads_latents_and_index_keys() -> None:
    mla = attention.mla_case()
    for layer_id in range(3):
        mla.kvcache.set_kv_buffer(
            attention.layer(layer_id), FROM, torch.randn(P, 1, 576).bfloat16(), None
        )
    move(mla.read(), "full", FROM, TO)
    for layer_id in range(3):
        key, value = mla.kvcache.get_kv_buffer(layer_id)
        assert key[FROM].any()
        assert torch.equal(key[FROM], key[TO])
        assert torch.equal(value[FROM], value[TO])

    dsa = attention.dsa_case()
    for layer_id in range(3):
        keys = torch.randn(P, 128).to(torch.float8_e4m3fn)
        dsa.kvcache.set_index_k_scale_buffer(layer_id, FROM, keys, torch.rand(P, 1))
    move(dsa.read(), "full", FROM, TO)
    for layer_id in range(3):
        index = dsa.kvcache.get_index_k_with_scale_buffer(layer_id)
        assert index[1].any()
        assert torch.equal(index[1], index[3])


def test_engine_writes_and_reads_hybrids() -> None:
    case = hybrids.swa_case()
    for layer_id in range(5):
        loc = pools.KVWriteLoc(FROM, swa_loc=torch.arange(P))
        k, v = torch.randn(P, 2, 16).bfloat16(), torch.randn(P, 2, 16).bfloat16()
        case.kvcache.set_kv_buffer(attention.layer(layer_id), loc, k, v)
    read = case.read()
    move(read, "full", FROM, TO)
    move(read, "swa", torch.arange(P), torch.arange(2 * P, 3 * P))
    for layer_id, (_, is_swa) in case.kvcache.layers_mapping.items():
        pages = (slice(0, P), slice(2 * P, 3 * P)) if is_swa else (FROM, TO)
        for buffer in case.kvcache.get_kv_buffer(layer_id):
            assert buffer[pages[0]].any()
            assert torch.equal(buffer[pages[0]], buffer[pages[1]])

    case = hybrids.gdn_case()
    for layer_id in (0, 1, 2, 4):
        state = case.req_to_token_pool.mamba2_layer_cache(layer_id)
        state.conv[0][2] = torch.randn(128, 3).bfloat16()
        state.temporal[2] = torch.randn(4, 16, 16)
    move(case.read(), "state", torch.tensor([2]), torch.tensor([5]))
    mamba = case.req_to_token_pool.mamba_pool
    mamba.copy_from(torch.tensor([2]), torch.tensor([3]))  # the engine's own copy of a state
    for tensor in (mamba.mamba_cache.conv[0], mamba.mamba_cache.temporal):
        assert tensor[:, 2].any()
        assert torch.equal(tensor[:, 3], tensor[:, 5])


def test_hnd_and_nhd_are_not_interchangeable(monkeypatch: pytest.MonkeyPatch) -> None:
    nhd = attention.mha_case().read().layout
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    hnd = attention.hnd_case().read().layout
    assert nhd.object_bytes == hnd.object_bytes
    assert nhd.fingerprint != hnd.fingerprint


def test_replicated_spaces() -> None:
    assert attention.mha_case().read().replicated == frozenset()
    assert attention.dsa_case().read().replicated == {"full"}
    assert hybrids.kda_mla_case().read().replicated == {"full"}
    assert v4.deepseek_v4_case().read().replicated == {"full", "swa"}
    mla = attention.mla_case()
    mla.drafts = (attention.mha(layer_num=1),)
    assert mla.read().replicated == frozenset()


def params(case: Case, **changes: Any) -> CacheInitParams:
    """What SGLang hands to a linker's constructor."""
    arguments = {
        "disable": False,
        "req_to_token_pool": case.req_to_token_pool,
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: case.kvcache),
        "page_size": case.page_size,
        "mtp_draft_device_pools": tuple(case.drafts),
    }
    return CacheInitParams(**{**arguments, **changes})


def test_cache_init_params() -> None:
    case = attention.dsa_draft_case()
    identity = ModelIdentity(model="m", kv_dtype="fp8_e4m3")
    read = read_cache_params(params(case), num_layers=5, identity=identity)
    assert read.layout.num_layers == 5
    assert read.layout.identity == identity
    names = [pool.name for pool in read.layout.pools]
    assert names == ["kv", "index_k", "draft_kv", "draft_index_k"]
    swa = read_cache_params(
        params(hybrids.swa_case(), sliding_window_size=100, draft_swa_window=130)
    )
    assert swa.layout.window_pages == 3
    side = params(attention.mha_case(), sidecar_draft_device_pools=(attention.mha(layer_num=1),))
    assert [pool.name for pool in read_cache_params(side).layout.pools][-1] == "draft_v"
    with pytest.raises(LayoutError, match="mtp_draft_mamba_pools"):
        read_cache_params(params(case, mtp_draft_mamba_pools=(object(),)))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_decode_context_parallelism(kind: str) -> None:
    case = CASES[kind]()
    read = case.read(page_size=2 * P, dcp_size=2)
    assert read.layout.page_size == P  # what this rank keeps of a page of the tree
    slots = torch.arange(2 * P) + 3 * 2 * P
    read.check_slots("full", slots)
    assert read.page_ids("full", slots).tolist() == [3]
    # SGLang: slot s is in row s // dcp_size of rank s % dcp_size.
    rows = {int(slot) // 2 for slot in slots}
    assert rows == set(range(3 * P, 4 * P))
    prove_bytes(read.layout, "full", case.views, [read.layout.num_pages["full"] - 1, 1], [0, 2])
    for other, text in (("dsa", "DSATokenToKVPool with 0 draft"), ("swa", "a SWAKVPool")):
        with pytest.raises(LayoutError, match=f"decode context parallelism of 2 over .*{text}"):
            CASES[other]().read(page_size=2 * P, dcp_size=2)
