"""Pack and unpack, byte for byte: every path, every layout, neighbours guarded."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions
from kvferry.pools import PoolTensors
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    make_tensors,
    object_bytes_of,
    poison,
    write_telling,
)

GUARD_BYTES = 64
POOL_LIMIT_BYTES = 4 << 30
INTERPRETED_LIMIT_BYTES = 6 << 20  # the interpreter moves some 0.02 to 0.1 GB/s
PATHS = ("reference", "triton")


def objects_for(
    device: torch.device, num_objects: int, stride: int, misalign: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return poisoned memory for objects, and the whole of it with guards on both sides."""
    whole = torch.full(
        (num_objects * stride + 2 * GUARD_BYTES + 16,), POISON, dtype=torch.uint8, device=device
    )
    start = GUARD_BYTES + -whole.data_ptr() % 16 + misalign
    return whole[start : start + num_objects * stride], whole


def round_trip(
    layout: CacheLayout,
    space: str,
    path: str,
    num_pages: int,
    *,
    config: LaunchConfig | None = None,
    stride_slack: int = 0,
    misalign: int = 0,
    splits: Sequence[Sequence[int] | None] = (None,),
    seed: int = 0,
) -> None:
    """Pack telling pages, compare with objects made without a pack, unpack elsewhere, compare."""
    packer = Packer(layout, space, config or LaunchConfig())
    assert layout.device is not None
    pages = random.Random(seed).sample(range(layout.num_pages[space]), 2 * num_pages)
    sources, destinations = pages[:num_pages], pages[num_pages:]
    poison(layout)
    write_telling(layout, space, sources, sources)
    object_bytes = layout.object_bytes[space]
    stride = object_bytes + stride_slack
    objects, whole = objects_for(layout.device, num_pages, stride, misalign)
    for layers in splits:
        packer.pack(sources, objects, stride_bytes=stride, layers=layers, backend=path)
    wanted = whole.clone()
    start = objects.storage_offset()
    wanted[start : start + num_pages * stride].view(num_pages, stride)[:, :object_bytes] = (
        object_bytes_of(layout, space, sources)
    )
    assert torch.equal(whole, wanted)
    check_poison(layout, space, sources)
    check_telling(layout, space, sources, sources)
    for layers in splits:
        packer.unpack(destinations, objects, stride_bytes=stride, layers=layers, backend=path)
    check_telling(layout, space, destinations, sources)
    check_telling(layout, space, sources, sources)
    check_poison(layout, space, pages)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("model", sorted(descriptions()))
def test_every_model_at_full_geometry(model: str, device: torch.device) -> None:
    layout = CacheLayout.from_description(description(model))
    assert 8 * sum(layout.object_bytes.values()) <= POOL_LIMIT_BYTES
    layout = layout.bind(make_tensors(layout, 8, device))
    for space in layout.spaces:
        slack = -layout.object_bytes[space] % 16
        for path in PATHS if device.type == "cuda" else ("reference",):
            round_trip(layout, space, path, 4, stride_slack=slack)


def thinned(model: str) -> dict[str, Any]:
    """A model with as few layers as still show its kinds, for the interpreter."""
    plain = description(model)
    kept = sorted({layer for pool in plain["pools"] for layer in pool["layers"][:1]})
    pools = [
        {**pool, "layers": [kept.index(layer) for layer in pool["layers"] if layer in kept]}
        for pool in plain["pools"]
    ]
    return {"page_size": plain["page_size"], "num_layers": len(kept), "pools": pools}


@pytest.mark.interpreter
def test_a_budget_bounds_the_programs_of_every_launch(device: torch.device) -> None:
    layout = CacheLayout.from_description(thinned("deepseek-v3.2-dsa-fp8"))
    layout = layout.bind(make_tensors(layout, 8, device))
    for space, budget in itertools.product(layout.spaces, (0, 1, 5)):
        config = LaunchConfig(max_programs=budget)
        packer = Packer(layout, space, config)
        ids = PageIds.check(layout, space, list(range(6)), unique=True)
        move = packer.describe(0, ids, 1 << 20, 1 << 20, ((0, layout.num_layers),))
        launches = list(packer.launches(move))
        assert launches
        for launch in launches:
            num_programs = launch.grid[0] * launch.grid[1]
            assert num_programs <= budget or not budget
            assert launch.constants[-2] == (0 < budget == num_programs)
        for path in PATHS if device.type == "cuda" else ("triton",):
            round_trip(layout, space, path, 4, config=config, stride_slack=16)


