"""Packers that take tuned numbers: other tiles and warps by size and direction, the same bytes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from linker_bed import Bed

from kvferry.errors import ArgumentError
from kvferry.kernels import pack
from kvferry.kernels.device import PACK, UNPACK
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.linker import crew
from kvferry.linker.config import LinkerConfig
from kvferry.linker.seal import Seal
from kvferry.linker.streams import Lane
from kvferry.testing import (
    check_poison,
    check_telling,
    make_tensors,
    object_bytes_of,
    poison,
    write_telling,
)
from kvferry.tuned import TunedClass, TunedLaunches, for_torch_device

SMALL = LaunchConfig(
    tile_bytes=1024, tile_warps=1, units_per_program=32, unit_warps=1, page_run_bytes=4096
)
LARGE = LaunchConfig(
    tile_bytes=4096, tile_warps=8, units_per_program=64, unit_warps=2, page_run_bytes=512
)
OTHER_WARPS = replace(SMALL, tile_warps=2, unit_warps=4)
BUDGET = replace(LARGE, tile_warps=4, max_programs=8)
EDGE_BYTES = 16384
"""Half way, by ratio, between the classes of 4 KiB and 64 KiB."""

MIXED = TunedLaunches(
    "mixed",
    (),
    "derived",
    (
        TunedClass("pack", 4096, SMALL),
        TunedClass("pack", 65536, LARGE),
        TunedClass("pack", 65536, BUDGET),
        TunedClass("unpack", 4096, OTHER_WARPS),
        TunedClass("unpack", 65536, SMALL),
    ),
)


@pytest.fixture
def layout(device: torch.device) -> CacheLayout:
    """Three layers of a long run, one of 1 KiB, and odd bytes: 5,704 bytes each."""
    pools = [
        {"name": name, "index": "full", "rows": "page", "row_shape": [size], "dtype": "uint8",
         "layers": [0, 1, 2]}
        for name, size in (("k", 4608), ("index", 1024), ("scale", 72))
    ]  # fmt: skip
    plain = CacheLayout.from_description({"page_size": 4, "num_layers": 3, "pools": pools})
    return plain.bind(make_tensors(plain, 9, device))


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "for_torch_device", lambda device: MIXED)


def launched(packer: Packer, kind: int, num_pages: int, end_layer: int) -> list[Any]:
    """Size and warps of each launch of a move of the first pages and layers."""
    ids = PageIds.check(packer.layout, "full", list(range(num_pages)), unique=True)
    stride = -(-packer.layout.object_bytes["full"] // 16) * 16
    move = packer.describe(kind, ids, 1 << 20, stride, ((0, end_layer),))
    return [(launch.constants[0], launch.num_warps) for launch in packer.launches(move)]


@pytest.mark.usefixtures("mixed")
def test_direction_and_bytes_pick_the_numbers(layout: CacheLayout) -> None:
    packer = Packer(layout, "full")
    size = layout.object_bytes["full"]
    assert size < EDGE_BYTES * 2 < 2 * size  # whole objects: one is large, a layer of it small
    small, large = [(1024, 1), (32, 1), (32, 1)], [(4096, 8), (64, 2)]
    assert launched(packer, PACK, 1, 1) == small
    assert launched(packer, PACK, 1, 3) == launched(packer, PACK, 4, 1) == large
    assert launched(packer, UNPACK, 1, 1) == [(1024, 2), (32, 4), (32, 4)]
    assert launched(packer, UNPACK, 4, 3) == small
    # One set of tables for all with tiles of 1 KiB, one for those with 4 KiB.
    assert len(packer._tables) == 2
    fixed = Packer(layout, "full", OTHER_WARPS)
    assert launched(fixed, PACK, 4, 3) == launched(fixed, UNPACK, 1, 1)


@pytest.mark.usefixtures("mixed")
def test_a_budget_is_kept_exactly(layout: CacheLayout) -> None:
    packer = Packer(layout, "full", max_programs=3)
    assert packer.max_programs == 3
    ids = PageIds.check(layout, "full", list(range(9)), unique=True)
    for kind in (PACK, UNPACK):
        move = packer.describe(kind, ids, 1 << 20, layout.object_bytes["full"], ((0, 3),))
        launches = list(packer.launches(move))
        assert launches
        assert all(launch.grid == (3, 1) for launch in launches)
    # 9 pages are of the class whose curve has numbers for a budget.
    assert launched(packer, PACK, 9, 3)[0] == (4096, 4)


@pytest.mark.interpreter
@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("max_programs", [0, 2])
def test_mixed_numbers_move_every_byte(
    layout: CacheLayout, device: torch.device, max_programs: int
) -> None:
    packer = Packer(layout, "full", max_programs=max_programs)
    size = layout.object_bytes["full"]
    for num_pages, splits in ((1, ([0, 1, 2],)), (4, ([0, 1, 2],)), (2, ([0], [1, 2]))):
        pages = random.Random(num_pages).sample(range(9), 2 * num_pages)
        sources, targets = pages[:num_pages], pages[num_pages:]
        poison(layout)
        write_telling(layout, "full", sources, sources)
        stride = -(-size // 16) * 16
        objects = torch.zeros(num_pages * stride, dtype=torch.uint8, device=device)
        for layers in splits:
            packer.pack(sources, objects, stride_bytes=stride, layers=layers, backend="triton")
        packed = objects.view(num_pages, stride)
        assert torch.equal(packed[:, :size], object_bytes_of(layout, "full", sources))
        assert not packed[:, size:].any()
        for layers in splits:
            packer.unpack(targets, objects, stride_bytes=stride, layers=layers, backend="triton")
        check_telling(layout, "full", targets, sources)
        check_telling(layout, "full", sources, sources)
        check_poison(layout, "full", pages)


def test_a_device_is_asked_its_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def name_of(device: torch.device) -> str:
        asked.append(device)
        return "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(torch.cuda, "get_device_name", name_of)
    for _ in range(3):
        assert for_torch_device(torch.device("cuda", 77)).gpu == "NVIDIA H100"
    assert asked == [torch.device("cuda", 77)]
    assert for_torch_device(torch.device("cpu")).gpu == "default"


def test_a_budget_is_refused_where_it_cannot_be(layout: CacheLayout) -> None:
    with pytest.raises(ArgumentError, match="max_programs is 4 and config has 2, wanted one"):
        Packer(layout, "full", LaunchConfig(max_programs=2), max_programs=4)
    with pytest.raises(ArgumentError, match=r"max_programs is -1, wanted 0"):
        Packer(layout, "full", max_programs=-1)
    with pytest.raises(ArgumentError, match=r"max_programs is -1, wanted 0 \.\. 2147483647"):
        LinkerConfig(max_programs=-1)
    with pytest.raises(ArgumentError, match="max_programs is 65537"):
        Packer(layout, "full", max_programs=65537)


@pytest.mark.mooncake
def test_a_linkers_budget_reaches_its_packers(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    class Noted(Packer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            budgets.append(self.max_programs)

    monkeypatch.setattr(crew, "Packer", Noted)
    linker = bed.linker(max_programs=5)
    assert budgets == [5] * len(linker.layout.spaces)


def test_objects_are_summed_under_the_budget(layout: CacheLayout, device: torch.device) -> None:
    for packer in (Packer(layout, "full", max_programs=3), Packer(layout, "full")):
        seal = Seal({"full": packer}, Lane(device), "auto")
        assert seal._sums["full"]._config == LaunchConfig(max_programs=packer.max_programs)
