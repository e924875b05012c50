"""Objects of one number of ranks read by another: every byte, and what is refused."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded import ALL_POOLS, Model, Rank, bytes_of, deployment, load, twin_of

from kvferry.errors import LayoutError
from kvferry.identity import ModelIdentity
from kvferry.kernels.pack import Packer
from kvferry.layout import CacheLayout
from kvferry.pools import PoolTensors
from kvferry.reshard import ReshardPlan, plan_reshard
from kvferry.testing import POISON

TP_SIZES = (1, 2, 4, 8)
TOKEN_POOLS = ("k", "v", "latent", "index")
MEMORIES = ("nhd", "hnd")


def check_coverage(plan: ReshardPlan, reader: Rank) -> None:
    """Every byte of the reader's page is written by exactly one source, no other byte by any."""
    layout = reader.layout
    for space, number in itertools.product(layout.spaces, range(plan.reader_pages)):
        sources = plan.sources_of(space, number)
        for buffer in layout.buffers[space]:
            assert buffer.tensor is not None
            counts = torch.zeros_like(bytes_of(buffer.tensor))
            for segment in (each for source in sources for each in source.segments):
                if segment.tensor is buffer.tensor:
                    _count(counts, segment.address - bytes_of(buffer.tensor).data_ptr(), segment)
            wanted = torch.zeros_like(counts)
            pages = reader.paged(twin_of(buffer.tensor, wanted), buffer.pool.name)
            pages[0] = torch.full((pages.element_size(),), 1, dtype=torch.uint8).view(pages.dtype)
            assert torch.equal(counts, wanted), f"{buffer.pool.name} layer {buffer.layer_id}"


def _count(counts: torch.Tensor, start: int, segment: Any) -> None:
    for part in range(segment.count):
        first = start + part * segment.pool_pitch_bytes
        counts[first : first + segment.part_bytes] += 1


def check_ranges(plan: ReshardPlan) -> None:
    """The ranges of an object are the bytes that its segments read, and no others."""
    for source in plan.sources:
        offsets = source.layout.layer_offsets[source.space]
        needed = torch.zeros(source.object_bytes, dtype=torch.bool)
        for segment in source.segments:
            for part in range(segment.count):
                first = segment.object_offset + part * segment.object_pitch_bytes
                assert not needed[first : first + segment.part_bytes].any()
                needed[first : first + segment.part_bytes] = True
        ranged = torch.zeros_like(needed)
        ranges = source.byte_ranges()
        for each in ranges:
            end = each.offset_bytes + each.num_bytes
            assert offsets[each.layer_id] <= each.offset_bytes < end <= offsets[each.layer_id + 1]
            ranged[each.offset_bytes : end] = True
        assert torch.equal(needed, ranged)
        assert source.num_bytes == int(needed.sum()) == sum(each.num_bytes for each in ranges)
        layers = {segment.layer_id for segment in source.segments}
        assert len(source.byte_ranges(gap_bytes=source.object_bytes)) == len(layers)


@pytest.mark.parametrize("order", ["pool", "canonical"])
@pytest.mark.parametrize(("wrote", "reads"), list(itertools.product(TP_SIZES, TP_SIZES)))
def test_any_tensor_parallel_size_reads_any_other(wrote: int, reads: int, order: str) -> None:
    model = Model(tokens=12, num_states=2)
    for here, there in itertools.product(MEMORIES, MEMORIES):
        writers = deployment(model, 4, wrote, memory=here, order=order)
        for rank in range(reads):
            reader = Rank(model, 4, tp=(rank, reads), memory=there, order=order, padding=1)
            plan = load(writers, reader)
            reader.check()
            check_coverage(plan, reader)
            check_ranges(plan)