@pytest.mark.interpreter
@pytest.mark.parametrize("model", sorted(descriptions()))
def test_every_model_through_the_kernels(model: str, device: torch.device) -> None:
    layout = CacheLayout.from_description(thinned(model))
    layout = layout.bind(make_tensors(layout, 5, device))
    for space in layout.spaces:
        num_pages = 2 if layout.object_bytes[space] < INTERPRETED_LIMIT_BYTES else 1
        round_trip(
            layout, space, "triton", num_pages, stride_slack=-layout.object_bytes[space] % 16
        )


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("misalign", [0, 8, 4, 2, 1])
def test_objects_at_any_alignment(path: str, misalign: int, device: torch.device) -> None:
    layout = CacheLayout.from_description({
        "page_size": 4,
        "num_layers": 2,
        "pools": [
            {"name": "k", "index": "full", "rows": "token", "row_shape": [4, 128],
             "dtype": "bfloat16", "layers": [0, 1]},
            {"name": "scale", "index": "full", "rows": "token", "row_shape": [4],
             "dtype": "float32", "layers": [1]},
        ],
    })  # fmt: skip
    layout = layout.bind(make_tensors(layout, 9, device))
    round_trip(layout, "full", path, 4, misalign=misalign)
    round_trip(layout, "full", path, 3, stride_slack=misalign)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
def test_any_subset_of_layers(path: str, device: torch.device) -> None:
    layout = CacheLayout.from_description(thinned("deepseek-v4-flash"))
    layout = layout.bind(make_tensors(layout, 4, device))
    everything = list(range(layout.num_layers))
    for space in layout.spaces:
        slack = -layout.object_bytes[space] % 16
        splits = [everything[::2], [], everything[1::2]]
        round_trip(layout, space, path, 1, splits=splits, stride_slack=slack)


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS)
def test_a_layer_group_alone_in_its_own_memory(path: str, device: torch.device) -> None:
    plain = thinned("qwen3-8b-fp8-scales")
    for pool in plain["pools"]:
        pool["layers"] = [0, 1, 2]
    layout = CacheLayout.from_description({**plain, "num_layers": 3})
    layout = layout.bind(make_tensors(layout, 6, device))
    packer = Packer(layout, "full")
    first, end = layout.layer_offsets["full"][1:3]
    pages = [5, 0, 3]
    write_telling(layout, "full", pages, pages)
    objects, whole = objects_for(device, 3, end - first)
    packer.pack(
        pages, objects, stride_bytes=end - first, layers=[1], origin_bytes=first, backend=path
    )
    wanted = object_bytes_of(layout, "full", pages)[:, first:end]
    assert torch.equal(objects.view(3, -1), wanted)
    assert int((whole != POISON).sum()) <= wanted.numel()


@st.composite
def bound_layouts(draw: st.DrawFn) -> CacheLayout:
    """Random pools over views with odd strides, offsets and alignments, in guarded storage."""
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    num_layers = draw(st.integers(1, 12))
    num_pages = draw(st.integers(2, 5))
    pools = []
    for number in range(draw(st.integers(1, 6))):
        space = draw(st.sampled_from(["full", "full", "swa", "state"]))
        rows = "page" if space == "state" else draw(st.sampled_from(["token", "page"]))
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
        row_shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
        wider = [draw(st.integers(0, 2)) for _ in row_shape]
        skip = draw(st.sampled_from([0, 1, 2, 8, 16]))
        num_rows = num_pages * (page_size if rows == "token" else 1) + draw(st.integers(0, 2))
        order = draw(st.permutations(range(len(row_shape))))
        pools.append(
            PoolTensors(
                f"pool{number}",
                space,
                rows,
                {
                    layer: _view(num_rows, row_shape, wider, order, skip, dtype)
                    for layer in sorted(layers)
                },
            )
        )
    return CacheLayout.from_tensors(
        pools, page_size=page_size, num_layers=num_layers, window_tokens=page_size
    )


