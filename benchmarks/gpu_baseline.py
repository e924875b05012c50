"""Part `baseline` of the GPU check: our pack beside a gather by elements, and beside plain torch.

The gather is of our own writing, in the manner of SGLang's staging gather: one launch, the pools'
addresses in a table, two bytes a load. All write the same objects, which are compared.
"""

from collections.abc import Callable

import torch
from gpu_cases import GQA, HEAD, Case, Loaded, gb_per_s
from gpu_part import Check
from scalar_gather import gather_pools_kernel

from kvferry.kernels.pack import Packer
from kvferry.tuning.timing import median_ratio, time_together, timing_of

BLOCK = 1024
WORDS = {"scalar": "scalar gather", "torch": "torch index_select"}


def run(check: Check) -> None:
    """Compare bytes, then times, for head slices and for whole pages."""
    for case in (HEAD, GQA):
        _run_case(check, case)
    if not check.on_gpu:
        check.left_out("every rate: on a CPU the kernels are interpreted")
    check.summary("one head of eight, and whole pages: equal bytes from all three")


def _run_case(check: Check, case: Case) -> None:
    check.step(f"{case.name}: bytes")
    loaded = case.load(check.device)
    packer = Packer(loaded.layout, "full")
    calls = {
        "ours": loaded.pack(packer),
        "scalar": _scalar(loaded),
        "torch": loaded.pack(packer, backend="reference"),
    }
    for name, call in list(calls.items()):
        loaded.objects.fill_(0xA5)
        try:
            call()
        except RuntimeError as error:
            if name == "ours":
                raise
            check.left_out(f"{case.name} by {name}: {str(error).splitlines()[0]}")
            del calls[name]
            continue
        try:
            loaded.compare_objects(loaded.objects)
        except AssertionError as error:
            raise AssertionError(f"by {name}: {error}") from error
    check.step(f"{case.name}: times")
    samples = time_together(
        {name: [call] for name, call in calls.items()}, check.device,
        num_rounds=15 if check.on_gpu else 1, num_warmups=2 if check.on_gpu else 0,
    )  # fmt: skip
    ours = timing_of(samples["ours"]).median_us
    check.row(
        pages=case.name, MB=loaded.num_bytes // 10**6,
        **{
            "ours GB/s": gb_per_s(loaded.num_bytes, ours),
            **{
                f"{WORDS[name]} / ours": median_ratio(times, samples["ours"])
                for name, times in samples.items()
                if name != "ours"
            },
        },
    )  # fmt: skip


def _scalar(loaded: Loaded) -> Callable[[], object]:
    """Return a call that gathers by elements into the same objects."""
    layout = loaded.layout
    buffers = layout.buffers["full"]
    tensors = [buffer.tensor for buffer in buffers if buffer.tensor is not None]
    row = tensors[0][0].numel()
    addresses = torch.tensor([buffer.address for buffer in buffers], device=layout.device)
    num_elements = len(loaded.sources) * layout.page_size * row
    assert num_elements * len(buffers) * 2 == loaded.num_bytes
    staging = loaded.objects.view(torch.int16)
    grid = (-(-num_elements // BLOCK), len(buffers))
    ids = loaded.read.on_device.to(torch.int32)
    return lambda: gather_pools_kernel[grid](
        addresses, ids, staging, tensors[0].stride(0), loaded.stride_bytes // 2,
        num_elements, PAGE=layout.page_size, ROW=row, BLOCK=BLOCK,
    )  # fmt: skip
