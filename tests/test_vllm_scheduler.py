"""The scheduler's side for vLLM: lookups, loads, and blocks held while a save reads them."""

import hashlib
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_groups import FULL, STATE, SWA, hashes, keys_of, prefixes

from kvferry.errors import StoreUnavailable
from kvferry.linker import vllm_held, vllm_scheduler
from kvferry.linker.vllm_groups import Group, RankKeys
from kvferry.linker.vllm_jobs import GroupPages, SaveJob, StepJobs
from kvferry.linker.vllm_scheduler import LOOK_BACK_BLOCKS, SchedulerSide

WINDOW = 2


class Pool:
    """vLLM's pool of blocks, as far as references go."""

    def __init__(self, count: int = 400) -> None:
        self.blocks = [SimpleNamespace(block_id=at, block_hash=None, refs=0) for at in range(count)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.refs += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.refs > 0
            block.refs -= 1

    @property
    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.refs]


class Bed:
    """A scheduler's side over a store that a test fills."""

    def __init__(self, groups: Sequence[Group] = (FULL,), **settings: Any) -> None:
        self.objects: set[str] = set()
        self.asked = 0
        self.is_down = False
        self.pool = Pool()
        self.tables: dict[str, tuple[list[int], ...]] = {}
        options: dict[str, Any] = {
            "num_workers": 1, "by_boundary": (), "loads_by_layer": False,
            "lookup_ttl_s": 0.0, "miss_ttl_s": 60.0,
            "min_load_tokens": 0, "max_held_share": 1.0, "generation": "",
            "hash_of": lambda block: block.block_hash,
            **settings,
        }  # fmt: skip
        windows = {SWA.group_id: WINDOW}
        self.side = SchedulerSide(prefixes(groups, windows=windows), self, **options)  # type: ignore[arg-type]
        self.side.bind(self.pool, self.tables.__getitem__)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked += 1
        if self.is_down:
            raise StoreUnavailable("down")
        return [key in self.objects for key in keys]

    def store(self, group: Group, told: Sequence[bytes], pages: Sequence[int]) -> None:
        keys = group.page_keys(told, 16, 99)
        window = WINDOW if group is SWA else None
        self.objects |= set(keys_of("r", group, window).object_keys([keys[page] for page in pages]))

    def computed(self, request: Any, group: Group, table: Sequence[int]) -> None:
        """Give blocks their hashes, as vLLM does when it caches them."""
        step = group.block_tokens // 16
        for at, block_id in enumerate(table):
            end = (at + 1) * step
            if block_id and end <= len(request.block_hashes):
                self.pool.blocks[block_id].block_hash = request.block_hashes[end - 1]


