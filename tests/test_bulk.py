"""Bulk copies: how the ring is walked, which moves take them, who is refused, what is compiled.

No test runs the copies themselves, which needs a GPU: here a model of the ring stands for them,
which lets loads come as early and stores as late as the real one may.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import ArgumentError
from kvferry.kernels import bulk, pack
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.launch import BULK_TILE_BYTES, LaunchConfig
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
from kvferry.tuning.gate import bulk_faults
from kvferry.tuning.inspection import Inspected

BULK = LaunchConfig(form="bulk", max_programs=2, tile_bytes=8192, page_run_bytes=256)


class Ring:
    """The ring of one program at a time, by what PTX says of barriers and of groups of stores."""

    def __init__(self) -> None:
        self.num_loads = self.num_programs = 0

    def open_ring(self) -> int:
        self.num_programs += 1
        self.phases: dict[int, int] = {}
        self.notes: dict[int, tuple[int, int]] = {}
        self.loading: set[int] = set()
        self.memory: dict[int, bytes] = {}
        self.stores: list[tuple[int, int, int]] = []
        return 1 << 10

    def open_stage(self, note: Any) -> None:
        assert number(note) not in self.phases
        self.phases[number(note)] = 0

    def show_stages(self) -> None:
        assert len(self.phases) >= 2

    def start_load(self, stage: Any, note: Any, source: Any, target: Any, num_bytes: Any) -> None:
        self.finish_stores(but=1)
        at, place, size = number(note), number(stage), number(num_bytes)
        assert at not in self.loading, "a stage is loaded twice"
        assert 0 <= size <= BULK_TILE_BYTES
        assert size % 16 == number(source) % 16 == number(target) % 16 == 0 or not size
        self.loading.add(at)
        self.notes[at] = (number(target), size)
        self.memory[place] = ctypes.string_at(number(source), size) if size else b""
        self.num_loads += 1

    def start_store(self, stage: Any, note: Any, parity: Any) -> None:
        at = number(note)
        assert self.phases[at] % 2 == number(parity), "a phase that is over is waited for"
        self.loading.remove(at)  # else it waits for ever
        self.phases[at] += 1
        self.stores.append((number(stage), *self.notes[at]))

    def finish_stores(self, but: int) -> None:
        """Let all stores but the last ones read their stage, only now, and write."""
        while len(self.stores) > but:
            stage, target, size = self.stores.pop(0)
            ctypes.memmove(target, self.memory[stage][:size].ljust(size, b"?"), size)

    def close_ring(self) -> None:
        assert not self.loading
        self.finish_stores(but=0)


def number(value: Any) -> int:
    """What one of the interpreter's scalars holds."""
    if hasattr(value, "handle"):
        return int(value.handle.data.item())
    return int(getattr(value, "value", value))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    ring = Ring()
    for name in ("open_ring", "open_stage", "show_stages", "start_load", "start_store",
                 "close_ring"):  # fmt: skip
        monkeypatch.setattr(bulk, f"_{name}", getattr(ring, name))
    monkeypatch.setattr(pack, "check_device", lambda device: None)
    return ring


