"""One process of the demo: fills pools and saves them, or looks up, loads and compares.

Writes a JSON object a line: `stage` and `share` while it works, `write` or `read` with a transfer's
timings at its end, `fault` where something was wrong.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from typing import Any

from kvferry.models import description


@dataclass(frozen=True)
class DemoCase:
    """What one run moves: plain numbers, so that orchestrator and workers agree.

    Attributes:
        model: a name of `layouts.json`.
        tokens: length of the prefix, a multiple of the page size.
        device: `auto`, `cpu` or `cuda`.
        staging_bytes: size of the staging buffer.
        counts: index space to how many pages of it travel.
        num_bytes, num_ranges, num_objects: what travels, before and after packing.
    """

    model: str
    tokens: int
    device: str
    staging_bytes: int
    counts: dict[str, int]
    num_bytes: int
    num_ranges: int
    num_objects: int

    @classmethod
    def of(cls, model: str, tokens: int, device: str, staging_bytes: int) -> "DemoCase":
        """Return the case of a model and a number of tokens, rounded down to whole pages."""
        from kvferry.layout import CacheLayout

        layout = CacheLayout.from_description(description(model))
        num_pages = max(1, tokens // layout.page_size)
        window = layout.window_pages or num_pages
        counts = {"full": num_pages, "swa": min(window, num_pages), "state": 1}
        counts = {space: counts[space] for space in layout.spaces}
        largest = max(layout.object_bytes.values())
        return cls(
            model,
            num_pages * layout.page_size,
            device,
            max(staging_bytes, 2 * largest),
            counts,
            sum(layout.object_bytes[space] * count for space, count in counts.items()),
            sum(layout.num_ranges(space) * count for space, count in counts.items()),
            sum(counts.values()),
        )

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""
        return self.counts.get("full", max(self.counts.values()))

    @property
    def store_bytes(self) -> int:
        """Memory of the store that the case needs, with room for its warm-up."""
        return self.num_bytes + self.num_bytes // 8 + (256 << 20)

    def as_dict(self) -> dict[str, Any]:
        """Return the case as JSON takes it."""
        return asdict(self)

    def keys(self) -> list[str]:
        """Return the page keys of the prefix."""
        return [f"demo-{self.model}-{index:06d}" for index in range(self.num_pages)]

    def tags(self, space: str) -> list[int]:
        """Return which page of the prefix each of a space's pages is: the last ones."""
        return list(range(self.num_pages - self.counts[space], self.num_pages))


class Worker:
    """Pools, store and linker of one process."""

    def __init__(self, case: DemoCase, address: str) -> None:
        """Build pools that hold a quarter more pages than travel, and connect."""
        import torch

        from kvferry import CacheLayout, Linker, LinkerConfig, MooncakeConfig, MooncakeStore
        from kvferry.linker.staging import StagingBuffer
        from kvferry.testing import make_tensors

        self.case = case
        on_gpu = case.device == "cuda" or (case.device == "auto" and torch.cuda.is_available())
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        num_pages = {space: count + count // 4 + 2 for space, count in case.counts.items()}
        layout = CacheLayout.from_description(description(case.model))
        self.layout = layout.bind(make_tensors(layout, num_pages, device))
        # The last page of each pool is kept for the warm-up, which moves its poison.
        self.warm_ids = {space: [pages - 1] for space, pages in num_pages.items()}
        memory = "auto" if not on_gpu or _has_cuda_wheel() else "pinned"
        self.store = MooncakeStore(MooncakeConfig(master_address=address))
        staging = StagingBuffer(case.staging_bytes, device=device, memory=memory)
        config = LinkerConfig(transfer_timeout_s=120)
        self.linker = Linker(self.layout, self.store, staging, config)

    def page_ids(self, role: str) -> dict[str, list[int]]:
        """Return shuffled page ids of each space, another shuffle for each role."""
        shuffle = random.Random(role)
        return {
            space: shuffle.sample(range(self.warm_ids[space][0]), count)
            for space, count in self.case.counts.items()
        }

    def by_key(self, page_ids: dict[str, list[int]]) -> dict[str, list[int]]:
        """Return page ids for every key, -1 where a space holds no page of it."""
        return {
            space: [-1] * (self.case.num_pages - len(ids)) + ids for space, ids in page_ids.items()
        }

    def write(self) -> dict[str, float]:
        """Fill the pages, save them, return the timings."""
        from kvferry.testing import write_telling

        page_ids = self.page_ids("write")
        for done, (space, ids) in enumerate(page_ids.items()):
            say(stage="filling pools", share=done / len(page_ids))
            write_telling(self.layout, space, ids, self.case.tags(space))
        self.linker.save(["warm"], self.warm_ids).result()
        transfer = self.linker.save(self.case.keys(), self.by_key(page_ids))
        follow(transfer, "saving", self.case.num_objects)
        result = transfer.result()
        if result.failures or result.num_objects != self.case.num_objects:
            raise AssertionError(
                f"stored {result.num_objects} of {self.case.num_objects} objects: {result.failures}"
            )
        return asdict(result.timings)

    def read(self) -> dict[str, float]:
        """Look up, load into other pages, all poisoned, compare every byte; return the timings."""
        from kvferry.testing import check_poison, check_telling, poison

        say(stage="looking up", share=0.0)
        keys, page_ids = self.case.keys(), self.page_ids("read")
        sparse = any(count < self.case.num_pages for count in self.case.counts.values())
        wanted = [self.case.num_pages] if sparse else list(range(1, self.case.num_pages + 1))
        found = self.linker.lookup(keys)
        if found != wanted:
            raise AssertionError(f"restorable prefixes are {found}, wanted {wanted}")
        poison(self.layout)
        self.linker.load(["warm"], self.warm_ids).result()
        transfer = self.linker.load(keys, self.by_key(page_ids))
        follow(transfer, "loading", self.case.num_objects)
        result = transfer.result()
        for done, (space, ids) in enumerate(page_ids.items()):
            say(stage="comparing", share=done / len(page_ids))
            check_telling(self.layout, space, ids, self.case.tags(space))
            check_poison(self.layout, space, ids)
        return asdict(result.timings)

    def close(self) -> None:
        """Close the linker, then the store."""
        self.linker.close()
        self.store.close()


def follow(transfer: Any, stage: str, num_objects: int) -> None:
    """Report a transfer's progress until it ends."""
    while not transfer.done():
        say(stage=stage, share=transfer.progress.num_objects / num_objects)
        time.sleep(0.05)


def say(**event: Any) -> None:
    """Write one line for the orchestrator."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _has_cuda_wheel() -> bool:
    names = {str(found.metadata["Name"]).lower() for found in distributions()}
    return bool(names & {"mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"})


def main(arguments: Sequence[str]) -> int:
    """Run `ADDRESS CASE ROLE...`, roles being `write` and `read`."""
    address, case = arguments[0], DemoCase(**json.loads(arguments[1]))
    say(stage="starting", share=0.0)
    worker = Worker(case, address)
    try:
        for role in arguments[2:]:
            say(**{role: worker.write() if role == "write" else worker.read()})
    except AssertionError as error:
        say(fault=str(error))
        return 1
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
