"""The worker's side for vLLM through a real Mooncake store, with plain layouts."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hooked import Hooked, Pause

from kvferry.errors import StoreUnavailable
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.vllm_jobs import GroupPages, LoadJob, LoadsEnded, SaveJob, StepJobs
from kvferry.linker.vllm_pools import VllmGroup, VllmPools
from kvferry.linker.vllm_worker import WorkerSide
from kvferry.testing import check_telling, make_tensors, write_telling

pytestmark = pytest.mark.mooncake
LIMIT_S = 20.0
_names = itertools.count()


def group(group_id: int, space: str, num_layers: int, device: torch.device) -> VllmGroup:
    """One of vLLM's groups, 40 blocks of it."""
    layout = CacheLayout.from_description(
        {
            "page_size": 4,
            "num_layers": num_layers,
            **({"window_tokens": 8} if space == "swa" else {}),
            "pools": [
                {"name": "attn", "index": space, "rows": "page", "row_shape": [2, 4, 32],
                 "dtype": "bfloat16", "layers": list(range(num_layers))}
            ],
        }
    )  # fmt: skip
    bound = layout.bind(make_tensors(layout, 40, device))
    names = {f"layers.{layer}.{space}": layer for layer in range(num_layers)}
    return VllmGroup(group_id, space, bound, names, replicated=False)


class Bed:
    """A worker's side over two groups, or one for transfers by layer."""

    def __init__(self, store: MooncakeStore, device: torch.device) -> None:
        self.store = Hooked(store)
        self.device = device
        self.sides: list[WorkerSide] = []
        self.namespace = f"vllm-worker-{next(_names)}"

    def side(
        self, *, by_layer: bool = False, staging_bytes: int = 1 << 20, **settings: Any
    ) -> WorkerSide:
        groups = [group(0, "full", 3, self.device), group(1, "swa", 2, self.device)]
        self.sides.append(
            WorkerSide(
                VllmPools(tuple(groups[:1] if by_layer else groups), ()),
                self.store,  # type: ignore[arg-type]
                LinkerConfig(
                    namespace=self.namespace,
                    lookup_ttl_s=0.0,
                    transfer_timeout_s=10.0,
                    **settings,
                ),
                lambda num_bytes, device: StagingBuffer(num_bytes, device=device),
                staging_bytes,
                loads_by_layer=by_layer,
                saves_by_layer=by_layer,
            )
        )
        return self.sides[-1]


@pytest.fixture
def worker_bed(mooncake_store: MooncakeStore, device: torch.device) -> Iterator[Bed]:
    bed = Bed(mooncake_store, device)
    yield bed
    for side in bed.sides:
        side.close()


def layout_of(side: WorkerSide, group_id: int) -> CacheLayout:
    return side.linkers[group_id].layout


def pages(*block_ids: int) -> GroupPages:
    return GroupPages([f"{at:032x}" for at in range(len(block_ids))], list(block_ids))


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.002)


def save(side: WorkerSide, number: int, by_group: dict[int, GroupPages]) -> None:
    """Save pages and wait until the store has them."""
    jobs = StepJobs([], [SaveJob(number, by_group)])
    side.saves.begin_by_layer(jobs)
    for name in side.saves._layers:
        side.saves.layer_written(name)
    side.saves.begin(jobs)
    side.saves.begin(jobs)  # vLLM may call twice
    until(lambda: side.saves.num_in_flight == 0)
    assert side.saves.take_ended() == (Counter([number]), Counter([number]))
    assert side.saves.take_ended() == (Counter(), Counter())


def load(side: WorkerSide, by_group: dict[int, GroupPages], error: str = "") -> LoadsEnded:
    """Load pages and return what came of it."""
    side.loads.begin(StepJobs([LoadJob("a", by_group, error)]))
    for name in side.saves._layers:
        side.loads.wait_for_layer(name)
    ended = LoadsEnded()

    def has_ended() -> bool:
        ended.ended |= (now := side.loads.take_ended()).ended
        ended.failed |= now.failed
        ended.failed_blocks |= now.failed_blocks
        return bool(ended.ended)

    until(has_ended)
    return ended


