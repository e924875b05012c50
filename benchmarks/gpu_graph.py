"""Part `graph` of the GPU check: pack and signal in a CUDA graph, replayed with other page ids.

The graph holds the address of the ids, not the ids: a step writes its own into the same tensor.
"""

import contextlib
import time
from collections.abc import Callable

import torch
from gpu_cases import MLA
from gpu_part import Check

from kvferry.kernels.counters import LayerCounters, Step
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.tuning.timing import time_together, timing_of

REPLAYS = 5
LIMIT_S = 10.0


def run(check: Check) -> None:
    """Capture once, replay with several choices of pages, compare bytes and counters."""
    on_gpu = check.on_gpu
    loaded = MLA.load(check.device)
    packer = Packer(loaded.layout, "full")
    ids = torch.tensor(loaded.sources, dtype=torch.int32, device=check.device)
    read = PageIds(ids, unique=True)
    side = torch.cuda.Stream(check.device) if on_gpu else None
    counters = LayerCounters(loaded.layout.num_layers, check.device, stream=side, backend="triton")
    counters.preload()

    def body(step: Step) -> None:
        packer.pack(read, loaded.objects, stride_bytes=loaded.stride_bytes, backend="triton")
        counters.signal(step, 0, loaded.layout.num_layers)

    check.step("capture" if on_gpu else "one by one, without a graph")
    with torch.cuda.stream(side) if side else contextlib.nullcontext():
        body(counters.begin_step())  # compiles, and makes the tables
    replay: Callable[[], None] | None = None
    if side is not None:
        torch.cuda.synchronize(check.device)
        graph = torch.cuda.CUDAGraph()
        # What is captured is not done: the step gets its signals from the first replay.
        captured = counters.begin_step()
        with torch.cuda.graph(graph, stream=side):
            body(captured)
        replay = graph.replay
    everything = [*loaded.sources, *loaded.targets]
    step = None
    for number in range(REPLAYS if on_gpu else 2):
        check.step(f"replay {number}")
        pages = everything[number + 1 : number + 1 + len(ids)]
        ids.copy_(torch.tensor(pages, dtype=torch.int32))
        loaded.write(pages)
        loaded.objects.fill_(0xA5)
        if side is None or replay is None:
            step = counters.begin_step()
            body(step)
        else:
            side.wait_stream(torch.cuda.current_stream(check.device))
            with torch.cuda.stream(side):
                if number == 0:
                    step = captured
                    replay()
                else:
                    step = counters.begin_step()
                    with counters.count_signals(step, 0, counters.num_layers, 1):
                        replay()
        _await(counters, step)
        loaded.compare_objects(loaded.objects, pages)
        counts = [counters.count_of(layer) for layer in range(counters.num_layers)]
        assert counts == list(step.targets), f"counters are {counts}, wanted {step.targets}"
    if replay is None:
        check.left_out("capture and replay: a CPU has no CUDA graphs")
        check.summary("pack and signal one by one: bytes and counters right")
        return
    check.step("times")
    samples = time_together(
        {"replay": [replay], "pack": [loaded.pack(packer)]}, check.device, num_rounds=15
    )
    check.timed("replay_us", timing_of(samples["replay"]).median_us)
    check.timed("pack_alone_us", timing_of(samples["pack"]).median_us)
    check.summary(f"{REPLAYS} replays with other ids: bytes and counters right")


def _await(counters: LayerCounters, step: Step) -> None:
    """Wait until the host sees every layer's signal; not for ever."""
    deadline = time.monotonic() + LIMIT_S
    while not all(counters.reached(step, layer) for layer in range(counters.num_layers)):
        if time.monotonic() > deadline:
            counts = [counters.count_of(layer) for layer in range(counters.num_layers)]
            raise AssertionError(f"after {LIMIT_S:.0f} s counters are {counts}, not {step.targets}")
        time.sleep(1e-4)
