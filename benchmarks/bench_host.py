"""How much Python runs before the bytes of a save move? `make bench-host`.

Plans a save of 32,768 tokens of DeepSeek-V3.2 (512 pages), on one core, with 61, 122 and 244
layers; beside it the straightforward way, a list of one range per page, layer and buffer. `plan` is
what runs before the first byte moves: checking, keys, and the first part's launches and store call.
`whole` prepares every 64 MiB part of the transfer, most of which happens while others are on the
wire; it grows with bytes, at a few µs a part. `dispatch` is what starting a pack whose pages and
kernels are known takes beyond the driver's own launch, on a driver that launches nothing. No byte
moves here and no GPU is needed.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bars import Bar, report

from kvferry.kernels.device import PACK
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.layout import CacheLayout
from kvferry.linker.keys import KeyScheme
from kvferry.linker.plan import plan_transfer
from kvferry.models import description
from kvferry.pools import dtype_named

MODEL = "deepseek-v3.2-dsa-fp8"
TOKENS = 32768
PART_BYTES = 64 << 20
STAGING_ADDRESS = 1 << 40
ROUNDS = 31
DISPATCHES = 500


def deep_layout(times: int) -> CacheLayout:
    """Return the model's layout with `times` as many layers, over memory that is never touched."""
    plain = description(MODEL)
    num_layers = plain["num_layers"] * times
    deep: dict[str, Any] = {"page_size": plain["page_size"], "num_layers": num_layers, "pools": []}
    for pool in plain["pools"]:
        layers = [
            layer_id + copy * plain["num_layers"]
            for copy in range(times)
            for layer_id in pool["layers"]
        ]
        deep["pools"].append({**pool, "layers": layers})
    layout = CacheLayout.from_description(deep)
    num_pages = TOKENS // layout.page_size + 1
    return layout.bind(
        {
            pool.name: {
                layer_id: torch.empty(
                    num_pages * (layout.page_size if pool.rows == "token" else 1),
                    *pool.row_shape,
                    dtype=dtype_named(pool.dtype, pool.name),
                )
                for layer_id in pool.layer_ids
            }
            for pool in layout.pools
        }
    )


def prepare(
    layout: CacheLayout,
    packer: Packer,
    scheme: KeyScheme,
    keys: list[str],
    page_ids: list[int],
    max_parts: int,
) -> tuple[int, int]:
    """Do what a save does in Python for its first parts; return how many launches and ranges."""
    num_launches = num_ranges = num_parts = 0
    for plan in plan_transfer(layout, scheme, keys, page_ids, unique=False, trailer=True):
        layers = ((0, layout.num_layers),)
        ids = PageIds.upload(layout, plan.page_ids, unique=False)
        for part, some in plan.parts_and_ids(ids, PART_BYTES):
            move = packer.describe(PACK, some, STAGING_ADDRESS, part.stride_bytes, layers)
            num_launches += len(list(packer.launches(move)))
            num_ranges += len(part.addresses(STAGING_ADDRESS)) * (len(part.sizes) > 0)
            num_parts += 1
            if num_parts == max_parts:
                return num_launches, num_ranges
    return num_launches, num_ranges


def list_all(layout: CacheLayout, page_ids: list[int]) -> int:
    """Build one (address, size) per page, layer and buffer, in nested lists per key."""
    buffers = [
        (buffer.address, buffer.page_stride_bytes, buffer.pool.page_bytes)
        for buffer in layout.buffers["full"]
    ]
    addresses, sizes = [], []
    for page_id in page_ids:
        addresses.append([base + page_id * stride for base, stride, _ in buffers])
        sizes.append([num_bytes for _, _, num_bytes in buffers])
    return sum(len(row) for row in addresses)


def median_ms(call: Callable[[], object]) -> tuple[float, float]:
    """Return median and 90th percentile of a call's time, in milliseconds."""
    call()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), sorted(times)[ROUNDS * 9 // 10]


def dispatch_us(layout: CacheLayout) -> tuple[float, float]:
    """Return what a pack's launch takes in Python beyond the driver's launch, and the latter."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import stub_driver

    from kvferry.kernels import handles

    packer, device = Packer(layout, "full"), torch.device("cuda", 0)
    ids = PageIds.check(layout, "full", list(range(64)), unique=True)
    layers = ((0, layout.num_layers),)
    move = packer.describe(PACK, ids, STAGING_ADDRESS, layout.object_bytes["full"], layers)
    (launch,) = packer.launches(move)
    launch.start(device)
    (handle,) = handles._handles.values()

    def pack() -> None:
        for one in packer.launches(move):
            one.start(device)

    def driver() -> None:
        handle.run(
            *launch.grid, 1, 77, handle.function, handle.packed_metadata, None, None, None,
            *launch.arguments, *launch.constants,
        )  # fmt: skip

    times: dict[Callable[[], None], list[float]] = {pack: [], driver: []}
    for _ in range(ROUNDS):
        for call, took in times.items():
            begin = time.perf_counter()
            for _ in range(DISPATCHES):
                call()
            took.append((time.perf_counter() - begin) / DISPATCHES * 1e6)
            stub_driver.calls.clear()
    beyond = [whole - bare for whole, bare in zip(times[pack], times[driver], strict=True)]
    return statistics.median(beyond), statistics.median(times[driver])


def main() -> int:
    """Print the table and the bars."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    gc.disable()
    num_pages = TOKENS // description(MODEL)["page_size"]
    keys = [f"{index:064x}" for index in range(num_pages)]
    page_ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    print(f"{MODEL}, {TOKENS:,} tokens, {num_pages} pages, one core; times are medians (p90)")
    rows: list[dict[str, Any]] = []
    plans, wholes, lists = [], [], []
    for times in (1, 2, 4):
        layout = deep_layout(times)
        packer, scheme = Packer(layout, "full"), KeyScheme.of(layout, "bench")
        run = partial(prepare, layout, packer, scheme, keys, page_ids)
        launches, packed = run(sys.maxsize)
        plan_ms, plan_p90 = median_ms(partial(run, 1))
        whole_ms, whole_p90 = median_ms(partial(run, sys.maxsize))
        list_ms, list_p90 = median_ms(partial(list_all, layout, page_ids))
        plans.append(plan_ms)
        wholes.append(whole_ms)
        lists.append(list_ms)
        rows.append(
            {
                "layers": layout.num_layers,
                "list: ranges": list_all(layout, page_ids),
                "list ms": f"{list_ms:.2f} ({list_p90:.2f})",
                "packed: ranges": packed,
                "launches": launches,
                "plan ms": f"{plan_ms:.2f} ({plan_p90:.2f})",
                "whole ms": f"{whole_ms:.2f} ({whole_p90:.2f})",
            }
        )
    beyond_us, driver_us = dispatch_us(deep_layout(1))
    print(f"dispatch of a pack: {beyond_us:.2f} µs beyond the stub driver's {driver_us:.2f} µs")
    bars = [
        Bar("dispatch_us", beyond_us, 3.0, at_least=False),
        Bar("plan_ms", plans[0], 5.0, at_least=False),
        Bar("whole_ms", wholes[0], 5.0, at_least=False),
        Bar("plan_growth_with_4x_layers", plans[2] / plans[0], 1.3, at_least=False),
        Bar("list_over_whole", lists[0] / wholes[0], 3.0, at_least=True),
    ]
    return report("host", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
