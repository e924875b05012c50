"""How fast do pack and unpack move pages, beside `Tensor.copy_`? `make bench-pack`.

For each model: pages in random order, packed and unpacked, with and without checksums, turn by
turn with a copy of as many bytes; medians of the ratio in one run. Every byte is checked first: no
speed is reported from a run whose bytes were wrong. On a GPU the kernels run compiled and events
time them, with the L2 cache flushed before each; without one this times the torch reference on the
CPU, which says nothing about a GPU.
"""

import random
import sys
from functools import partial
from typing import Any

import torch
from bars import Bar, report

from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.layout import CacheLayout
from kvferry.models import description
from kvferry.testing import check_telling, make_tensors, object_bytes_of, write_telling
from kvferry.tuning.timing import median_ratio, time_together, timing_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
CASES = (
    ("deepseek-v3.2-dsa-fp8", "full", 256 if ON_GPU else 24),
    ("llama-3.1-8b-nhd", "full", 128 if ON_GPU else 8),
    ("llama-3.1-8b-nhd-page1", "full", 8192 if ON_GPU else 512),
    ("deepseek-v4-flash", "full", 512 if ON_GPU else 48),
    ("qwen3-next-80b", "state", 8 if ON_GPU else 2),
)
ROUNDS = 41 if ON_GPU else 15


def bench(model: str, space: str, num_pages: int) -> dict[str, Any]:
    """Check and time one model; return its row."""
    plain = CacheLayout.from_description(description(model))
    layout = plain.bind(make_tensors(plain, 2 * num_pages, DEVICE))
    packer = Packer(layout, space)
    shuffled = random.Random(1).sample(range(2 * num_pages), 2 * num_pages)
    sources, targets = shuffled[:num_pages], shuffled[num_pages:]
    size = layout.object_bytes[space]
    stride = -(-size // 64) * 64
    objects = torch.zeros(num_pages * stride, dtype=torch.uint8, device=DEVICE)
    other = torch.zeros_like(objects)
    sums = torch.zeros(num_pages, layout.num_layers, dtype=torch.int64, device=DEVICE)
    read = PageIds.check(layout, space, sources, unique=True)
    written = PageIds.check(layout, space, targets, unique=True)

    write_telling(layout, space, sources, sources)
    packer.pack(read, objects, stride_bytes=stride)
    for first in range(0, num_pages, 64):
        some = sources[first : first + 64]
        packed = objects.view(num_pages, stride)[first : first + 64, :size]
        assert torch.equal(packed, object_bytes_of(layout, space, some)), f"{model}: wrong bytes"
    packer.unpack(written, objects, stride_bytes=stride)
    check_telling(layout, space, targets, sources)

    calls = {
        "copy": partial(other.copy_, objects),
        "pack": partial(packer.pack, read, objects, stride_bytes=stride),
        "pack+sum": partial(packer.pack, read, objects, stride_bytes=stride, sums=sums),
        "unpack": partial(packer.unpack, written, objects, stride_bytes=stride),
        "unpack+sum": partial(packer.unpack, written, objects, stride_bytes=stride, sums=sums),
    }
    times = time_together({name: [call] for name, call in calls.items()}, DEVICE, num_rounds=ROUNDS)
    row: dict[str, Any] = {"model": model, "space": space, "MB": num_pages * size // 10**6}
    row["copy GB/s"] = num_pages * size / timing_of(times["copy"]).median_us / 1e3
    for name in list(calls)[1:]:
        row[name] = median_ratio(times["copy"], times[name])
    return row


def main() -> int:
    """Print the table and, on a GPU, the bars."""
    where = torch.cuda.get_device_name(0) if ON_GPU else "CPU, torch reference"
    print(f"{where}; columns after «copy» are shares of its rate, {ROUNDS} rounds")
    rows = [bench(*case) for case in CASES]
    bars = []
    if ON_GPU:
        bars = [
            Bar(f"{name}_over_copy {row['model']}", row[name], 0.95, at_least=True)
            for row in rows
            for name in ("pack", "unpack")
        ]
    return report("pack_gpu" if ON_GPU else "pack_cpu", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
