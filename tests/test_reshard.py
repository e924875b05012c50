"""Objects of one number of ranks read by another: every byte, and what is refused."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded import ALL_POOLS, Model, Rank, bytes_of, deployment, load, twin_of

from kvferry.reshard import ReshardPlan

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
