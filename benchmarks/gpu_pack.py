"""Part `pack` of the GPU check: pack and unpack beside `copy_` of as many bytes, turn by turn."""

import torch
from gpu_cases import CASES, Case, gb_per_s
from gpu_part import Check

from kvferry.kernels.pack import Packer
from kvferry.tuning.timing import median_ratio, time_together, timing_of


def run(check: Check) -> None:
    """Time each kind of pages, whose bytes are compared first, with checksums and without."""
    for case in CASES:
        _run_case(check, case)
    if not check.on_gpu:
        check.left_out("every rate: on a CPU the kernels are interpreted")
    check.summary(f"{len(CASES)} kinds of pages, bytes right, beside copy_")


def _run_case(check: Check, case: Case) -> None:
    check.step(f"{case.name}: bytes")
    loaded = case.load(check.device)
    packer = Packer(loaded.layout, "full")
    shape = (len(loaded.sources), loaded.layout.num_layers)
    sums = torch.zeros(shape, dtype=torch.int64, device=check.device)
    source = torch.randint(0, 256, (loaded.num_bytes,), dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    check.step(f"{case.name}: times")
    samples = time_together(
        {
            "copy": [lambda: target.copy_(source)],
            "pack": [loaded.pack(packer)],
            "unpack": [loaded.unpack(packer)],
            "pack+sum": [loaded.pack(packer, sums=sums)],
            "unpack+sum": [loaded.unpack(packer, sums=sums)],
        },
        check.device,
        num_rounds=21 if check.on_gpu else 1,
        num_warmups=3 if check.on_gpu else 0,
    )
    shares = {name: median_ratio(samples["copy"], times) for name, times in samples.items()}
    copy_us = timing_of(samples["copy"]).median_us
    check.row(
        pages=case.name, MB=loaded.num_bytes // 10**6,
        **{"copy GB/s": gb_per_s(loaded.num_bytes, copy_us)},
        **{f"{name}/copy": share for name, share in shares.items() if name != "copy"},
        spread=timing_of(samples["pack"]).spread,
    )  # fmt: skip
    for name in ("pack", "unpack"):
        check.bar(f"{case.name}_{name}_over_copy", shares[name], case.copy_bar, at_least=True)
    if check.on_gpu:  # what was timed has moved the right bytes to the end
        loaded.compare_objects(loaded.objects)