def _view(
    num_rows: int,
    row_shape: list[int],
    wider: list[int],
    order: list[int],
    skip: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A slice of a wider tensor whose row dimensions lie in memory in `order`."""
    full = [row_shape[dim] + wider[dim] for dim in order]
    size = num_rows
    for width in full:
        size *= width
    memory = torch.full(((size + skip) * dtype.itemsize + 8,), POISON, dtype=torch.uint8)
    whole = memory[: (size + skip) * dtype.itemsize].view(dtype)[skip:].view(num_rows, *full)
    back = [order.index(dim) for dim in range(len(order))]
    whole = whole.permute(0, *(1 + dim for dim in back))
    for dim, width in enumerate(wider):
        whole = whole.narrow(1 + dim, width // 2, row_shape[dim])
    return whole


def _storages(layout: CacheLayout) -> list[torch.Tensor]:
    tensors = [b.tensor for row in layout.buffers.values() for b in row if b.tensor is not None]
    return [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in tensors]


def check_any_layout(layout: CacheLayout, path: str, data: st.DataObject) -> None:
    for space in layout.spaces:
        num_pages = data.draw(st.integers(1, layout.num_pages[space] // 2), label="num_pages")
        cuts = data.draw(st.sets(st.integers(1, max(1, layout.num_layers - 1))), label="cuts")
        edges = [0, *sorted(cut for cut in cuts if cut < layout.num_layers), layout.num_layers]
        splits = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
        slack = data.draw(st.integers(0, 17), label="slack")
        misalign = data.draw(st.sampled_from([0, 0, 1, 4, 8]), label="misalign")
        seed = data.draw(st.integers(0, 99), label="seed")
        budget = data.draw(st.sampled_from([0, 1, 3]), label="max_programs")
        # Bytes between the runs must stay: poison them, and count what may have changed.
        for storage in _storages(layout):
            storage.fill_(POISON)
        round_trip(
            layout,
            space,
            path,
            num_pages,
            config=LaunchConfig(
                tile_bytes=1024, units_per_program=32, page_run_bytes=64, max_programs=budget
            ),
            stride_slack=slack,
            misalign=misalign,
            splits=splits,
            seed=seed,
        )
        poison(layout)
        for storage in _storages(layout):
            assert bool((storage == POISON).all()), "bytes outside the pages were written"


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(bound_layouts(), st.data())
def test_any_layout_by_the_reference(layout: CacheLayout, data: st.DataObject) -> None:
    check_any_layout(layout, "reference", data)


@pytest.mark.interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="random layouts are built on the CPU")
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(bound_layouts(), st.data())
def test_any_layout_by_the_kernels(layout: CacheLayout, data: st.DataObject) -> None:
    check_any_layout(layout, "triton", data)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("budget", [0, 2])
def test_an_id_outside_the_pools_reaches_no_memory(
    device: torch.device, dtype: torch.dtype, budget: int
) -> None:
    # Checked ids never are; this is the kernels' own guard, should memory be corrupted later.
    layout = CacheLayout.from_description(thinned("qwen3-8b-fp8-scales"))
    layout = layout.bind(make_tensors(layout, 3, device))
    packer = Packer(layout, "full", LaunchConfig(max_programs=budget))
    far = 1 << 40 if dtype == torch.int64 else -(1 << 31)
    ids = PageIds(torch.tensor([-1, 3, far], dtype=dtype, device=device), unique=True)
    objects, whole = objects_for(device, 3, layout.object_bytes["full"])
    packer.pack(ids, objects, backend="triton")
    packer.unpack(ids, objects, backend="triton")
    assert bool((whole == POISON).all())
    check_poison(layout, "full", [])


def test_wrong_arguments_are_refused_before_anything_moves(device: torch.device) -> None:
    plain = CacheLayout.from_description(description("odd-bytes"))
    with pytest.raises(ArgumentError, match=r"not bound.*layout\.bind"):
        Packer(plain, "full")
    layout = plain.bind(make_tensors(plain, 8, device))
    with pytest.raises(ArgumentError, match="space is 'swa'"):
        Packer(layout, "swa")
    packer = Packer(layout, "full")
    objects, whole = objects_for(device, 2, 210)

    def refused(match: str, ids: Any = (1, 2), target: Any = None, **changes: Any) -> None:
        for move in (packer.pack, packer.unpack):
            with pytest.raises(ArgumentError, match=match):
                move(ids, objects if target is None else target, **changes)

    refused("page_ids hold 8, wanted 0 .. 7", ids=[1, 8])
    refused("objects are torch.int8", target=objects.view(torch.int8))
    refused("wanted contiguous uint8", target=objects[::2])
    refused(r"objects have 420 bytes, wanted at least 630 for 3 pages", ids=[1, 2, 3])
    refused("objects are on meta", target=torch.empty(420, dtype=torch.uint8, device="meta"))
    refused("stride_bytes is 209, wanted at least 210", stride_bytes=209)
    refused(r"layers are \[2\], wanted ids in 0 .. 1", layers=[2])
    refused(r"layers are \[1, 0\], wanted ascending", layers=[1, 0])
    refused("origin_bytes is 106, wanted 0 .. 105", layers=[1], origin_bytes=106)
    refused("backend is 'cuda'", backend="cuda")
    with pytest.raises(ArgumentError, match="page_ids hold 3 twice"):
        packer.unpack([3, 3], objects)
    assert bool((whole == POISON).all())
    check_poison(layout, "full", [])
    packer.pack([], objects)
    packer.pack([1, 2], objects, layers=[])
    assert bool((whole == POISON).all())
