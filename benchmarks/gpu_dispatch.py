"""Part `dispatch` of the GPU check: how long does one call of `Packer.pack` keep the host?"""

import statistics
import time
from collections.abc import Callable

import torch
from gpu_cases import MLA
from gpu_part import Check

from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds

CALLS = 100
"""Between two waits for the GPU: fewer than its queue of launches holds."""


def run(check: Check) -> None:
    """Time calls of one page, the GPU's work apart, beside `copy_` of as little."""
    loaded = MLA.load(check.device)
    packer = Packer(loaded.layout, "full")
    one = loaded.read[:1]
    page = loaded.sources[:1]
    stride = loaded.stride_bytes
    small = torch.zeros(4096, dtype=torch.uint8, device=check.device)
    other = torch.zeros_like(small)
    ids = PageIds.check(loaded.layout, "full", page, unique=True)
    move = packer.describe(
        0, ids, loaded.objects.data_ptr(), stride, ((0, loaded.layout.num_layers),)
    )
    check.figure("launches_of_a_pack", len(packer.launches(move)))
    calls: dict[str, Callable[[], object]] = {
        "pack_us": lambda: packer.pack(one, loaded.objects, stride_bytes=stride, backend="triton"),
        "pack_of_host_ids_us": lambda: packer.pack(
            page, loaded.objects, stride_bytes=stride, backend="triton"
        ),
        "copy_us": lambda: other.copy_(small),
    }
    for name, call in calls.items():
        check.step(name)
        check.timed(name, _host_us(check, call))
    loaded.check_bytes(packer)
    if not check.on_gpu:
        check.left_out("every time: on a CPU a call runs its kernels itself")
    check.summary("calls of one page, from the host's side")


def _host_us(check: Check, call: Callable[[], object]) -> float:
    """Return the median time that a call keeps the host."""
    rounds, calls = (7, CALLS) if check.on_gpu else (1, 1)
    samples = []
    for number in range(rounds + 1):
        if check.on_gpu:
            torch.cuda.synchronize(check.device)
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            if number:  # the first round is for warming up
                samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)
