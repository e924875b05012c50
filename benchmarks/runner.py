"""A model's forward pass as far as a KV cache can tell: layers that read, compute and write pages.

`python benchmarks/runner.py --out DIR` saves pages layer by layer, loads them back layer by layer
beside compute, and leaves `trace.json` (for Perfetto) and `lanes.png` there; `--help` has the rest.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from bars import table
from compute import Compute
from free_pages import FreePages, Pages
from lanes import draw, overlaps
from local import cut, local_store

from kvferry import CacheLayout, Linker, LinkerConfig, StagingBuffer
from kvferry.errors import TransferFailed
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.trace import Trace
from kvferry.testing import POISON, check_telling, make_tensors, pages_of, write_telling


@dataclass(frozen=True)
class StepTimes:
    """What a step took.

    Attributes:
        step_us: from its begin until its last layer is computed and the load's verdict is there.
        first_us: from its begin until the first layer was there.
        wait_us: how long the thread was held for layers.
        check_us: comparing what was read, after the step, in none of the other times.
        failures: of each request that was loaded, why it failed; None if it did not. What a failed
            one has read is undefined, and not compared.
    """

    step_us: float
    first_us: float
    wait_us: float
    check_us: float
    failures: list[TransferFailed | None] = field(default_factory=list)


class Runner:
    """Runs steps of a model whose pools are a layout's.

    A layer of a step waits until the load says that the layer is there, reads its pages, computes,
    and writes its new pages.

    What a layer reads is copied aside at that moment, within its compute time (which it does not
    lengthen, unless it takes longer than that), as attention reads its pages while it computes.
    The copies are compared with the telling bytes once the clock has stopped: nothing but the copy
    is in a step's time, and that is in every step's, with a load or without.

    Attributes:
        layout: bound to the pools.
        compute: what a layer computes.
    """

    def __init__(
        self, layout: CacheLayout, trace: Trace, compute: Compute, *, max_pages: int
    ) -> None:
        """Allocate what a step needs.

        Args:
            layout: bound.
            trace: gets the lane `check`.
            compute: what a layer computes; recorded by itself.
            max_pages: how many a step may read, and how many it may write.
        """
        assert layout.device is not None
        self.layout = layout
        self.compute = compute
        self._trace = trace
        self._max_pages = max_pages
        self._device = layout.device
        self._free = {
            space: FreePages(num_pages, seed)
            for seed, (space, num_pages) in enumerate(sorted(layout.num_pages.items()))
        }
        self._tags = itertools.count(1)
        self._read = layout.bind(make_tensors(layout, max_pages, self._device))
        self._fresh = layout.bind(make_tensors(layout, max_pages, self._device))
        self._views = [self._views_of(layer) for layer in range(layout.num_layers)]

    def new_pages(self, num_pages: int) -> Pages:
        """Take pages whose content is new; nothing is written to them yet."""
        tags = list(itertools.islice(self._tags, num_pages))
        return self.places_for(Pages([f"page-{tag}" for tag in tags], tags, {}))

    def places_for(self, pages: Pages) -> Pages:
        """Take other places for the same content, and poison them: nothing is there yet."""
        taken = {space: free.take(len(pages.keys)) for space, free in self._free.items()}
        placed = replace(pages, page_ids=taken)
        self.spoil(placed)
        return placed

    def give_back(self, pages: Pages) -> None:
        """Free pages' places."""
        for space, page_ids in pages.page_ids.items():
            self._free[space].give(page_ids)

    def fill(self, pages: Pages) -> None:
        """Write pages whole, as if a step had."""
        for space, page_ids in pages.page_ids.items():
            write_telling(self.layout, space, page_ids, pages.tags)

    def spoil(self, pages: Pages) -> None:
        """Overwrite pages with what they must not hold."""
        places = self._places([pages])
        for space, pool, _, _ in itertools.chain(*self._views):
            value = torch.full((pool.element_size(),), POISON, dtype=torch.uint8).view(pool.dtype)
            pool.index_fill_(0, places[space], value.item())

    def step(
        self,
        *,
        read: Sequence[Pages] = (),
        load: LayerLoad | None = None,
        loaded: Sequence[Pages] = (),
        written: Pages | None = None,
        save: LayerSave | None = None,
    ) -> StepTimes:
        """Run all layers once.

        Args:
            read: pages that every layer reads, and that are there.
            load: not started; started when the step begins, waited for before each layer.
            loaded: what it brings, a `Pages` for each of its requests; every layer reads them too.
            written: pages that every layer writes.
            save: told of every layer that is written.

        Raises:
            AssertionError: a layer has read a wrong byte.
            ValueError: more pages are read, or written, than `max_pages`.
        """
        everything = [*read, *loaded]
        for pages in (everything, [written] if written else []):
            num_pages = sum(len(each.keys) for each in pages)
            if num_pages > self._max_pages:
                raise ValueError(f"{num_pages} pages, wanted at most {self._max_pages}")
        reads = self._places(everything)
        writes = self._places([written] if written else [])
        if written:
            for space, page_ids in written.page_ids.items():
                write_telling(self._fresh, space, range(len(page_ids)), written.tags)
        self.compute.finish()
        first_us = wait_us = 0.0
        begin_s = time.perf_counter()
        if load is not None:
            load.start()
        self.compute.begin_step()
        for layer in range(self.layout.num_layers):
            if load is not None:
                with self.compute.stalled(layer):
                    wait_us += load.wait_layer(layer).waited_us
                first_us = first_us or (time.perf_counter() - begin_s) * 1e6
            with self.compute.layer(layer, partial(_is_there, load, layer + 1)):
                for space, pool, copies, fresh in self._views[layer]:
                    torch.index_select(pool, 0, reads[space], out=copies[: len(reads[space])])
                    pool.index_copy_(0, writes[space], fresh[: len(writes[space])])
            if save is not None:
                save.layer_written(layer)
        self.compute.finish()
        failures = [] if load is None else _verdicts(load)
        step_us = (time.perf_counter() - begin_s) * 1e6
        check_us = self._check(everything, [*[None] * len(read), *failures])
        return StepTimes(step_us, first_us, wait_us, check_us, failures)

    def _check(self, pages: Sequence[Pages], failures: Sequence[TransferFailed | None]) -> float:
        """Compare what was read with what it must be, but for failed loads; return the time."""
        begin_s = time.perf_counter()
        first = 0
        for each, failure in zip(pages, failures, strict=True):
            places = range(first, first + len(each.keys))
            if failure is None:
                for space in self.layout.spaces:
                    check_telling(self._read, space, places, each.tags)
            first = places.stop
        end_s = time.perf_counter()
        self._trace.add("check", f"{first} pages", begin_s, end_s)
        return (end_s - begin_s) * 1e6

    def _places(self, pages: Sequence[Pages]) -> dict[str, torch.Tensor]:
        """Return all page ids of each index space, int64 on the device."""
        return {
            space: torch.tensor(
                [page_id for each in pages for page_id in each.page_ids[space]],
                dtype=torch.int64,
                device=self._device,
            )
            for space in self.layout.spaces
        }

    def _views_of(self, layer: int) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return a layer's buffers page by page: those of the model, of reads, of new pages."""
        found = []
        for space in self.layout.spaces:
            buffers = (whole.buffers[space] for whole in (self.layout, self._read, self._fresh))
            for same in zip(*buffers, strict=True):
                if same[0].layer_id == layer:
                    views = []
                    for buffer in same:
                        assert buffer.tensor is not None
                        views.append(pages_of(buffer.pool, buffer.tensor))
                    found.append((space, views[0], views[1], views[2]))
        return found