def request(name: str, num_tokens: int, num_computed: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=num_tokens, num_computed_tokens=num_computed,
        block_hashes=hashes(num_tokens // 16), skip_reading_prefix_cache=False,
    )  # fmt: skip


def test_a_lookup_leaves_the_last_token_to_compute() -> None:
    bed = Bed()
    one = request("a", 64)
    bed.store(FULL, one.block_hashes, range(4))
    assert bed.side.matched_tokens(one, 0) == 48
    assert bed.side.matched_tokens(request("b", 65), 0) == 64
    assert bed.side.matched_tokens(one, 32) == 16
    assert bed.side.matched_tokens(one, 48) == 0
    assert bed.side.matched_tokens(one, 40) == 0  # within a block
    one.skip_reading_prefix_cache = True
    assert bed.side.matched_tokens(one, 0) == 0


def test_short_hits_may_be_computed_instead() -> None:
    bed = Bed(min_load_tokens=48)
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    assert (bed.side.matched_tokens(one, 0), bed.side.matched_tokens(one, 32)) == (64, 0)


def test_nothing_is_found_while_the_store_is_away() -> None:
    bed = Bed()
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    bed.is_down = True
    assert bed.side.matched_tokens(one, 0) == 0
    bed.is_down = False
    assert bed.side.matched_tokens(one, 0) == 64


def test_a_load_takes_what_each_group_needs() -> None:
    bed = Bed((FULL, SWA, STATE))
    one = request("a", 200)
    told = one.block_hashes
    bed.store(FULL, told, range(12))
    bed.store(SWA, told, range(2, 6))
    bed.store(STATE, told, [2])
    assert bed.side.matched_tokens(one, 64) == 128
    table = (list(range(100, 112)), [0, 0, 33, 34, 35, 36], [0, 0, 77])
    bed.side.allocated(one, table, 128)
    jobs = bed.side.step({}, (), {})
    (load,) = jobs.loads
    assert load.request_id == "a"
    assert load.pages[0] == GroupPages(FULL.page_keys(told, 16, 12)[4:], list(range(104, 112)))
    assert load.pages[1] == GroupPages(SWA.page_keys(told, 16, 6)[4:], [35, 36])
    assert load.pages[2] == GroupPages([told[11].hex()], [77])
    assert bed.side.step({}, (), {}).loads == []


def test_what_failed_to_load_is_not_found_again_for_a_while() -> None:
    bed = Bed()
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    assert bed.side.matched_tokens(one, 0) == 64
    bed.side.allocated(one, ([5, 6, 7, 8],), 64)
    bed.side.loads_ended({"a"}, {"a"})
    assert bed.side.matched_tokens(one, 0) == 0
    other = Bed(miss_ttl_s=0.0)
    other.store(FULL, one.block_hashes, range(4))
    other.side.matched_tokens(one, 0)
    other.side.allocated(one, ([5, 6, 7, 8],), 64)
    other.side.loads_ended({"a"}, {"a"})
    assert other.side.matched_tokens(one, 0) == 64


def saved(jobs: StepJobs, group: Group = FULL) -> list[int]:
    return [block for save in jobs.saves for block in save.pages[group.group_id].block_ids]


def test_blocks_are_saved_in_the_step_that_completes_them() -> None:
    bed = Bed()
    one = request("a", 100)
    bed.tables["a"] = ([3, 4, 5, 6, 7, 8, 9],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, bed.tables["a"][0][:2])
    first = bed.side.step({"a": 40}, (), {})
    wanted = GroupPages(FULL.page_keys(one.block_hashes, 16, 2), [3, 4])
    assert first.saves == [SaveJob(1, {0: wanted})]
    assert bed.pool.held == [3, 4]
    one.num_computed_tokens = 40
    bed.computed(one, FULL, bed.tables["a"][0])
    second = bed.side.step({"a": 60}, (), {})
    assert saved(second) == [5, 6, 7, 8]
    assert bed.side.step({"a": 1}, (), {}).saves == []
    bed.side.held.saves_ended({1: 1})
    assert (bed.pool.held, bed.side.held.num_unstored) == ([5, 6, 7, 8], 2)
    bed.side.held.saves_ended({2: 1})
    assert (bed.pool.held, bed.side.held.num_unstored) == ([], 2)
    bed.side.held.saves_stored({1: 1, 2: 1})
    assert bed.side.held.num_unstored == 0


def test_blocks_are_held_until_every_worker_has_read_them() -> None:
    bed = Bed(num_workers=3)
    one = request("a", 32)
    bed.tables["a"] = ([3, 4],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4])
    assert bed.side.step({"a": 32}, (), {}).saves
    bed.side.finished("a")
    for _ in range(2):
        bed.side.held.saves_ended({1: 1})
        assert bed.pool.held == [3, 4]
    bed.side.held.saves_ended({1: 1})
    assert bed.pool.held == []


def test_blocks_without_their_hash_are_not_saved() -> None:
    bed = Bed((FULL, SWA))
    one = request("a", 96)
    bed.tables["a"] = ([3, 4, 5, 6, 7, 8], [0, 0, 20])
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4, 5, 6, 7, 8])
    bed.computed(one, SWA, [0, 0, 20])
    bed.pool.blocks[4].block_hash = None  # not kept by vLLM
    bed.pool.blocks[6].block_hash = hashlib.sha256(b"a part of it").digest()
    save = bed.side.step({"a": 96}, (), {})
    assert saved(save) == [3, 5, 7, 8]
    assert saved(save, SWA) == [20]


def test_late_hashes_are_seen_a_step_later() -> None:
    bed = Bed()
    one = request("a", 64)
    bed.tables["a"] = ([3, 4, 5, 6],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4])
    assert saved(bed.side.step({"a": 64}, (), {})) == [3, 4]
    one.num_computed_tokens = 64
    bed.computed(one, FULL, [3, 4, 5, 6])
    assert saved(bed.side.step({"a": 1}, (), {})) == [5, 6]