def test_a_layer_is_written_once_all_of_its_caches_are(worker_bed: Bed) -> None:
    side = worker_bed.side(by_layer=True, groups=((0, 1), (1, 2), (2, 3)))
    layout = layout_of(side, 0)
    names = [f"layers.{layer}.index" for layer in range(3)]  # beside latents
    side.saves._layers = {name: (0, layer) for layer, name in enumerate(names)}
    jobs = StepJobs([], [SaveJob(1, {0: pages(5)})])
    side.saves.begin_by_layer(jobs)
    for layer, name in enumerate(names):
        side.saves.layer_written(name)
        time.sleep(0.3)  # who took this for the whole layer would pack it now
        write_telling(layout, "full", [5], [5], layers=[layer])
    side.saves.begin(jobs)
    until(lambda: side.saves.num_in_flight == 0)
    assert not load(side, {0: pages(7)}).failed
    check_telling(layout, "full", [7], [5])


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "layers"])
def test_pages_come_back_byte_for_byte(by_layer: bool, worker_bed: Bed) -> None:
    first = worker_bed.side(by_layer=by_layer)
    second = worker_bed.side(by_layer=by_layer)
    told = {0: ("full", pages(7, 3, 39)), 1: ("swa", pages(5, 6))}
    told = {group_id: told[group_id] for group_id in first.linkers}
    for group_id, (space, some) in told.items():
        write_telling(layout_of(first, group_id), space, some.block_ids, tags=some.block_ids)
    save(first, 1, {group_id: some for group_id, (_, some) in told.items()})
    got = load(second, {group_id: some for group_id, (_, some) in told.items()})
    assert got == LoadsEnded({"a"})
    for group_id, (space, some) in told.items():
        check_telling(layout_of(second, group_id), space, some.block_ids, tags=some.block_ids)


def test_groups_keep_apart_under_one_key(worker_bed: Bed) -> None:
    side = worker_bed.side()
    save(side, 1, {0: pages(1, 2)})
    assert load(side, {1: pages(1, 2)}).failed == {"a"}
    assert load(side, {0: pages(1, 2)}).failed == set()


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "layers"])
def test_a_failed_load_tells_its_blocks(by_layer: bool, worker_bed: Bed) -> None:
    side = worker_bed.side(by_layer=by_layer)
    assert load(side, {0: pages(8, 9)}) == LoadsEnded({"a"}, {"a"}, {8, 9})


def test_a_load_that_must_not_begin_fails(worker_bed: Bed) -> None:
    side = worker_bed.side()
    save(side, 1, {0: pages(1, 2)})
    before = len(worker_bed.store.calls)
    assert load(side, {0: pages(8, 9)}, "a gap") == LoadsEnded({"a"}, {"a"}, {8, 9})
    assert len(worker_bed.store.calls) == before


def test_groups_of_other_stages_are_passed_over(worker_bed: Bed) -> None:
    side = worker_bed.side()
    save(side, 1, {7: pages(1, 2)})
    assert load(side, {7: pages(1, 2)}) == LoadsEnded({"a"})


def test_a_save_that_fails_ends_all_the_same(worker_bed: Bed) -> None:
    side = worker_bed.side()

    def away(*_: object) -> None:
        raise StoreUnavailable("a test's")

    worker_bed.store.before = dict.fromkeys(("exists", "put"), away)
    save(side, 1, {0: pages(1, 2)})


def test_blocks_are_free_once_they_are_packed(worker_bed: Bed) -> None:
    """The wire may take as long as it likes, while staging has room."""
    side = worker_bed.side()
    pause = worker_bed.store.before["put"] = Pause()
    side.saves.begin(StepJobs([], [SaveJob(1, {0: pages(1, 2)})]))
    pause.wait()
    until(lambda: side.saves.take_ended() == (Counter([1]), Counter()))
    assert side.saves.num_in_flight == 1
    assert side.saves.take_ended() == (Counter(), Counter())
    pause.release()
    until(lambda: side.saves.take_ended() == (Counter(), Counter([1])))
    assert side.saves.num_in_flight == 0


def test_the_end_tells_what_was_in_flight(worker_bed: Bed) -> None:
    side = worker_bed.side()
    pause = worker_bed.store.before["get"] = Pause()
    side.loads.begin(StepJobs([LoadJob("a", {0: pages(8, 9)}), LoadJob("b", {0: pages(4, 5)})]))
    pause.wait()
    side.saves.begin(StepJobs([], [SaveJob(3, {0: pages(1)}), SaveJob(4, {1: pages(2)})]))
    threading.Timer(0.3, pause.release).start()
    saves, stored, loads = side.close()
    assert saves == stored == Counter([3, 4])
    assert loads == LoadsEnded({"a", "b"}, {"a", "b"}, {8, 9, 4, 5})
    assert side.saves.num_in_flight == 0


def test_keys_of_both_groups_are_told(worker_bed: Bed) -> None:
    told = worker_bed.side().group_keys()
    assert set(told) == {0, 1}
    assert (told[0].window_pages, told[1].window_pages) == (None, 2)
    assert told[0].prefix.startswith(worker_bed.namespace)
    assert told[0].prefix != told[1].prefix