def _is_there(load: LayerLoad | None, layer: int) -> bool:
    """Whether a layer has to wait for nothing."""
    if load is None:
        return True
    assert load.step is not None
    return layer < len(load.step.targets) and load.counter_set.counters.reached(load.step, layer)


def _verdicts(load: LayerLoad) -> list[TransferFailed | None]:
    """Wait for a load's end; return for each of its requests why it failed, None if it did not."""
    found: list[TransferFailed | None] = []
    for transfer in load.transfers:
        try:
            transfer.result()
            found.append(None)
        except TransferFailed as error:
            found.append(error)
    if not any(found):
        try:
            load.result()
        except TransferFailed as error:  # a wait on the device was in vain: of which, none can say
            return [error] * len(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Save in one step, load in the next, and show that one."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    layout = cut(options.model, options.layers)
    layout = layout.bind(make_tensors(layout, 3 * options.pages, device))
    trace = Trace(device)
    compute = Compute(
        device,
        trace,
        layer_us=options.compute_us,
        matmul_size=options.matmul_size,
        num_matmuls=options.matmuls,
    )
    runner = Runner(layout, trace, compute, max_pages=options.pages)
    object_bytes = sum(layout.object_bytes.values())
    config = LinkerConfig(namespace="runner", compute_us_per_layer=options.compute_us)
    owner_bytes = 256 * 2**20 + 4 * options.pages * object_bytes
    staging = StagingBuffer(options.staging_mb << 20, device=device)
    with (
        local_store(owner_bytes) as store,
        Linker(layout, store, staging, config, trace=trace) as linker,
    ):
        for _ in range(3):  # the last one is shown; in the others everything is touched once
            old = runner.new_pages(options.pages)
            save = linker.save(old.keys, old.page_ids, layerwise=True)
            runner.step(written=old, save=save)
            stored = save.result()
            to, new = runner.places_for(old), runner.new_pages(options.pages)
            load = linker.load(to.keys, to.page_ids, layerwise=True)
            trace.clear()
            if options.save:
                save = linker.save(new.keys, new.page_ids, layerwise=True)
                times = runner.step(load=load, loaded=[to], written=new, save=save)
                save.result()
            else:
                times = runner.step(load=load, loaded=[to])
            for pages in (old, to, new):
                runner.give_back(pages)
    print(
        f"{options.model}, {layout.num_layers} layers, {options.pages} pages of {object_bytes:,} "
        f"bytes, {stored.num_objects} stored, in {len(load.groups)} groups of layers"
    )
    print(f"step {times.step_us / 1e3:.1f} ms, of it waits {times.wait_us / 1e3:.1f} ms")
    print(table(overlaps(trace)))
    options.out.mkdir(parents=True, exist_ok=True)
    trace.write(options.out / "trace.json")
    what = "load and save" if options.save else "load"
    draw(trace, options.out / "lanes.png", f"{options.model}, {options.pages} pages: {what}")
    for failure in times.failures:
        print("every byte right" if failure is None else f"FAILED: {failure}")
    return 1 if any(times.failures) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="deepseek-v3.2-dsa-fp8", help="of layouts.json")
    parser.add_argument("--layers", type=int, help="its first layers alone")
    parser.add_argument("--pages", type=int, default=16, help="pages that move")
    parser.add_argument("--compute-us", type=float, default=2000, help="of a layer, on a CPU")
    parser.add_argument("--matmul-size", type=int, default=4096, help="on a GPU: rows and columns")
    parser.add_argument("--matmuls", type=int, default=1, help="on a GPU: multiplications a layer")
    parser.add_argument("--staging-mb", type=int, default=256, help="size of the staging buffer")
    parser.add_argument("--save", action="store_true", help="save other pages in the same step")
    parser.add_argument("--out", type=Path, required=True, help="folder for trace.json, lanes.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
