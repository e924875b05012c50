"""Part `bulk` of the GPU check: the kernel of bulk copies, its bytes and its rates by few programs.

It waits on barriers in shared memory, which a fault could leave waiting for ever: so it is a part
of its own, whose end at its limit harms no other.
"""

import torch
from gpu_cases import GQA, MLA, Case, gb_per_s
from gpu_moves import Way, guarded_layout, round_trip
from gpu_part import Check, Skipped

from kvferry.errors import ArgumentError
from kvferry.kernels.bulk import _move_bulk_kernel, check_device
from kvferry.kernels.handles import Launch
from kvferry.kernels.pack import Packer
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.tuning.timing import time_together, timing_of

TILES = (4096, 8192, 16384)
BUDGETS = (1, 2, 4, 8, 132)
NUM_PAGES = 8


def run(check: Check) -> None:
    """Move real layouts by bulk copies, compare every byte, then time them beside the page kernel.

    What was asked for by bulk copies must have gone by them: their launches are counted.
    """
    if not check.on_gpu:
        raise Skipped("needs a GPU of capability 9.0 or newer: no interpreter knows bulk copies")
    try:
        check_device(check.device)
    except ArgumentError as error:
        raise Skipped(str(error)) from None
    start, counted = Launch.start, [0]

    def noted(launch: Launch, device: torch.device) -> None:
        counted[0] += launch.kernel is _move_bulk_kernel
        start(launch, device)

    Launch.start = noted  # type: ignore[method-assign, assignment]
    for model in ("deepseek-v3.2-dsa-fp8", "llama-3.1-8b-nhd", "mimo-v2-flash"):
        for tile_bytes in TILES:
            before = counted[0]
            _compare(check, model, tile_bytes)
            assert counted[0] > before, f"{model}: no launch went by bulk copies"
    check.figure("launches_by_bulk_copies", counted[0])
    Launch.start = start  # type: ignore[method-assign]
    for case in (MLA, GQA):
        _time(check, case)
    check.summary("bytes right by bulk copies, beside the page kernel")


def _compare(check: Check, model: str, tile_bytes: int) -> None:
    """Move a model's pages by several budgets; with one program, in two groups of layers."""
    plain = CacheLayout.from_description(description(model))
    layout, wholes = guarded_layout(plain, NUM_PAGES, check.device)
    groups = [list(range(7)), list(range(7, layout.num_layers))]
    for space in layout.spaces:
        for budget in BUDGETS:
            check.step(f"{model} {space}: tiles of {tile_bytes}, {budget} programs")
            way = Way(3, 4, splits=groups if budget == 1 else (None,), seed=budget)
            round_trip(layout, space, _bulk(tile_bytes, budget), way, wholes)


def _time(check: Check, case: Case) -> None:
    """Time pack and unpack by budget, for each size of tiles, after a look at the bytes."""
    check.step(f"{case.name}: bytes")
    loaded = case.load(check.device)
    calls = {}
    for budget in BUDGETS[:-1]:
        packers = {"page kernel": Packer(loaded.layout, "full", max_programs=budget)}
        for size in TILES:
            packers[f"bulk, {size}"] = Packer(loaded.layout, "full", _bulk(size, budget))
        for name, packer in packers.items():
            loaded.check_bytes(packer)
            calls["pack", budget, name] = loaded.pack(packer)
            calls["unpack", budget, name] = loaded.unpack(packer)
    check.step(f"{case.name}: times")
    samples = time_together(
        {" ".join(map(str, key)): [call] for key, call in calls.items()}, check.device, num_rounds=7
    )
    rates = {
        key: gb_per_s(loaded.num_bytes, timing_of(samples[" ".join(map(str, key))]).median_us)
        for key in calls
    }
    for direction in ("pack", "unpack"):
        for budget in BUDGETS[:-1]:
            check.row(**{
                "GB/s": f"{case.name}, {direction}", "programs": budget,
                **{name: rates[way, number, name] for way, number, name in rates
                   if (way, number) == (direction, budget)},
            })  # fmt: skip


def _bulk(tile_bytes: int, max_programs: int) -> LaunchConfig:
    return LaunchConfig(tile_bytes=tile_bytes, max_programs=max_programs, form="bulk")