@pytest.mark.parametrize(("wrote", "reads"), list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_any_number_of_token_owners_reads_any_other(wrote: int, reads: int) -> None:
    model = Model(tokens=24, num_states=2)
    for tp_wrote, tp_reads in [(1, 1), (2, 1), (1, 4)]:
        for memory in MEMORIES:
            writers = deployment(model, 8 // wrote, tp_wrote, wrote, memory=memory)
            for tp, dcp in itertools.product(range(tp_reads), range(reads)):
                reader = Rank(model, 8 // reads, tp=(tp, tp_reads), dcp=(dcp, reads), padding=1)
                plan = load(writers, reader)
                reader.check()
                check_coverage(plan, reader)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((4, 1), (2, 1)), ((2, 1), (8, 1)), ((4, 2), (4, 1)), ((4, 1), (4, 2)), ((2, 4), (8, 3)),
     ((12, 2), (2, 4)), ((3, 1), (1, 3)), ((1, 6), (3, 4))],
)  # fmt: skip
def test_pages_of_other_sizes(wrote: tuple[int, int], reads: tuple[int, int]) -> None:
    model = Model(tokens=24, pools=TOKEN_POOLS)
    writers = deployment(model, wrote[0], 2, wrote[1])
    for tp, dcp in itertools.product(range(4), range(reads[1])):
        reader = Rank(model, reads[0], tp=(tp, 4), dcp=(dcp, reads[1]), memory="hnd")
        plan = load(writers, reader)
        reader.check()
        check_coverage(plan, reader)
        check_ranges(plan)


@pytest.mark.parametrize(("tp_size", "dcp_size", "pools"), [
    (8, 2, ALL_POOLS), (8, 8, ("latent", "index", "conv", "ssm")), (4, 2, ("latent", "ssm")),
])  # fmt: skip
def test_token_owners_inside_the_tensor_parallel_ranks(
    tp_size: int, dcp_size: int, pools: tuple[str, ...]
) -> None:
    model = Model(tokens=16, pools=pools)
    writers = deployment(model, 8 // dcp_size, tp_size, dcp_size, in_tp=True)
    for tp in range(4):
        reader = Rank(model, 8, tp=(tp, 4))
        check_coverage(load(writers, reader, in_tp=True), reader)
        reader.check()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("wrote", "reads", "memory", "order"),
    [((2, 1), (4, 1), "hnd", "pool"), ((8, 1), (1, 1), "nhd", "canonical"),
     ((2, 2), (1, 4), "nhd", "pool"), ((4, 1), (8, 2), "hnd", "canonical")],
)  # fmt: skip
def test_through_the_kernels(
    wrote: tuple[int, int], reads: tuple[int, int], memory: str, order: str, device: torch.device
) -> None:
    model = Model(tokens=16, k_dim=32, v_dim=24, num_states=2)
    writers = deployment(
        model, 8 // wrote[1], wrote[0], wrote[1], memory=memory, order=order, device=device
    )
    for tp, dcp in {(0, 0), (reads[0] - 1, reads[1] - 1)}:
        reader = Rank(
            model, 8 // reads[1], tp=(tp, reads[0]), dcp=(dcp, reads[1]), padding=1, order=order,
            device=device,
        )  # fmt: skip
        load(writers, reader, path="triton")
        reader.check()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, dict[str, Any], dict[str, Any], bool]:
    """A model, and two deployments of it that can read each other."""
    tp = [draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in range(2)]
    dcp = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(2)]

    def heads() -> int:
        return draw(
            st.integers(1, 12).filter(lambda n: all(n % size == 0 or size % n == 0 for size in tp))
        )

    page = draw(st.integers(1, 3)) * math.lcm(*dcp)
    ratio = draw(st.sampled_from([1, 1, 1, 2, 3]))
    pages = draw(st.permutations([page, page * ratio]))
    num_heads = heads()
    in_tp = tp[0] % dcp[0] == 0 and draw(st.booleans())
    pools = set(draw(st.sets(st.sampled_from(ALL_POOLS), min_size=1)))
    if ratio > 1:
        pools -= {"conv", "ssm"}
    if in_tp and (tp[0] < num_heads or tp[0] // num_heads % dcp[0]):
        pools -= {"k", "v"}  # ranks with other heads would own the missing tokens
    unit = math.lcm(*tp)
    model = Model(
        tokens=page * ratio * draw(st.integers(1, 2)),
        heads=num_heads,
        k_dim=draw(st.integers(1, 9)),
        v_dim=draw(st.integers(1, 9)),
        latent_dim=draw(st.integers(1, 20)),
        channels=tuple(unit * draw(st.integers(1, 2)) for _ in range(3)),
        state_heads=heads(),
        num_states=draw(st.integers(1, 2)),
        layers=draw(st.integers(1, 2)),
        pools=tuple(name for name in ALL_POOLS if name in (pools or {"latent"})),
    )
    sides = [
        {
            "page_size": pages[side] // dcp[side],
            "tp_size": tp[side],
            "dcp_size": dcp[side],
            "memory": draw(st.sampled_from(MEMORIES)),
            "padding": draw(st.sampled_from([0, 0, 1, 2])),
            "order": draw(st.sampled_from(["pool", "canonical"])),
        }
        for side in range(2)
    ]
    return model, sides[0], sides[1], in_tp


def check_case(case: tuple[Model, dict[str, Any], dict[str, Any], bool], path: str) -> None:
    model, wrote, reads, in_tp = case
    writers = deployment(model, in_tp=in_tp, **wrote)
    tp_size, dcp_size = reads.pop("tp_size"), reads.pop("dcp_size")
    ranks = list(itertools.product(range(tp_size), range(dcp_size)))
    for tp, dcp in ranks if path == "reference" else ranks[-1:]:
        reader = Rank(model, tp=(tp, tp_size), dcp=(dcp, dcp_size), **reads)
        plan = load(writers, reader, in_tp=in_tp, path=path)
        reader.check()
        check_coverage(plan, reader)
        check_ranges(plan)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_model_and_any_ranks(case: Any) -> None:
    check_case(case, "reference")


@pytest.mark.interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="random models are built on the CPU")
@settings(
    max_examples=max(20, settings().max_examples // 10),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_any_model_and_any_ranks_through_the_kernels(case: Any) -> None:
    check_case(case, "triton")


@pytest.mark.parametrize("order", ["pool", "canonical"])
def test_the_same_ranks_read_their_own_objects_whole(order: str) -> None:
    model = Model(tokens=8, heads=2)
    for tp, dcp in itertools.product(range(8), range(2)):
        mine = Rank(model, 4, tp=(tp, 8), dcp=(dcp, 2), order=order, padding=1).layout
        plan = plan_reshard(mine.of_rank(ModelIdentity(tp=(0, 8), dcp=(0, 2), model="small")), mine,
                            dcp_in_tp=False)  # fmt: skip
        assert (plan.reader_pages, plan.writer_pages) == (1, 1)
        assert [source.space for source in plan.sources] == ["full", "state"]
        for source in plan.sources:
            assert source.identity == mine.identity
            assert source.layout.fingerprint == mine.fingerprint
            assert source.num_bytes == source.object_bytes == mine.object_bytes[source.space]
            moved = {(each.address, each.object_offset) for each in source.segments}
            if order == "canonical":
                assert moved == {(s.address, s.object_offset) for s in mine.segments(source.space)}


def test_readers_take_as_few_objects_as_hold_their_bytes_and_spread_over_replicas() -> None:
    def taken(wrote: int, reads: int, *pools: str) -> list[list[int]]:
        model = Model(tokens=4, pools=pools)
        writer = Rank(model, 4, tp=(0, wrote)).layout
        return [
            [source.identity.tp[0] for source in plan_reshard(
                writer, Rank(model, 4, tp=(rank, reads)).layout).sources]
            for rank in range(reads)
        ]  # fmt: skip

    assert taken(2, 4, "k") == [[0], [0], [1], [1]]
    assert taken(4, 2, "k", "v", "latent") == [[0, 1], [2, 3]]
    assert taken(8, 2, "k") == [[0, 2], [4, 6]]  # 4 heads, each on two ranks
    assert taken(8, 8, "k") == [[rank] for rank in range(8)]
    assert taken(8, 4, "latent") == [[0], [2], [4], [6]]
    assert taken(2, 8, "latent") == [[rank // 4] for rank in range(8)]


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("tail", ["zero", "keep"])
def test_the_last_page_in_part(path: str, tail: str, device: torch.device) -> None:
    model = Model(tokens=8, k_dim=32, pools=TOKEN_POOLS)
    writers = deployment(model, 4, 4, 2, device=device)
    reader = Rank(model, 8, tp=(1, 2), memory="hnd", device=device)
    whole = Rank(model, 8, tp=(1, 2), memory="hnd", device=device)
    plan = plan_reshard(writers[0, 0].layout, reader.layout, dcp_in_tp=False, by_token=True)
    for source in plan.sources:
        writer = writers[source.identity.tp[0], source.identity.dcp[0]]
        stride = -(-source.object_bytes // 16) * 16
        objects = writer.objects("full", stride, "reference").flatten()
        packer = Packer(reader.layout, "full", segments=source.segments, objects_of=source.layout)
        packer.unpack(
            reader.page_ids["full"], objects, stride_bytes=stride, tail_tokens=5, tail=tail,
            backend=path,
        )  # fmt: skip
    whole.write()
    filler = 0 if tail == "zero" else POISON
    for name in ("k", "v"):
        for layer in range(model.layers):
            pages = whole.tensors[name][layer][whole.page_ids["full"]]
            pages.view(torch.uint8)[:, :, 5:] = filler
            got = reader.tensors[name][layer][reader.page_ids["full"]]
            assert torch.equal(got, pages)


@pytest.mark.parametrize(("wrote", "reads"), [(4, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("behind", [0, 5])
def test_pages_of_planes_with_bytes_behind_the_tokens(wrote: int, reads: int, behind: int) -> None:
    def layout(page_size: int, num_bytes: int, *rows: list[int]) -> CacheLayout:
        pages = torch.tensor([row + [99] * num_bytes for row in rows], dtype=torch.uint8)
        pool = PoolTensors("index", "full", "page", {0: pages}, token_planes=(2, 1))
        return CacheLayout.from_tensors([pool], page_size=page_size, num_layers=1)

    def planes(tokens: list[int]) -> list[int]:
        return [each for token in tokens for each in (token, token + 20)] + [
            token + 40 for token in tokens
        ]

    def dealt(page_size: int) -> list[list[int]]:
        return [planes([*range(i, i + page_size)]) for i in range(0, 4, page_size)]

    writer = layout(wrote, 3, *dealt(wrote))
    reader = layout(reads, behind, *([[99] * (3 * reads)] * (4 // reads)))
    plan = plan_reshard(writer, reader)
    for source in plan.sources:
        objects = torch.zeros(4 // wrote, 32, dtype=torch.uint8)
        Packer(writer, "full").pack([*range(4 // wrote)], objects.flatten(), stride_bytes=32)
        pairs = plan.page_pairs(source, 4 // reads)
        packer = Packer(reader, "full", segments=source.segments, objects_of=source.layout)
        theirs = objects[[page for _, page in pairs]].flatten()
        packer.unpack([page for page, _ in pairs], theirs, stride_bytes=32)
    (buffer,) = reader.buffers["full"]
    assert buffer.tensor is not None
    assert buffer.tensor.tolist() == [row + [99] * behind for row in dealt(reads)]


def small(**changes: Any) -> CacheLayout:
    """A layout of one page-row pool of 2 of 4 heads, with changes to the pool or to the rest."""
    pool = {"name": "k", "index": "full", "rows": "page", "row_shape": [2, 4, 8], "layers": [0, 1],
            "dtype": "bfloat16", "token_axis": 1, "shard_axis": 0}  # fmt: skip
    identity = {"model": "m", "tp": (0, 2)}
    rest: dict[str, Any] = {"page_size": 4, "num_layers": 2}
    for key, value in changes.items():
        part = identity if hasattr(ModelIdentity, key) else rest if key in rest else pool
        part[key.removeprefix("pool_")] = value
    return CacheLayout.from_description(
        {**rest, "pools": [pool]}, identity=ModelIdentity(**identity)
    )


@pytest.mark.parametrize(
    ("wrote", "wanted", "match"),
    [
        ({"model": "n"}, {}, "model: the writer has 'n', the reader 'm'"),
        ({"revision": "a"}, {}, "revision: the writer has 'a', the reader ''"),
        ({"kv_dtype": "fp8"}, {}, "kv_dtype: the writer has 'fp8', the reader ''"),
        ({"draft": "d"}, {}, "draft: the writer has 'd', the reader ''"),
        ({"config": "c"}, {}, "config: the writer has 'c', the reader ''"),
        ({"generation": "2"}, {}, "generation: the writer has '2', the reader ''"),
        ({"pp": (1, 3), "layers": (2, 4)}, {"pp": (1, 3), "layers": (2, 5)},
         r"layers: the writer has \(2, 4\), the reader \(2, 5\)"),
        ({"pp": (0, 2), "layers": (0, 2)}, {}, r"pp: the writer has \(0, 2\), the reader \(0, 1\)"),
        ({"cp": (0, 2)}, {}, r"cp: the writer has \(0, 2\), the reader \(0, 1\)"),
        ({"num_layers": 3}, {}, "num_layers: the writer has 3, the reader 2"),
        ({"name": "kv"}, {}, r"pool 'k': the writer has \['kv'\] only"),
        ({"pool_layers": [0]}, {}, "pool 'k' layer 1: the writer has no such layer"),
        ({"index": "swa"}, {}, "pool 'k': index space is swa for the writer, full for the reader"),
        ({"dtype": "float16"}, {}, "pool 'k': dtype is float16 for the writer, bfloat16 for"),
        ({"row_shape": [1, 4, 8]}, {}, r"shard_totals is \(2,\) for the writer, \(4,\) for"),
        ({"shard_axis": None}, {}, "shard_axis is not described for the writer, described for"),
        ({"token_axis": None}, {}, "token_axis is not described for the writer, described for"),
        ({"row_shape": [2, 4, 16]}, {}, r"dimensions \[16\] for the writer, \[8\] for the reader"),
        ({"row_shape": [2, 4, 2, 4]}, {}, r"dimensions \[2, 4\] for the writer, \[8\] for"),
        ({"token_axis": None, "token_planes": (8,)}, {"token_axis": None}, "token_planes is"),
        ({"page_size": 3, "row_shape": [2, 3, 8]}, {}, "3 tokens .3 on each of 1 dcp ranks., want"),
        ({"dcp": (0, 2)}, {}, "none of them owns the tokens of dcp rank 1"),
        ({"dcp": (0, 3)}, {}, "rank 0 of 2 in tp is rank 0 of 3 in dcp, wanted"),
        ({"dcp": (1, 2)}, {}, "rank 0 of 2 in tp is rank 1 of 2 in dcp, wanted"),
        ({"index": "state", "token_axis": None, "page_size": 8},
         {"index": "state", "token_axis": None}, "pool 'k': a state stands at the end of a page"),
        ({"token_axis": None, "page_size": 8}, {"token_axis": None}, "pool 'k': its pages cannot"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(
    wrote: dict[str, Any], wanted: dict[str, Any], match: str
) -> None:
    if wrote.get("token_planes"):
        wrote = {**wrote, "shard_axis": None}
        wanted = {**wanted, "shard_axis": None}
    reader = small(**wanted)
    plan_reshard(reader, reader)
    with pytest.raises(LayoutError, match=match):
        plan_reshard(small(**wrote), reader)


def test_scattered_pages_are_refused() -> None:
    def layout(order: str) -> CacheLayout:
        pool = {"name": "k", "index": "full", "rows": "page", "row_shape": [65, 65, 64, 2],
                "layers": [0], "dtype": "uint8", "order": [int(dim) for dim in order]}  # fmt: skip
        return CacheLayout.from_description({"page_size": 64, "num_layers": 1, "pools": [pool]})

    with pytest.raises(LayoutError, match="4160 segments of 65 parts of 2 bytes, wanted at most"):
        plan_reshard(layout("2103"), layout("0123"))


def test_the_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    guide = Path(__file__).parent.parent / "docs" / "resharding.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(example, str(guide), "exec"), {})
    assert capsys.readouterr().out == "rank 2 of 4: 2 objects, 4 ranges of 1024 bytes and more\n"