def test_looking_back_is_bounded() -> None:
    bed = Bed()
    count = LOOK_BACK_BLOCKS + 10
    one = request("a", count * 16)
    one.block_hashes = [hashlib.sha256(str(at).encode()).digest() for at in range(count)]
    table = list(range(1, count + 1))
    bed.tables["a"] = (table,)
    bed.side.allocated(one, bed.tables["a"], 0)
    assert bed.side.step({"a": count * 16}, (), {}).saves == []
    one.num_computed_tokens = count * 16
    bed.computed(one, FULL, table)
    assert saved(bed.side.step({"a": 1}, (), {})) == table[10:]


def test_a_step_saves_a_key_once() -> None:
    bed = Bed()
    for name, table in (("a", [3, 4]), ("b", [13, 14])):
        one = request(name, 32)
        bed.tables[name] = (table,)
        bed.side.allocated(one, bed.tables[name], 0)
        bed.computed(one, FULL, table)
    assert saved(bed.side.step({"a": 32, "b": 32}, (), {})) == [3, 4]


def test_loaded_blocks_are_not_saved_again() -> None:
    bed = Bed()
    one = request("a", 100)
    bed.store(FULL, one.block_hashes, range(4))
    assert bed.side.matched_tokens(one, 0) == 64
    bed.tables["a"] = ([3, 4, 5, 6, 7, 8, 9],)
    bed.side.allocated(one, bed.tables["a"], 64)
    bed.side.loads_ended({"a"}, set())
    one.num_computed_tokens = 64
    bed.computed(one, FULL, bed.tables["a"][0])
    assert saved(bed.side.step({"a": 36}, (), {})) == [7, 8]


def test_preempted_requests_begin_anew() -> None:
    bed = Bed()
    one = request("a", 32)
    bed.tables["a"] = ([3, 4],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4])
    assert saved(bed.side.step({"a": 32}, (), {})) == [3, 4]
    assert bed.side.step({"a": 32}, ["a"], {}).saves == []
    bed.tables["a"] = ([23, 24],)
    bed.computed(one, FULL, [23, 24])
    assert saved(bed.side.step({"a": 32}, (), {})) == [23, 24]


def test_states_come_by_their_boundary_alone() -> None:
    bed = Bed((FULL, STATE), by_boundary=[STATE.group_id])
    one = request("a", 144)
    bed.tables["a"] = ([3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 40])
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, STATE, [0, 40])
    bed.pool.blocks[41].block_hash = one.block_hashes[3]
    offers = {"a": [(2, 40, 128), (2, 41, 64), (2, 41, 48), (2, 40, 64), (7, 40, 64)]}
    (save,) = bed.side.step({"a": 144}, (), offers).saves
    assert save.pages == {
        2: GroupPages([one.block_hashes[7].hex(), one.block_hashes[3].hex()], [40, 41])
    }


def test_saves_in_flight_hold_no_more_than_their_share() -> None:
    bed = Bed(max_held_share=3 / 400)
    for name, table in (("a", [3, 4]), ("b", [13, 14])):
        one = request(name, 32)
        one.block_hashes = [hashlib.sha256(f"{name}{at}".encode()).digest() for at in range(2)]
        bed.tables[name] = (table,)
        bed.side.allocated(one, bed.tables[name], 0)
        bed.computed(one, FULL, table)
    assert saved(bed.side.step({"a": 32, "b": 32}, (), {})) == [3, 4, 13]
    assert (bed.side.num_postponed, bed.pool.held) == (1, [3, 4, 13])
    one.num_computed_tokens = 32
    assert bed.side.step({"b": 1}, (), {}).saves == []
    bed.side.held.saves_ended({1: 1})
    assert saved(bed.side.step({"b": 1}, (), {})) == [14]


def told(generation: str, rank: str = "r", weights: str = "") -> RankKeys:
    """What a rank of one group tells of its keys."""
    return RankKeys(generation, {FULL.group_id: keys_of(rank, FULL)}, weights)


