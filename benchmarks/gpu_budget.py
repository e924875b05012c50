"""Part `budget` of the GPU check: what few programs move, and what a model beside them notices.

A budget bounds how many multiprocessors a copy may occupy at once. Wanted: the rate of one
400 Gb/s network card with at most four programs, at a cost to a matrix product of at most 3 %.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_cases import MLA, Loaded, gb_per_s
from gpu_part import Check

from kvferry.kernels.pack import Packer
from kvferry.tuning.timing import time_together, timing_of

BUDGETS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 0)
BESIDE = (1, 2, 4, 8, 16, 0)
"""Budgets that a matrix product is timed beside; 0 sets no bound."""

MOST_PROGRAMS = 4
WANTED_GB_PER_S = 50.0
WANTED_PERCENT = 3.0
ROUNDS = 7
MATMUL_S = 0.012
"""How long the matrix products of one sample last, alone."""

SHAPES = {"square": (8192, 8192, 8192), "128 tokens": (128, 8192, 28672)}
"""Rows, columns and depth: bound by arithmetic, and by memory as in decoding."""

MAX_DOUBLINGS = 3
"""Of the packs beside a product, where they end before it."""

HOLD_CYCLES = 20_000_000
"""So long a stream is held while the host fills it: some 10 ms."""

MOVE_US = 400
"""How long one pack beside a product lasts: so many of them that what was moved can be counted."""


def run(check: Check) -> None:
    """Measure rates by budget, then a matrix product beside each."""
    check.step("bytes of every budget")
    loaded = MLA.load(check.device)
    budgets = BUDGETS if check.on_gpu else (1, 4, 0)
    packers = {number: Packer(loaded.layout, "full", max_programs=number) for number in budgets}
    for number in budgets:
        loaded.check_bytes(packers[number])
    check.step("rates")
    rates = _rates(check, loaded, packers)
    few = [number for number in budgets if 0 < number <= MOST_PROGRAMS]
    for way in ("pack", "unpack"):
        best = max(rates[way, number] for number in few)
        check.bar(f"{way}_gb_per_s_with_{MOST_PROGRAMS}_programs", best, WANTED_GB_PER_S,
                  at_least=True)  # fmt: skip
    if not check.on_gpu:
        check.bar("matmul_slowdown_percent", None, WANTED_PERCENT, at_least=False)
        check.left_out("rates, and a matrix product beside a pack: a CPU has no multiprocessors")
        check.summary(f"bytes right with {', '.join(map(str, budgets))} programs (0: no bound)")
        return
    enough = [number for number in few if rates["pack", number] >= WANTED_GB_PER_S]
    chosen = min(enough, default=MOST_PROGRAMS)
    for shape in SHAPES:
        multiply = _matmul(shape, check.device)
        for number in sorted({*BESIDE, chosen}, key=lambda each: each or math.inf):
            check.step(f"matmul, {shape}, beside {number or 'unbounded'} programs")
            percent = _beside(
                check, loaded, packers[number], shape, multiply, rates["pack", number]
            )
            if number == chosen and shape == "square":
                check.bar("matmul_slowdown_percent", percent, WANTED_PERCENT, at_least=False)
    check.figure("programs_of_the_slowdown", chosen)
    check.summary(f"{rates['pack', chosen]:.0f} GB/s of payload by {chosen} programs")


def _rates(
    check: Check, loaded: Loaded, packers: dict[int, Packer]
) -> dict[tuple[str, int], float]:
    """Return GB/s of payload by direction and budget."""
    calls = {("pack", number): loaded.pack(packer) for number, packer in packers.items()}
    calls |= {("unpack", number): loaded.unpack(packer) for number, packer in packers.items()}
    samples = time_together(
        {f"{way} {number}": [call] for (way, number), call in calls.items()}, check.device,
        num_rounds=ROUNDS if check.on_gpu else 1, num_warmups=2 if check.on_gpu else 0,
    )  # fmt: skip
    rates = {
        (way, number): gb_per_s(loaded.num_bytes, timing_of(samples[f"{way} {number}"]).median_us)
        for way, number in calls
    }
    for number in packers:
        check.row(
            programs=number or "unbounded", MB=loaded.num_bytes // 10**6,
            **{"pack GB/s": rates["pack", number], "unpack GB/s": rates["unpack", number]},
        )  # fmt: skip
    return rates


def _matmul(shape: str, device: torch.device) -> Callable[[], object]:
    rows, columns, depth = SHAPES[shape]
    left = torch.randn(rows, depth, dtype=torch.bfloat16, device=device)
    right = torch.randn(depth, columns, dtype=torch.bfloat16, device=device)
    product = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    return lambda: torch.mm(left, right, out=product)


def _beside(
    check: Check,
    loaded: Loaded,
    packer: Packer,
    shape: str,
    multiply: Callable[[], object],
    rate: float,
) -> float | None:
    """Return by how many percent packs on a stream beside it slow a matrix product down."""
    object_bytes = loaded.layout.object_bytes["full"]
    num_pages = min(len(loaded.read), max(1, round(rate * 1e3 * MOVE_US / object_bytes)))
    move_us = num_pages * object_bytes / rate / 1e3
    once_us = timing_of(
        time_together({"mm": [multiply]}, check.device, num_rounds=3, cold=False)["mm"]
    ).median_us
    num_products = max(1, round(MATMUL_S * 1e6 / once_us))
    sample = partial(
        _sample, check.device, multiply, num_products, _moves(loaded, packer, num_pages)
    )
    # Twice what is needed, should the product take twice as long; it is looked at afterwards.
    num_moves = 2 + round(2 * num_products * once_us / move_us)
    ratios, rates = [], []
    for number in range(ROUNDS + 1):
        alone, _ = sample(0)
        beside, moved = sample(num_moves)
        for _ in range(MAX_DOUBLINGS):
            if moved < num_moves:
                break
            num_moves *= 2
            beside, moved = sample(num_moves)
        if moved == num_moves:
            check.left_out(
                f"{shape} beside {packer.max_programs} programs: {moved} packs in a row ended "
                "before the product did"
            )
            return None
        if number:  # the first is for warming up
            ratios.append(beside / alone)
            rates.append(gb_per_s(moved * num_pages * object_bytes, beside))
    percent = (statistics.median(ratios) - 1) * 100
    check.row(**{
        "matmul": shape, "beside programs": packer.max_programs or "unbounded",
        "alone us": once_us, "slower %": percent,
        "lowest %": (min(ratios) - 1) * 100, "highest %": (max(ratios) - 1) * 100,
        "pack GB/s beside": statistics.median(rates),
    })  # fmt: skip
    return percent


def _moves(loaded: Loaded, packer: Packer, num_pages: int) -> list[Callable[[], None]]:
    """Return packs of so many pages each, by turns of others: L2 holds none of them for long."""
    stride = loaded.stride_bytes
    return [
        partial(
            packer.pack, loaded.read[first : first + num_pages], loaded.objects[first * stride :],
            stride_bytes=stride, backend="triton",
        )
        for first in range(0, len(loaded.read) - num_pages + 1, num_pages)
    ]  # fmt: skip


def _sample(
    device: torch.device,
    multiply: Callable[[], object],
    num_products: int,
    moves: Sequence[Callable[[], None]],
    num_moves: int,
) -> tuple[float, int]:
    """Return how long the products took in us, and how many packs ended before they did."""
    main = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device, priority=-1)  # as kvferry's own, so that few programs start
    torch.cuda.synchronize(device)
    begin, end, held = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    ended: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(num_moves)]
    with torch.cuda.stream(side):
        # Both streams start together, when the host has filled them.
        torch.cuda._sleep(HOLD_CYCLES)
        held.record()
        for number, event in enumerate(ended):
            moves[number % len(moves)]()
            event.record()
    main.wait_event(held)
    begin.record()
    for _ in range(num_products):
        multiply()
    end.record()
    torch.cuda.synchronize(device)
    moved = sum(event.elapsed_time(end) >= 0 for event in ended)
    return float(begin.elapsed_time(end)) * 1e3, moved