def layout_of(device: torch.device, *sizes: int) -> CacheLayout:
    """Two layers, each with a pool of pages of every size."""
    plain = CacheLayout.from_description({
        "page_size": 2,
        "num_layers": 2,
        "pools": [
            {"name": f"p{place}", "index": "full", "rows": "token", "row_shape": [size // 2],
             "dtype": "uint8", "layers": [0, 1]}
            for place, size in enumerate(sizes)
        ],
    })  # fmt: skip
    return plain.bind(make_tensors(plain, 13, device))


def narrow(pages: list[int]) -> PageIds:
    """Page ids of 32 bits, as transfers have them on a GPU."""
    return PageIds(torch.tensor(pages, dtype=torch.int32), unique=True)


def only_here(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the model of the ring copies on the host")


# ---- how the ring is walked ----


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("tile_bytes", "max_programs", "num_pages"),
    [(1024, 1, 1), (1024, 3, 6), (1024, 64, 4), (8192, 2, 6), (16384, 3, 1)],
)
def test_the_ring_moves_every_byte(
    device: torch.device,
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
    tile_bytes: int,
    max_programs: int,
    num_pages: int,
) -> None:
    only_here(device)
    monkeypatch.setattr(bulk, "RING_BYTES", max(4 * 1100, 3 * tile_bytes))  # 4 or 2 stages
    sizes = (tile_bytes * 3 + 4096, 256, 272, 48)
    layout = layout_of(device, *sizes)
    config = replace(BULK, max_programs=max_programs, tile_bytes=tile_bytes)
    packer = Packer(layout, "full", config)
    pages = random.Random(num_pages).sample(range(13), 2 * num_pages)
    sources, targets = pages[:num_pages], pages[num_pages:]
    poison(layout)
    write_telling(layout, "full", sources, sources)
    size = layout.object_bytes["full"]
    whole = torch.full((num_pages * size + 128,), POISON, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 16
    objects = whole[start : start + num_pages * size]
    packer.pack(narrow(sources), objects, backend="triton")
    assert torch.equal(objects.view(num_pages, size), object_bytes_of(layout, "full", sources))
    assert bool((whole[start + num_pages * size :] == POISON).all())
    packer.unpack(narrow(targets), objects, backend="triton")
    check_telling(layout, "full", targets, sources)
    check_telling(layout, "full", sources, sources)
    check_poison(layout, "full", pages)
    tables = packer._tables_for(16, False, config)
    assert tables.tiles is not None
    num_tiles = len(tables.tiles.rows) * num_pages
    assert num_tiles > 4 * num_pages
    assert ring.num_loads == 2 * num_tiles
    assert ring.num_programs == 2 * min(max_programs, num_tiles)


@pytest.mark.interpreter
def test_an_id_outside_the_pools_moves_nothing(device: torch.device, ring: Ring) -> None:
    only_here(device)
    layout = layout_of(device, 20480)
    poison(layout)
    packer = Packer(layout, "full", BULK)
    ids = narrow([-1, 13, 1 << 30])
    objects = torch.full((3 * 40960,), POISON, dtype=torch.uint8)
    packer.pack(ids, objects, backend="triton")
    objects.fill_(0)
    packer.unpack(ids, objects, backend="triton")
    assert not objects.any()
    check_poison(layout, "full", [])
    assert ring.num_loads == 2 * 3 * 2 * 3


# ---- which moves take it ----


def kernels_of(packer: Packer, **changes: Any) -> set[Any]:
    size = packer.layout.object_bytes["full"]
    move = packer.describe(0, narrow([4, 2]), 1 << 20, size, ((0, 2),))._replace(**changes)
    return {launch.kernel for launch in packer.launches(move)}


def test_only_what_asks_for_it_takes_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "check_device", lambda device: None)
    layout = layout_of(device, 20480)
    plain, taken = {_move_tiles_kernel}, {bulk._move_bulk_kernel}
    packer = Packer(layout, "full", BULK)
    assert kernels_of(packer) == kernels_of(packer, kind=1) == taken
    assert kernels_of(packer, id_bytes=8) == plain
    assert kernels_of(packer, sums_address=1 << 20) == plain
    assert kernels_of(packer, kind=1, tail=1, tail_tokens=1) == plain
    assert kernels_of(packer, kind=1, tail=2, tail_tokens=1) == plain
    assert kernels_of(Packer(layout, "full", replace(BULK, form="auto"))) == plain
    for max_programs in (0, 2):
        assert kernels_of(Packer(layout, "full", max_programs=max_programs)) == plain


def test_launches_are_the_page_kernels_but_for_the_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "check_device", lambda device: None)
    layout = layout_of(device, 20480)
    ids = narrow([4, 2])
    packers = [Packer(layout, "full", replace(BULK, form=form)) for form in ("bulk", "auto")]
    ours, theirs = (
        packer.launches(packer.describe(0, ids, 1 << 20, 40960, ((0, 2),))) for packer in packers
    )
    assert [launch.grid for launch in ours] == [launch.grid for launch in theirs]
    for launch, other in zip(ours, theirs, strict=True):
        assert launch.arguments[1:] == other.arguments[1:]  # but for where the tables are
        assert (launch.constants, launch.num_warps) == ((8192, 0, 5), 1)


