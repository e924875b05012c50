"""Part `copy` of the GPU check: how fast can memory be copied at all, from a cold L2?"""

import torch
from gpu_cases import gb_per_s
from gpu_part import Check

from kvferry.tuning.timing import time_together, timing_of

SIZES = tuple(2**20 * 4**power for power in range(6))
"""1 MiB to 1 GiB."""

HOST_BYTES = 256 << 20


def run(check: Check) -> None:
    """Time `copy_` by size, and between pinned host memory and the GPU."""
    sizes = SIZES if check.on_gpu else SIZES[:1]
    best = 0.0
    for num_bytes in sizes:
        check.step(f"{num_bytes >> 20} MiB")
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=check.device)
        best = max(best, _time(check, "device to device", torch.empty_like(source), source))
    if check.on_gpu:
        host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        other = torch.empty(HOST_BYTES, dtype=torch.uint8, device=check.device)
        other.random_(0, 256)
        check.step("device to pinned host memory")
        to_host = _time(check, "device to pinned host", host, other)
        check.step("pinned host memory to device")
        from_host = _time(check, "pinned host to device", other, host)
        check.timed("to_host_gb_per_s", to_host)
        check.timed("from_host_gb_per_s", from_host)
        check.summary(f"{best:.0f} GB/s of payload at best on the device")
    else:
        check.left_out("sizes over 1 MiB, pinned memory, and every rate: a CPU's say nothing here")
        check.summary("1 MiB copied and compared")
    check.timed("copy_gb_per_s", best)


def _time(check: Check, way: str, target: torch.Tensor, source: torch.Tensor) -> float:
    """Time copies of a source, compare them, and return their rate of payload in GB/s."""
    samples = time_together(
        {way: [lambda: target.copy_(source, non_blocking=True)]}, check.device,
        num_rounds=15 if check.on_gpu else 2,
    )  # fmt: skip
    assert torch.equal(target.to(source.device), source), f"{way}: the copy differs from its source"
    timing = timing_of(samples[way])
    rate = gb_per_s(source.numel(), timing.median_us)
    check.row(
        copy=way, MiB=source.numel() >> 20, us=timing.median_us, GB_per_s=rate,
        spread=timing.spread,
    )  # fmt: skip
    return rate