def test_a_reset_over_unknown_weights_draws_a_generation(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed(num_workers=2)
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    objects = set(bed.objects)
    assert bed.side.matched_tokens(one, 0) == 64
    bed.side.reset()
    assert bed.objects == objects
    drawn = bed.side.generation.current
    assert drawn.startswith("drawn-")
    assert bed.side.step({}, (), {}).generation == drawn
    assert bed.side.matched_tokens(one, 0) is None  # the ranks have yet to tell
    bed.side.learn_more([told(drawn, "r"), told("", "s"), told("drawn-before", "s")])
    assert bed.side.matched_tokens(one, 0) is None
    bed.side.learn_more([told(drawn, "s")])
    assert f"{drawn!r} was drawn" in caplog.text
    assert bed.side.matched_tokens(one, 0) == 0
    for rank in ("r", "s"):
        keys = FULL.page_keys(one.block_hashes, 16, 2)
        bed.objects |= set(keys_of(rank, FULL).object_keys(keys))
    assert bed.side.matched_tokens(one, 0) == 32
    bed.side.reset()
    assert bed.side.generation.current not in ("", drawn)


def test_a_reset_over_the_same_weights_keeps_the_generation() -> None:
    bed = Bed(num_workers=2)
    one = request("a", 65)
    bed.side.learn([told("", "r", "1"), told("", "s", "2")])
    for rank in ("r", "s"):
        bed.objects |= set(keys_of(rank, FULL).object_keys(FULL.page_keys(one.block_hashes, 16, 4)))
    assert bed.side.matched_tokens(one, 0) == 64
    bed.side.reset()
    drawn = bed.side.generation.current
    bed.side.learn_more([told(drawn, "r", "1"), told(drawn, "s", "2")])
    assert bed.side.matched_tokens(one, 0) is None  # they have yet to hear of it
    assert bed.side.step({}, (), {}).generation == ""
    bed.side.learn_more([told("", "r", "1"), told("", "s", "2")])
    assert bed.side.matched_tokens(one, 0) == 64
    bed.side.reset()
    drawn = bed.side.generation.current
    bed.side.learn_more([told(drawn, "r", "1"), told(drawn, "s", "3")])
    assert bed.side.step({}, (), {}).generation.startswith("weights-")


def test_requests_do_not_wait_for_ever_for_ranks_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_scheduler, "UNDECIDED_S", 0.05)
    bed = Bed()
    bed.side.reset()
    assert bed.side.matched_tokens(request("a", 65), 0) is None
    time.sleep(0.06)
    assert bed.side.matched_tokens(request("a", 65), 0) == 0


def test_a_generation_set_by_hand_outlives_resets() -> None:
    bed = Bed(generation="fleet-7")
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    bed.side.reset()
    assert bed.side.step({}, (), {}).generation == "fleet-7"
    assert bed.side.matched_tokens(one, 0) == 64


def test_ranks_that_wake_up_tell_all_anew() -> None:
    bed = Bed(num_workers=2)
    one = request("a", 65)
    bed.side.learn([told("", "r"), told("", "s")])
    bed.side.reset()
    drawn = bed.side.generation.current
    bed.side.learn([told("", "r"), told("", "s")])  # as they were before they slept
    assert not bed.side.prefixes.is_ready
    bed.side.learn_more([told(drawn, "r"), told(drawn, "s")])
    assert bed.side.prefixes.is_ready
    bed.side.learn([told(drawn, "r"), told(drawn, "s")])
    assert bed.side.prefixes.is_ready
    assert bed.side.matched_tokens(one, 0) == 0


def test_what_old_weights_computed_is_not_saved_after_a_reset() -> None:
    """Neither blocks that were put off, nor those of requests that run on over them."""
    bed = Bed(loads_by_layer=True)
    one, loading = request("a", 80), request("b", 65)
    bed.store(FULL, loading.block_hashes, range(4))
    bed.side.matched_tokens(loading, 0)
    bed.side.allocated(loading, ([5, 6, 7, 8],), 64)
    bed.tables["a"] = ([3, 4, 9, 10, 11],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4])
    assert bed.side.step({"a": 32}, (), {}).saves == []  # until the load is known to be good
    assert bed.pool.held == [3, 4]
    bed.side.reset()
    assert bed.pool.held == []
    bed.side.loads_ended({"b"}, ())
    one.num_computed_tokens = 32
    bed.computed(one, FULL, bed.tables["a"][0])
    assert bed.side.step({"a": 48}, (), {}).saves == []
    bed.side.allocated(one, bed.tables["a"], 0)  # it begins anew
    one.num_computed_tokens = 0
    assert saved(bed.side.step({"a": 80}, (), {})) == [3, 4, 9, 10, 11]


