"""Objects ordered by head: the same bytes from any memory, cut and joined by ranges of heads."""

import itertools
import json
from typing import Any

import pytest
import torch
from sharded import ALL_POOLS, SMALL_TILES, Model, Rank, deployment

from kvferry.deployments import layout_for
from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.kernels.pack import Packer
from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions
from kvferry.pools import PoolTensors
from kvferry.reshard import plan_reshard
from kvferry.segments import Segment
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    make_tensors,
    object_bytes_of,
    write_telling,
)

PATHS = ("reference", "triton")
KV = ("k", "v")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, in the order of its dimensions."""
    return tensor.contiguous().flatten().view(torch.uint8)


def head_bytes(model: Model, page: int, page_size: int, layer: int) -> torch.Tensor:
    """A layer of the whole model's page: head after head, K's tokens and then V's."""
    tokens = slice(page * page_size, (page + 1) * page_size)
    return torch.cat([
        raw(model.whole[name][layer][tokens, head])
        for head in range(model.heads)
        for name in KV
    ])  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_joined_are_the_whole_model_from_any_memory(
    tp_size: int, padding: int, path: str, device: torch.device
) -> None:
    model = Model(tokens=12, k_dim=16, v_dim=8, layers=3, pools=KV)
    wanted = torch.stack([
        torch.cat([head_bytes(model, page, 4, layer) for layer in range(model.layers)])
        for page in range(3)
    ])  # fmt: skip
    for memory in ("nhd", "hnd"):
        ranks = deployment(
            model, 4, tp_size, memory=memory, order="canonical", padding=padding, device=device
        ).values()
        size = wanted.shape[1] // tp_size
        joined = []
        for layer in range(model.layers):
            for rank in ranks:
                assert rank.layout.object_bytes == {"full": size}
                first, end = rank.layout.layer_offsets["full"][layer : layer + 2]
                joined.append(rank.objects("full", size, path)[:, first:end])
        assert torch.equal(torch.cat(joined, 1).cpu(), wanted)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("memory", ["nhd", "hnd"])
