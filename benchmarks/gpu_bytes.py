"""Part `bytes` of the GPU check: is every byte right, by every variant of the kernels?

Three things: a matrix of moves so chosen that each variant runs at least once, which is checked;
the geometries of real models at their page sizes; views with foreign strides, as engines have them.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from field_layouts import LAYOUTS
from gpu_matrix import case_count, wanted_variants
from gpu_moves import Way, guarded_layout, round_trip
from gpu_part import Check

from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions
from kvferry.pools import PoolTensors
from kvferry.testing import POISON

MAX_WORKERS = 12
"""Compiling some 600 variants is nearly all of the time, and each takes one processor."""

NUM_PAGES = 8
CPU_PAGES_BYTES = 700_000
"""The interpreter moves some 20 MB a second: larger objects are left out on a CPU."""

LARGE_PAGES = 5 << 10
"""Of 1 MiB each: 5 GiB."""

LARGE_FREE_BYTES = 30 << 30
"""What comparing them takes."""

MAX_FAILURES = 50


def run(check: Check) -> None:
    """Move everything, and raise at the end if a byte was wrong."""
    check.step("start of the matrix's processes")
    cores = os.cpu_count() or 1
    num_workers = min(MAX_WORKERS, cores) if check.on_gpu else 1
    workers = [_start(check, number, num_workers) for number in range(num_workers)]
    failures: list[str] = []
    num_moves, num_bytes = 0, 0
    for name, layout, space, way, wholes in _cases(check):
        check.step(name)
        try:
            num_bytes += 2 * round_trip(layout, space, None, way, wholes)
            num_moves += 2
        except AssertionError as error:
            traceback.print_exc()
            failures.append(f"{name}: {error}")
    seen: set[str] = set()
    for number, worker in enumerate(workers):
        check.step(f"share {number} of the matrix")
        found = _answer(worker)
        failures += found["failures"]
        seen |= set(found["seen"])
        num_moves += found["moves"]
    missing = sorted(wanted_variants(check.on_gpu) - seen)
    if missing:
        failures.append(f"{len(missing)} variants never ran: {missing[:8]}")
    if failures:
        print("\n".join(failures[:MAX_FAILURES]))
        raise AssertionError(f"{len(failures)} wrong, the first: {failures[0]}")
    check.figure("variants", len(seen))
    check.figure("moves", num_moves)
    check.figure("matrix_round_trips", case_count(check.on_gpu))
    check.figure("bytes_of_layouts", num_bytes)
    check.summary(f"{num_moves} moves, {len(seen)} variants: every byte right")


Case = tuple[str, CacheLayout, str, Way, list[torch.Tensor]]


def _cases(check: Check) -> Iterator[Case]:
    """Yield real models' pools, then engines' views, each with how it is moved."""
    left_out = []
    for model in sorted(descriptions()):
        plain = CacheLayout.from_description(description(model))
        if not check.on_gpu and NUM_PAGES * sum(plain.object_bytes.values()) > CPU_PAGES_BYTES:
            left_out.append(model)
            continue
        layout, wholes = guarded_layout(plain, NUM_PAGES, check.device)
        for space in layout.spaces:
            slack = -layout.object_bytes[space] % 16
            cuts = layout.num_layers // 3
            halves = [list(range(cuts)), list(range(cuts, layout.num_layers))]
            yield f"{model} {space}", layout, space, Way(4, 4, 0, slack), wholes
            grouped = Way(2, 8, 0, slack, with_sums=True, splits=halves, seed=1)
            yield f"{model} {space}, groups", layout, space, grouped, wholes
        if all(pool.token_axis is not None for pool in layout.pools):
            way = Way(2, 4, tail="zero" if len(model) % 2 else "keep", seed=2)
            yield f"{model} tail", layout, "full", way, wholes
        del layout, wholes
    if left_out:
        check.left_out(f"{len(left_out)} models at real page sizes: too large for the interpreter")
    if check.on_gpu:
        yield from _large(check)
    else:
        check.left_out("memory of over 2 and 4 GiB, and pinned objects: a CPU has neither")
    for number, (name, build) in enumerate(sorted(LAYOUTS.items())):
        with torch.device(check.device):
            layout, wholes = build()
        for space in layout.spaces:
            way = Way(2, 4 if number % 2 else 8, number % 3, number % 5, seed=number)
            yield f"{name}, {space}", layout, space, way, wholes


def _large(check: Check) -> Iterator[Case]:
    """Yield what 32 bits would not reach, and objects in pinned host memory."""
    free_bytes, _ = torch.cuda.mem_get_info(check.device)
    if free_bytes < LARGE_FREE_BYTES:
        check.left_out(f"memory of over 4 GiB: {free_bytes >> 30} GiB are free, not enough")
        return
    memory = torch.full((LARGE_PAGES, 1 << 20), POISON, dtype=torch.uint8, device=check.device)
    for row_bytes in (1 << 20, 1040):  # by the page kernel, and by units
        pool = PoolTensors("k", "full", "page", {0: memory[:, :row_bytes]})
        layout = CacheLayout.from_tensors([pool], page_size=1, num_layers=1)
        for id_bytes in (4, 8):
            yield f"a pool of 5 GiB, {row_bytes} bytes", layout, "full", Way(4, id_bytes), [memory]
    del memory, pool, layout
    plain = CacheLayout.from_description(description("qwen3-next-80b"))
    layout, wholes = guarded_layout(plain, {"state": 62, "full": 2}, check.device)
    yield "objects of over 2 GiB", layout, "state", Way(30, 4), wholes
    plain = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    layout, wholes = guarded_layout(plain, NUM_PAGES, check.device)
    pinned = Way(3, 4, with_sums=True, pinned=True)
    yield "pinned objects", layout, "full", pinned, wholes


def _start(check: Check, number: int, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gpu_matrix.py")), str(number), str(count),
         check.device_name],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answer(worker: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return what a worker found; one that died is a failure. What hangs, the part's limit ends."""
    output, _ = worker.communicate()
    if worker.returncode:
        return {"failures": [f"a process of the matrix ended with status {worker.returncode}"],
                "seen": [], "moves": 0}  # fmt: skip
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found