@pytest.mark.parametrize("num_external", [0, 64])
def test_a_finished_request_is_forgotten(num_external: int) -> None:
    bed = Bed()
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    bed.side.matched_tokens(one, 0)
    bed.side.allocated(one, ([5, 6, 7, 8],), num_external)
    bed.side.finished("a")
    bed.side.loads_ended({"a"}, {"a"})
    bed.tables["a"] = ([5, 6, 7, 8],)
    assert bed.side.step({"a": 1}, (), {}).saves == []


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_failed_is_remembered_though_its_request_has_ended(is_finished: bool) -> None:
    bed = Bed()
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    assert bed.side.matched_tokens(one, 0) == 64
    bed.side.allocated(one, ([5, 6, 7, 8],), 64)
    if is_finished:
        bed.side.finished("a")
    bed.side.loads_ended({"a"}, {"a"})
    assert bed.side.matched_tokens(request("b", 65), 0) == 0


@pytest.mark.parametrize("table", [[5, 0, 7, 8], [5, 6, 7]])
def test_loads_that_would_leave_a_gap_count_as_failed(table: list[int]) -> None:
    bed = Bed()
    one = request("a", 65)
    bed.store(FULL, one.block_hashes, range(4))
    bed.side.matched_tokens(one, 0)
    bed.side.allocated(one, (table,), 64)
    (load,) = bed.side.step({}, (), {}).loads
    assert load.error.startswith("vLLM gave group 0 3 blocks for tokens 0 .. 64, wanted 4")


def with_a_load_by_layer() -> Bed:
    """A request whose first three blocks are loaded in the step that computes two more."""
    bed = Bed(loads_by_layer=True)
    one = request("a", 81)
    bed.store(FULL, one.block_hashes, range(3))
    assert bed.side.matched_tokens(one, 0) == 48
    bed.tables["a"] = ([3, 4, 5, 6, 7, 8],)
    bed.side.allocated(one, bed.tables["a"], 48)
    one.num_computed_tokens = 48
    bed.computed(one, FULL, bed.tables["a"][0])
    jobs = bed.side.step({"a": 33}, (), {})
    assert (len(jobs.loads), jobs.saves) == (1, [])
    assert bed.pool.held == [6, 7]  # though vLLM might free them now
    return bed


def test_what_is_computed_behind_a_load_is_saved_once_it_is_good() -> None:
    bed = with_a_load_by_layer()
    assert bed.side.step({}, (), {}).saves == []
    bed.side.finished("a")
    bed.side.loads_ended({"a"}, set())
    assert bed.side.held.num_unstored == 1
    jobs = bed.side.step({}, (), {})
    assert saved(jobs) == [6, 7]
    bed.side.held.saves_ended({jobs.saves[0].number: 1})
    assert bed.pool.held == []


def test_what_is_computed_behind_a_failed_load_is_not_saved() -> None:
    bed = with_a_load_by_layer()
    bed.side.loads_ended({"a"}, {"a"})
    assert (bed.pool.held, bed.side.held.num_unstored) == ([], 0)
    one = request("a", 81)
    bed.side.allocated(one, bed.tables["a"], 0)  # computed again, from the start
    assert saved(bed.side.step({"a": 80}, (), {})) == [3, 4, 5, 6, 7]


def test_blocks_are_waited_for_while_that_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    one = request("a", 32)
    bed.tables["a"] = ([3, 4],)
    bed.side.allocated(one, bed.tables["a"], 0)
    bed.computed(one, FULL, [3, 4])
    assert not bed.side.held.come_free_soon
    bed.side.step({"a": 32}, (), {})
    assert bed.side.held.come_free_soon
    later = vllm_held.time.monotonic() + 2 * vllm_held.BRIEFLY_S
    monkeypatch.setattr(vllm_held.time, "monotonic", lambda: later)
    assert not bed.side.held.come_free_soon
    bed.side.held.saves_ended({1: 1})
    assert not bed.side.held.come_free_soon
