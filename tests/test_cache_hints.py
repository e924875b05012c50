"""Cache hints: which there are, that bytes are the same with each, and that machine code has them.

What the compiler makes of them for a GPU is in `test_compiled.py`, the accesses are read here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.errors import ArgumentError
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import CACHE_HINTS, LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    make_tensors,
    object_bytes_of,
    poison,
    write_telling,
)
from kvferry.tuned import CONFIG_KEYS, parse
from kvferry.tuning.amd import read_amd
from kvferry.tuning.gate import hint_faults
from kvferry.tuning.inspection import Inspected

SMALL = LaunchConfig(tile_bytes=1024, units_per_program=64, page_run_bytes=1024)
GUARD_BYTES = 64


@pytest.fixture
def layout(device: torch.device) -> CacheLayout:
    """Two layers with runs for the page kernel, and of 16, 4 and 2 bytes at a time."""
    pools: list[dict[str, Any]] = [
        {"name": name, "index": "full", "rows": "token", "row_shape": [size], "dtype": "uint8",
         "layers": [0, 1]}
        for name, size in (("k", 1024), ("index", 48), ("scale", 10), ("odd", 9))
    ]  # fmt: skip
    plain = CacheLayout.from_description({"page_size": 2, "num_layers": 2, "pools": pools})
    return plain.bind(make_tensors(plain, 7, device))


@pytest.mark.interpreter
@pytest.mark.parametrize("hint", CACHE_HINTS)
@pytest.mark.parametrize("max_programs", [0, 2])
def test_bytes_are_the_same_with_each_hint(
    layout: CacheLayout, device: torch.device, hint: str, max_programs: int
) -> None:
    packer = Packer(layout, "full", replace(SMALL, cache=hint, max_programs=max_programs))
    size = layout.object_bytes["full"]
    stride = -(-size // 16) * 16
    sources, targets = [5, 0, 3], [6, 1, 4]
    poison(layout)
    write_telling(layout, "full", sources, sources)
    whole = torch.full((3 * stride + GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    objects = whole[: 3 * stride]
    sums = torch.zeros(3, 2, dtype=torch.int64, device=device)
    packer.pack(sources, objects, stride_bytes=stride, sums=sums, backend="triton")
    packed = objects.view(3, stride)
    assert torch.equal(packed[:, :size], object_bytes_of(layout, "full", sources))
    assert bool((packed[:, size:] == POISON).all() and (whole[3 * stride :] == POISON).all())
    again = torch.zeros_like(sums)
    packer.unpack(targets, objects, stride_bytes=stride, sums=again, backend="triton")
    assert torch.equal(sums, again)
    check_telling(layout, "full", targets, sources)
    check_telling(layout, "full", sources, sources)
    check_poison(layout, "full", [*sources, *targets])


@pytest.mark.interpreter
@pytest.mark.parametrize("hint", CACHE_HINTS)
@pytest.mark.parametrize("tail", ["zero", "keep"])
def test_tails_are_the_same_with_each_hint(
    layout: CacheLayout, device: torch.device, hint: str, tail: str
) -> None:
    size = layout.object_bytes["full"]
    generator = torch.Generator().manual_seed(1)
    objects = torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(device)
    found = []
    for backend in ("reference", "triton"):
        poison(layout)
        packer = Packer(layout, "full", replace(SMALL, cache=hint))
        packer.unpack([2], objects, tail_tokens=1, tail=tail, backend=backend)
        whole = torch.zeros(7 * size, dtype=torch.uint8, device=device)
        packer.pack(list(range(7)), whole, backend="reference")
        found.append(whole)
    assert torch.equal(*found)


def test_launches_carry_the_hint(layout: CacheLayout) -> None:
    ids = PageIds.check(layout, "full", [1, 2], unique=True)
    for place, hint in enumerate(CACHE_HINTS):
        packer = Packer(layout, "full", replace(SMALL, cache=hint))
        move = packer.describe(0, ids, 1 << 20, 1 << 20, ((0, 2),))
        launches = packer.launches(move)
        assert len(launches) == 4
        for launch in launches:
            names = launch.kernel.arg_names[-len(launch.constants) :]
            assert dict(zip(names, launch.constants, strict=True))["CACHE"] == place


def test_a_hint_is_one_of_those_there_are() -> None:
    assert LaunchConfig().cache == CACHE_HINTS[0] == "none"
    with pytest.raises(ArgumentError, match=r"cache is 'cg', wanted one of \('none', 'stream'"):
        LaunchConfig(cache="cg")


def content(**config: Any) -> dict[str, Any]:
    numbers = {"tile_bytes": 16384, "tile_warps": 4, "units_per_program": 1024, "unit_warps": 4,
               "page_run_bytes": 4096}  # fmt: skip
    entry = {"num_bytes": 1 << 20, "max_programs": 0, "config": {**numbers, **config}}
    return {
        "schema": 1, "gpu": "X", "device_names": ["X"], "origin": "derived",
        "architecture": "sm_90", "triton": "3.6.0",
        "classes": [{"direction": way, **entry} for way in ("pack", "unpack")],
    }  # fmt: skip


def test_a_file_may_name_a_hint_and_need_not() -> None:
    assert "cache" in CONFIG_KEYS
    assert parse(content(), "f").choose("pack", 1).cache == "none"
    for hint in CACHE_HINTS:
        assert parse(content(cache=hint), "f").choose("unpack", 1, 16).cache == hint
    for wrong in ("evict", 1, None, ""):
        with pytest.raises(ArgumentError, match=r"f: classes\[0\].config: cache is .*, wanted"):
            parse(content(cache=wrong), "f")


# ---- what is read from machine code ----

PLAIN = Inspected(
    "pack_tiles_id4", "sm_90", 4, 112, 45, 0, 0, 0, 16, {16: 8, 8: 4}, {16: 8}
)  # fmt: skip
STREAM = replace(PLAIN, cache="stream", evict_first_loads={16: 8}, evict_first_stores={16: 8})
KEEP = replace(PLAIN, cache="keep_written", evict_first_loads={16: 8})


@pytest.mark.parametrize(
    "row",
    [PLAIN, STREAM, KEEP, replace(STREAM, target="gfx942", evict_first_loads={}),
     replace(KEEP, target="gfx942", evict_first_loads={})],
)  # fmt: skip
def test_hints_that_are_wanted_pass(row: Inspected) -> None:
    assert hint_faults(row) == []


@pytest.mark.parametrize(
    ("row", "changes", "fault"),
    [
        (
            PLAIN,
            {"evict_first_loads": {8: 4}},
            "loads that are evicted first are {8: 4}, wanted {}",
        ),
        (PLAIN, {"evict_first_stores": {16: 8}}, "stores that are evicted first are {16: 8}, "),
        (STREAM, {"evict_first_loads": {}}, "wanted {16: 8} for cache 'stream'"),
        (STREAM, {"evict_first_loads": {16: 7}}, "loads that are evicted first are {16: 7}, "),
        (STREAM, {"evict_first_loads": {16: 8, 8: 4}}, "are {16: 8, 8: 4}, wanted {16: 8} for"),
        (STREAM, {"evict_first_stores": {}}, "stores that are evicted first are {}, wanted {16"),
        (KEEP, {"evict_first_loads": {}}, "wanted {16: 8} for cache 'keep_written'"),
        (KEEP, {"evict_first_stores": {16: 8}}, "are {16: 8}, wanted {} for cache 'keep_written'"),
        (STREAM, {"target": "gfx942"}, "loads that are evicted first are {16: 8}, wanted {}"),
    ],
)
def test_hints_that_are_not_are_named(row: Inspected, changes: dict[str, Any], fault: str) -> None:
    (found,) = hint_faults(replace(row, **changes))
    assert fault in found


def test_amds_assembly_says_what_is_non_temporal() -> None:
    found = read_amd("""
	global_load_dwordx4 v[2:5], v[0:1], off
	buffer_load_dwordx2 v[8:9], v0, s[4:7], 0 offen nt
	buffer_store_dwordx4 v[2:5], v0, s[4:7], 0 offen sc0 nt
	global_store_dword v[0:1], v6, off ; nt
  - .agpr_count:     0
    .private_segment_fixed_size: 0
    .sgpr_count:     34
    .sgpr_spill_count: 0
    .vgpr_count:     20
    .vgpr_spill_count: 0
""")
    assert found.stores == {16: 1, 4: 1}
    assert found.evict_first_loads == {8: 1}
    assert found.evict_first_stores == {16: 1}