# ---- who is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_programs": 0}, "form is 'bulk' and max_programs is 0, wanted a bound"),
        ({"tile_bytes": 32768}, "form is 'bulk' and tile_bytes is 32768, wanted at most 16384"),
        ({"cache": "stream"}, "form is 'bulk' and cache is 'stream', wanted 'none'"),
        ({"form": "tma"}, r"form is 'tma', wanted one of \('auto', 'bulk'\)"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(BULK, **changes)


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "fault"),
    [
        ("cpu", (0, 0), None, "the pools are on cpu, wanted an NVIDIA GPU of compute"),
        ("cuda:1", (8, 9), None, "on cuda:1, of compute capability 8.9, wanted .* 9.0 or newer"),
        ("cuda:1", (9, 4), "6.2", "the pools are on cuda:1, wanted an NVIDIA GPU"),
        ("cuda:1", (9, 0), None, ""),
        ("cuda:1", (12, 0), None, ""),
    ],
)
def test_devices_without_bulk_copies_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: tuple[int, int], hip: Any, fault: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    if not fault:
        bulk.check_device(torch.device(kind))
        return
    with pytest.raises(ArgumentError, match=f"form is 'bulk' and .*{fault}"):
        bulk.check_device(torch.device(kind))


def test_a_packer_asks_its_device(device: torch.device) -> None:
    only_here(device)
    with pytest.raises(ArgumentError, match="form is 'bulk' and the pools are on cpu"):
        Packer(layout_of(device, 4096), "full", BULK)


# ---- what is compiled ----


def test_stages_fit_in_what_a_kernel_may_have() -> None:
    assert bulk.RING_BYTES == 49152
    assert {size: bulk.num_stages(size) for size in (4096, 8192, BULK_TILE_BYTES)} == {
        4096: 11, 8192: 5, 16384: 2,
    }  # fmt: skip
    for size in (1 << power for power in range(10, 15)):
        # Barriers lie 8 bytes aligned behind the stages.
        assert bulk.num_stages(size) >= 2
        assert bulk.num_stages(size) * (size + bulk.STAGE_NOTE_BYTES) <= bulk.RING_BYTES


def test_machine_code_copies_both_ways_and_waits_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    compiled = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.tuning", "inspect", "--only", "bulk_id4_8192",
         "--json", str(path)],
        env=compiled, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["target"] for row in rows} == {"sm_90", "sm_100", "sm_120"}
    assert len(rows) == 3 * 2
    for row in rows:
        assert bulk_faults(Inspected(**{**row, "bulk": tuple(row["bulk"])})) == []
        assert {"UBLKCP.S.G", "UBLKCP.G.S"} < set(row["bulk"])
        assert row["shared_bytes"] == bulk.RING_BYTES
        assert row["spills"] == row["spill_bytes"] == 0
        assert row["registers"] <= 40
        assert row["programs"] == (2 if row["target"] == "sm_120" else 4)
        assert not row["stores"]


GOOD = ("DEPBAR.LE", "SYNCS.ARRIVE.TRANS64", "UBLKCP.S.G", "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "UBLKCP.G.S", "UTMACMDFLUSH", "DEPBAR.LE", "CCTL.IVALL", "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT")  # fmt: skip
ROW = Inspected("pack_bulk_id4_8192", "sm_90", 1, 200, 27, 0, 0, 49152, 16, bulk=GOOD)


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ((), ""),
        ((0,), ""),
        ((1,), "wanted a barrier told of each load, and asked before each store"),
        ((2,), "wanted a barrier told of each load"),
        ((3,), "wanted a barrier told of each load"),
        ((4,), "wanted a barrier told of each load"),
        ((5,), "wanted each store committed"),
        ((6,), "wanted a wait for all that is stored before the exit"),
        ((7,), "wanted a wait for all that is stored before the exit"),
    ],
)
def test_faults_of_bulk_copies_are_named(left_out: tuple[int, ...], fault: str) -> None:
    code = tuple(name for place, name in enumerate(GOOD) if place not in left_out)
    found = bulk_faults(replace(ROW, bulk=code))
    assert [fault in one for one in found] == [True] * bool(fault)


def test_bulk_copies_that_nobody_asked_for_are_a_fault() -> None:
    assert bulk_faults(replace(ROW, name="pack_tiles_id4", bulk=())) == []
    (found,) = bulk_faults(replace(ROW, name="pack_tiles_id4"))
    assert "wanted none" in found
