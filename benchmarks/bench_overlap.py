"""Does compute hide a layer-wise load, but for its first layer group? `make bench-overlap`.

A simulated model of DeepSeek-V3.2's geometry (61 layers that sleep, as a GPU's compute leaves the
CPU free) loads pages from an owner in another process over TCP loopback: layer by layer beside its
compute and, for comparison, whole before it. Turn by turn in one run; a layer's compute is two and
a half times its share of a transfer, measured first. Layer groups are the linker's own choice,
which knows both times. What every layer reads is compared byte for byte: copied at that moment,
within the compute time of all steps alike, and compared off the clock.
With `--out DIR` the timeline of the median step goes there, as `trace.json` and `lanes.png`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bars import Bar, report
from compute import Compute
from lanes import draw
from local import cut, local_store
from runner import Runner, StepTimes

from kvferry import Linker, LinkerConfig, StagingBuffer
from kvferry.linker.trace import Interval, Trace
from kvferry.testing import make_tensors

MODEL = "deepseek-v3.2-dsa-fp8"
NUM_PAGES = 32
ROUNDS = 11
WARM_ROUNDS = 3
COMPUTE_OVER_TRANSFER = 2.5
STAGING_BYTES = 256 << 20
CPU = torch.device("cpu")


@dataclass
class Times:
    """What each round took, in microseconds.

    Attributes:
        bare: the step without a load; the pages that it reads are there.
        beside: the step with a layer-wise load.
        timelines: of those steps.
        whole: a load of whole objects.
        before: that load, and then the step.
        first_alone: a layer-wise load with no compute beside it, until its first layer is there.
        all_alone: until its verdict.
    """

    bare: list[float] = field(default_factory=list)
    beside: list[StepTimes] = field(default_factory=list)
    timelines: list[list[Interval]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    first_alone: list[float] = field(default_factory=list)
    all_alone: list[float] = field(default_factory=list)


class Bench:
    """A runner with pages that are in its pools and in the store.

    Attributes:
        linker: loads them.
        times: so far.
        groups: layer groups of the last load.
    """

    def __init__(self, runner: Runner, trace: Trace, linker: Linker) -> None:
        """Fill pages and store them."""
        self.linker = linker
        self.times = Times()
        self.groups: tuple[tuple[int, int], ...] = ()
        self._runner = runner
        self._trace = trace
        self._pages = runner.new_pages(NUM_PAGES)
        runner.fill(self._pages)
        saved = linker.save(self._pages.keys, self._pages.page_ids).result()
        assert saved.num_objects == NUM_PAGES, saved

    def round(self, number: int) -> None:
        """Go all ways in turn, another one first each time."""
        ways: list[Callable[[], None]] = [self._bare, self._beside, self._before, self.alone]
        for turn in range(len(ways)):
            ways[(number + turn) % len(ways)]()

    def alone(self) -> None:
        """Load layer by layer with no compute beside it."""
        to = self._runner.places_for(self._pages)
        load = self.linker.load(to.keys, to.page_ids, layerwise=True)
        self.groups = load.groups
        begin_s = time.perf_counter()
        load.start()
        load.wait_layer(0)
        self.times.first_alone.append(_us_since(begin_s))
        load.result()
        self.times.all_alone.append(_us_since(begin_s))
        self._runner.give_back(to)

    def _bare(self) -> None:
        self.times.bare.append(self._runner.step(read=[self._pages]).step_us)

    def _beside(self) -> None:
        to = self._runner.places_for(self._pages)
        load = self.linker.load(to.keys, to.page_ids, layerwise=True)
        self._trace.clear()
        step = self._runner.step(load=load, loaded=[to])
        assert step.failures == [None], step.failures
        self.times.beside.append(step)
        self.times.timelines.append(self._trace.intervals())
        self._runner.give_back(to)

    def _before(self) -> None:
        to = self._runner.places_for(self._pages)
        begin_s = time.perf_counter()
        self.linker.load(to.keys, to.page_ids).result()
        whole_us = _us_since(begin_s)
        self.times.whole.append(whole_us)
        self.times.before.append(whole_us + self._runner.step(read=[to]).step_us)
        self._runner.give_back(to)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the bars."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="folder for trace.json and lanes.png")
    parser.add_argument("--write", action="store_true", help="record the figures")
    options = parser.parse_args(arguments)
    layout = cut(MODEL, None)
    layout = layout.bind(make_tensors(layout, 3 * NUM_PAGES))
    trace = Trace()
    compute = Compute(CPU, trace, layer_us=0)
    runner = Runner(layout, trace, compute, max_pages=NUM_PAGES)
    num_bytes = NUM_PAGES * layout.object_bytes["full"]
    staging = StagingBuffer(STAGING_BYTES, device=CPU)
    # A second call on the wire would have the next group come later, and wants a core of its own.
    config = LinkerConfig(namespace="overlap", wire_threads=1)
    with local_store((256 << 20) + 2 * num_bytes) as store:
        with Linker(layout, store, staging, config, trace=trace) as linker:
            bench = Bench(runner, trace, linker)
            transfer_us = _calibrate(bench)
        compute.layer_us = COMPUTE_OVER_TRANSFER * transfer_us / layout.num_layers
        config = replace(
            config,
            compute_us_per_layer=compute.layer_us,
            wire_gb_per_s=num_bytes / transfer_us / 1e3,
        )
        with Linker(layout, store, staging, config, trace=trace) as bench.linker:
            for number in range(WARM_ROUNDS):
                bench.round(number)
            bench.times = Times()
            for number in range(ROUNDS):
                bench.round(number)
    lengths = ", ".join(str(end - first) for first, end in bench.groups)
    print(
        f"{MODEL}, {layout.num_layers} layers of {compute.layer_us / 1e3:.2f} ms, {NUM_PAGES} "
        f"pages of {layout.object_bytes['full']:,} bytes, remote owner, TCP loopback, "
        f"{ROUNDS} rounds, every byte read compared\ngroups of {lengths} layers"
    )
    if options.out:
        _show(bench.times, options.out)
    return _report(bench.times, compute.layer_us * layout.num_layers)


def _calibrate(bench: Bench) -> float:
    """Return how long a layer-wise load takes alone, in microseconds."""
    for _ in range(WARM_ROUNDS):
        bench.alone()
    bench.times = Times()
    for _ in range(ROUNDS):
        bench.alone()
    return statistics.median(bench.times.all_alone)


def _report(times: Times, compute_us: float) -> int:
    steps = [step.step_us for step in times.beside]
    firsts = [step.first_us for step in times.beside]
    bare_us = statistics.median(times.bare)
    rows = [
        {
            "what": what,
            "median ms": statistics.median(taken) / 1e3,
            "p90 ms": sorted(taken)[len(taken) * 9 // 10] / 1e3,
            "added to the step, ms": f"{(statistics.median(taken) - bare_us) / 1e3:.2f}"
            if is_step
            else "",
        }
        for what, taken, is_step in (
            ("step without a load", times.bare, False),
            ("step beside a layer-wise load", steps, True),
            ("whole load, then the step", times.before, True),
            ("whole load", times.whole, False),
            ("layer-wise load alone", times.all_alone, False),
            ("first group of a load alone", times.first_alone, False),
            ("first group within the step", firsts, False),
        )
    ]
    first_us = statistics.median(firsts)  # of the very steps that it is compared with
    added = (statistics.median(steps) - bare_us) / first_us
    ratio = compute_us / statistics.median(times.all_alone)
    bars = [
        Bar("overlap_added_over_first_group", added, 1.1, at_least=False),
        Bar("overlap_compute_over_transfer", ratio, 1.0, at_least=True),
    ]
    return report("overlap", rows, bars)


def _show(times: Times, folder: Path) -> None:
    """Write the timeline of the step that took the median time."""
    steps = [step.step_us for step in times.beside]
    median = steps.index(statistics.median_low(steps))
    trace = Trace()
    for each in times.timelines[median]:
        if each.lane != "check":  # after the step
            trace.add(each.lane, each.name, each.begin_s, each.end_s, **each.arguments)
    folder.mkdir(parents=True, exist_ok=True)
    trace.write(folder / "trace.json")
    title = f"{MODEL}, {NUM_PAGES} pages: a step beside a layer-wise load"
    draw(trace, folder / "lanes.png", title)


def _us_since(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1e6


if __name__ == "__main__":
    sys.exit(main())