def test_every_kind_of_pool_there_and_back(memory: str, path: str, device: torch.device) -> None:
    model = Model(tokens=12, num_states=2, k_dim=32)
    rank = Rank(model, 4, tp=(1, 2), memory=memory, order="canonical", padding=1, device=device)
    layout = rank.layout
    for space, pages in rank.page_ids.items():
        write_telling(layout, space, pages, pages)
        stride = -(-layout.object_bytes[space] // 16) * 16
        objects = rank.objects(space, stride, path)
        size = layout.object_bytes[space]
        assert torch.equal(objects[:, :size], object_bytes_of(layout, space, pages))
        assert bool((objects[:, size:] == POISON).all())
        others = [page for page in range(layout.num_pages[space]) if page not in pages]
        targets = others[: len(pages)]
        packer = Packer(layout, space, SMALL_TILES)
        packer.unpack(targets, objects[: len(targets)].flatten(), stride_bytes=stride, backend=path)
        check_telling(layout, space, targets, pages[: len(targets)])
        check_telling(layout, space, pages, pages)
        check_poison(layout, space, [*pages, *targets])


def test_fingerprints_tell_the_order_and_not_the_memory() -> None:
    model = Model(tokens=8, pools=(*KV, "latent", "conv", "ssm"))
    prints = {
        (memory, order): Rank(model, 4, memory=memory, order=order).layout.fingerprint
        for memory, order in itertools.product(("nhd", "hnd"), ("pool", "canonical"))
    }
    assert prints["nhd", "canonical"] == prints["hnd", "canonical"]
    assert len(set(prints.values())) == 3


def test_the_canonical_fingerprint_tells_heads_and_tokens() -> None:
    plain: dict[str, Any] = {
        "page_size": 4, "num_layers": 1, "order": "canonical",
        "pools": [{"name": "k", "index": "full", "rows": "page", "row_shape": [4, 4, 8],
                   "dtype": "bfloat16", "layers": [0]}],
    }  # fmt: skip

    def fingerprint(**changes: Any) -> str:
        pool = {**plain["pools"][0], **changes}
        described = CacheLayout.from_description({**plain, "pools": [pool]})
        # Bytes are put in order by head: what lies where in memory changes nothing.
        other_way = {**pool, "order": [2, 1, 0]}
        again = CacheLayout.from_description({**plain, "pools": [other_way]})
        assert again.fingerprint == described.fingerprint
        return described.fingerprint

    changes: list[dict[str, Any]] = [
        {},
        {"token_axis": 0},
        {"token_planes": [64]},
        {"shard_axis": 2},
        {"token_axis": 0, "shard_axis": 1},
        {"token_axis": 0, "shard_axis": 1, "head_group": "kv"},
        {"token_axis": 0, "shard_axis": 1, "shard_parts": [1, 3], "shard_totals": [1, 3]},
        {"token_axis": 0, "shard_axis": 1, "shard_parts": [3, 1], "shard_totals": [3, 1]},
    ]
    assert len({fingerprint(**change) for change in changes}) == len(changes)
    # Tokens and heads change places: the same bytes once they are in order.
    heads_first = fingerprint(token_axis=1, shard_axis=0)
    assert heads_first == fingerprint(token_axis=0, shard_axis=1)


def test_a_range_of_heads_is_one_range_of_each_layer() -> None:
    model = Model(tokens=8, heads=8, pools=KV, layers=3)
    for memory, reads in itertools.product(("nhd", "hnd"), (2, 4, 8)):
        writer = Rank(model, 8, order="canonical", memory=memory).layout
        for rank in range(reads):
            plan = plan_reshard(writer, Rank(model, 8, tp=(rank, reads)).layout)
            (source,) = plan.sources
            size = writer.object_bytes["full"] // 3 // reads
            assert [(each.layer_id, each.offset_bytes, each.num_bytes)
                    for each in source.byte_ranges()] == [
                (layer, (layer * reads + rank) * size, size) for layer in range(3)
            ]  # fmt: skip
    in_pool_order = plan_reshard(Rank(model, 8).layout, Rank(model, 8, tp=(0, 2)).layout)
    assert len(in_pool_order.sources[0].byte_ranges()) == 3 * 2 * 8  # each token of K and V


def token_of(segment: Segment, part: int, byte: int) -> int:
    place = segment.token_start_bytes + part * segment.token_part_bytes + byte
    return place // segment.token_bytes


def check_tokens(rank: Rank, segments: tuple[Segment, ...], tokens: set[int]) -> None:
    """Every byte of the pools' page 0 says its own token; those of `tokens` are all there."""
    rows = torch.arange(rank.page_size, dtype=torch.uint8)
    for buffer in rank.layout.buffers["full"]:
        assert buffer.tensor is not None
        pool, tensor = buffer.pool, buffer.tensor
        memory = torch.full((tensor.untyped_storage().nbytes(),), 255, dtype=torch.uint8)
        if pool.token_planes:
            planes = [rows.repeat_interleave(width) for width in pool.token_planes]
            mark = torch.cat(planes)
        else:
            assert pool.token_axis is not None
            shape = [*pool.page_shape, pool.item_bytes]
            sizes = [size if dim == pool.token_axis else 1 for dim, size in enumerate(shape)]
            mark = rows.view(sizes).expand(shape).contiguous()
        twin = torch.empty(0, dtype=tensor.dtype).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        rank.paged(twin, pool.name)[0] = mark.flatten().view(tensor.dtype).view(pool.page_shape)
        start, seen = tensor.untyped_storage().data_ptr(), []
        for segment in (each for each in segments if each.tensor is tensor):
            for part, byte in itertools.product(range(segment.count), range(segment.part_bytes)):
                place = segment.address - start + part * segment.pool_pitch_bytes + byte
                seen.append(place)
                assert token_of(segment, part, byte) == int(memory[place])
        wanted = [int(i) for i in (memory != 255).nonzero() if int(memory[int(i)]) in tokens]
        assert sorted(seen) == wanted, pool.name


@pytest.mark.parametrize("order", ["pool", "canonical"])
@pytest.mark.parametrize("memory", ["nhd", "hnd"])
@pytest.mark.parametrize("padding", [0, 1])
def test_segments_tell_their_tokens(memory: str, order: str, padding: int) -> None:
    model = Model(tokens=8, pools=ALL_POOLS[:4])
    rank = Rank(model, 4, tp=(0, 2), memory=memory, order=order, padding=padding)
    check_tokens(rank, rank.layout.segments("full", by_token=True), {0, 1, 2, 3})
    for tp, dcp in [(1, 1), (4, 1), (1, 2), (2, 4)]:
        writer = Rank(model, 4 // dcp, tp=(0, tp), dcp=(0, dcp), order=order, memory=memory).layout
        plan = plan_reshard(writer, rank.layout, dcp_in_tp=False, by_token=True)
        segments = tuple(each for source in plan.sources for each in source.segments)
        check_tokens(rank, segments, {0, 1, 2, 3})
        mine = plan.sources_of("full")[0]
        assert mine.identity.dcp[0] == 0
        owned = {
            token_of(each, part, byte)
            for each in mine.segments
            for part in range(each.count)
            for byte in range(each.part_bytes)
        }
        assert owned == set(range(0, 4, dcp))


def test_pages_that_cannot_be_cut_by_tokens_say_so() -> None:
    pool = PoolTensors("c4", "full", "page", {0: torch.zeros(3, 64)})
    layout = CacheLayout.from_tensors([pool], page_size=4, num_layers=1, order="canonical")
    with pytest.raises(LayoutError, match="pool 'c4' layer 0: its pages cannot be cut by tokens"):
        layout.segments("full", by_token=True)
    with pytest.raises(LayoutError, match="pool 'c4' layer 0: its pages cannot be cut by tokens"):
        plan_reshard(layout, layout, by_token=True)


@pytest.mark.parametrize("model", sorted(descriptions()))
@pytest.mark.parametrize("order", ["pool", "canonical"])
def test_every_model_by_head(model: str, order: str) -> None:
    plain = {**description(model), "order": order}
    layout = CacheLayout.from_description(plain, identity=ModelIdentity(model=model))
    for space in layout.spaces:
        segments = layout.segments(space)
        covered = sorted(
            (each.object_offset + part * each.object_pitch_bytes, each.part_bytes)
            for each in segments
            for part in range(each.count)
        )
        assert covered[0][0] == 0
        for (offset, size), (after, _) in itertools.pairwise(covered):
            assert offset + size == after
        assert sum(covered[-1]) == layout.object_bytes[space]
        plan = plan_reshard(layout, layout)
        (source,) = plan.sources_of(space)
        assert source.identity == layout.identity
        assert source.num_bytes == layout.object_bytes[space]


@pytest.mark.parametrize("order", ["pool", "canonical"])
def test_a_layout_is_built_again_from_its_description(order: str) -> None:
    for model in descriptions():
        layout = CacheLayout.from_description({**description(model), "order": order})
        again = CacheLayout.from_description(json.loads(json.dumps(layout.description())))
        assert again == layout
    view = torch.zeros(3, 2, 4, 8).transpose(1, 2)
    pool = PoolTensors("k", "full", "page", {0: view}, token_axis=0, shard_axis=1, head_group="kv")
    bound = CacheLayout.from_tensors([pool], page_size=4, num_layers=1, order=order)
    assert bound.pools[0].order == (1, 0, 2)
    again = CacheLayout.from_description(json.loads(json.dumps(bound.description())))
    assert again.pools == bound.pools
    assert again.fingerprint == bound.fingerprint


@pytest.mark.parametrize("order", ["pool", "canonical"])
def test_layouts_of_other_deployments(order: str) -> None:
    model = Model(tokens=16)
    for memory, (tp, dcp) in itertools.product(("nhd", "hnd"), [(1, 1), (8, 1), (2, 4), (4, 2)]):
        mine = Rank(model, 8, tp=(1, 2), memory=memory, order=order).layout
        theirs = Rank(model, 8 // dcp, tp=(0, tp), dcp=(0, dcp), memory=memory, order=order).layout
        derived = layout_for(mine, tp_size=tp, dcp_size=dcp, page_size=8 // dcp)
        assert derived.fingerprint == theirs.fingerprint
        assert derived.pools == theirs.pools
        assert derived.object_bytes == theirs.object_bytes
    with pytest.raises(LayoutError, match="pool 'k': 3 ranks with 1 entries each hold 3, wanted 4"):
        layout_for(mine, tp_size=3)
    opaque = PoolTensors("c4", "full", "page", {0: torch.zeros(3, 64)})
    layout = CacheLayout.from_tensors([opaque], page_size=4, num_layers=1)
    with pytest.raises(LayoutError, match="pool 'c4': a page of 4 rows has shape"):
        layout_for(layout, tp_size=1, page_size=8)


def test_wrong_orders_and_groups_are_refused() -> None:
    k = {"name": "k", "index": "full", "rows": "token", "row_shape": [2, 8], "dtype": "bfloat16",
         "layers": [0], "shard_axis": 0, "head_group": "kv"}  # fmt: skip
    v = {**k, "name": "v", "row_shape": [4, 8]}

    def refused(match: str, *pools: dict[str, Any], **changes: Any) -> None:
        with pytest.raises(LayoutError, match=match):
            CacheLayout.from_description(
                {"page_size": 4, "num_layers": 1, "pools": pools, **changes},
                identity=ModelIdentity(tp=(0, 2)),
            )

    refused("order is 'heads', wanted one of", k, order="heads")
    refused("pool 'v': has 4 of 8 heads, wanted 2 of 4 as pool 'k' of head_group 'kv'", k, v)
    refused("pool 'k': order is .0, 1., wanted dimensions", {**k, "order": [0, 1]})
    refused("describe no axis, wanted shard_axis", {**k, "shard_axis": None})
    refused("shard_axis is 2, wanted 0 .. 1", {**k, "shard_axis": 2})
    refused("shard_parts are .1, 2., wanted positive sizes that add up to 2",
            {**k, "shard_parts": [1, 2]})  # fmt: skip
    refused("shard_totals are .4,., wanted one for each of 2 parts",
            {**k, "head_group": "", "shard_parts": [1, 1], "shard_totals": [4]})  # fmt: skip
    refused("head_group is 'kv', but the axis has parts", {**k, "shard_parts": [1, 1]})
    refused("2 ranks with 2 entries each hold 4, wanted 8", {**k, "shard_totals": [8]})
    refused("a part of 3 entries in all has 2 on a rank", {**k, "shard_totals": [3]})
    refused("shard_axis is 0, wanted an axis that holds no tokens",
            {**k, "rows": "page", "row_shape": [4, 8], "token_axis": 0})  # fmt: skip
    layout = CacheLayout.from_description({"page_size": 4, "num_layers": 1, "pools": [k]})
    assert layout.pools[0].shard_totals == (2,)
    assert layout.bind(make_tensors(layout, 2)).pools[0].shard_dim == 1
