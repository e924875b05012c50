"""Transfers that are queued in one thread and begun in another: given up, failed, in order."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.errors import ArgumentError, TransferFailed
from kvferry.linker.sglang_jobs import Job, Opener
from kvferry.linker.sglang_loads import LayerDoneCounter, Loads
from kvferry.linker.sglang_offloads import Offloads
from kvferry.linker.sglang_ranks import Ranks
from kvferry.linker.sglang_transfers import Pages
from kvferry.linker.streams import Fence
from kvferry.linker.transfer import without_frames

CPU = torch.device("cpu")
LIMIT_S = 5.0


class Handle:
    """A transfer in flight, ended by the test."""

    def __init__(self) -> None:
        self.given_up: list[tuple[str, str]] = []
        self.ended = threading.Event()
        self.failures: dict[str, str] = {}
        self.error: TransferFailed | None = None
        self.waited: list[int] = []
        self.groups = ((0, 1), (1, 2), (2, 3))

    def give_up(self, reason: str, cause: str) -> bool:
        self.given_up.append((reason, cause))
        was_over = self.ended.is_set()
        self.ended.set()
        return not was_over

    def start(self) -> "Handle":
        return self

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)

    def done(self) -> bool:
        return self.ended.is_set()

    def result(self, timeout_s: float = LIMIT_S) -> Any:
        assert self.ended.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(failures=self.failures)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.001)


# ---- one job ----


def test_a_job_that_was_given_up_is_not_begun() -> None:
    job: Job[Handle] = Job([])
    assert job.give_up("flushed", "cancelled")
    assert job.is_begun
    job.begin(lambda: pytest.fail("begun all the same"))
    assert job.handle is None
    assert job.error is not None
    assert (str(job.error), job.error.cause) == ("flushed", "cancelled")


def test_a_job_that_is_given_up_while_it_begins_ends_then() -> None:
    job: Job[Handle] = Job([])
    handle, inside, leave = Handle(), threading.Event(), threading.Event()

    def begin() -> Handle:
        inside.set()
        assert leave.wait(LIMIT_S)
        return handle

    beginning = threading.Thread(target=job.begin, args=(begin,))
    beginning.start()
    assert inside.wait(LIMIT_S)
    giving_up = threading.Thread(target=job.give_up, args=("flushed", "cancelled"))
    giving_up.start()
    giving_up.join(0.05)
    assert giving_up.is_alive(), "it may still touch pages"
    leave.set()
    for thread in (giving_up, beginning):
        thread.join(LIMIT_S)
    assert handle.given_up == [("flushed", "cancelled")]


def test_a_job_that_is_given_up_afterwards_ends_once() -> None:
    job: Job[Handle] = Job([])
    handle = Handle()
    job.begin(lambda: handle)
    assert job.handle is handle
    assert job.give_up("flushed", "cancelled")
    assert not job.give_up("closed", "closed")
    assert str(job.error) == "flushed", "the first reason stands"


def test_a_job_is_waited_for_no_longer_than_said() -> None:
    job: Job[Handle] = Job([])
    job.wait_begun(0.01)
    assert job.error is not None
    assert job.error.cause == "deadline"
    job.wait_begun(LIMIT_S)  # there is nothing more to wait for


def test_errors_without_frames() -> None:
    def fail(tensor: torch.Tensor) -> None:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise TransferFailed("second") from error

    tensor = torch.zeros(1)
    with pytest.raises(TransferFailed) as failed:
        fail(tensor)
    error = failed.value
    del failed
    kept = weakref.ref(tensor)
    del tensor
    assert kept() is not None, "the traceback holds it"
    without_frames(error)
    assert kept() is None
    assert str(error) == "second"


# ---- the thread that begins them ----


@pytest.fixture
def openers() -> Iterator[Callable[[Callable[[Job[Handle]], None]], Opener[Job[Handle]]]]:
    """Makes threads, closed after the test."""
    made: list[Opener[Job[Handle]]] = []

    def make(begin: Callable[[Job[Handle]], None]) -> Opener[Job[Handle]]:
        made.append(Opener(f"test-opener-{len(made)}", CPU, begin))
        return made[-1]

    yield make
    for opener in made:
        opener.close(LIMIT_S)
    assert not [each for each in threading.enumerate() if each.name.startswith("test-opener")]


def test_jobs_are_begun_in_order(openers: Any) -> None:
    begun: list[Job[Handle]] = []

    def begin(job: Job[Handle]) -> None:
        begun.append(job)
        job.begin(Handle)

    opener = openers(begin)
    jobs: list[Job[Handle]] = [Job([]) for _ in range(50)]
    for job in jobs:
        opener.put(job)
    for job in jobs:
        job.wait_begun(LIMIT_S)
    assert begun == jobs


@pytest.mark.parametrize(
    ("error", "cause", "text"),
    [
        (TransferFailed("ids are late", cause="deadline"), "deadline", "ids are late"),
        (ArgumentError("page twice"), "other", "transfer not begun: page twice"),
        (RuntimeError("a driver's"), "thread", "a driver's"),
    ],
)
def test_a_job_that_cannot_be_begun_fails_and_the_next_goes_on(
    error: Exception, cause: str, text: str, openers: Any
) -> None:
    def begin(job: Job[Handle]) -> None:
        if job is bad:
            raise error
        job.begin(Handle)

    bad: Job[Handle] = Job([])
    good: Job[Handle] = Job([])
    opener = openers(begin)
    opener.put(bad)
    opener.put(good)
    for job in (bad, good):
        job.wait_begun(LIMIT_S)
    assert bad.error is not None
    assert text in str(bad.error)
    if cause != "other":
        assert bad.error.cause == cause
    assert good.error is None
    assert good.handle is not None


def test_a_thread_that_is_closed_takes_no_jobs(openers: Any) -> None:
    opener = openers(lambda job: job.begin(Handle))
    first: Job[Handle] = Job([])
    opener.put(first)
    opener.close(LIMIT_S)
    assert first.handle is not None, "what it had is begun"
    late: Job[Handle] = Job([])
    opener.put(late)
    assert late.error is not None
    assert late.error.cause == "closed"
    opener.close(LIMIT_S)


# ---- offloads ----


class FakeLinker:
    """Hands out handles that the test ends; `held` holds the next save or load back."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(device=CPU)
        self.config = SimpleNamespace(transfer_timeout_s=LIMIT_S, wait="auto")
        self.saves: list[tuple[list[str], dict[str, list[int]], Handle]] = []
        self.loads: list[tuple[list[Any], Handle]] = []
        self.skipped: list[int] = []
        self.held = threading.Event()
        self.held.set()

    def save(self, keys: list[str], page_ids: Any) -> Handle:
        rows = {space: row.tolist() for space, row in page_ids.items()}
        self.saves.append((keys, rows, Handle()))
        return self.saves[-1][2]

    def load_batch(self, requests: list[Any], **_: Any) -> Handle:
        assert self.held.wait(LIMIT_S)
        self.loads.append((requests, Handle()))
        return self.loads[-1][1]

    def skip_load(self, number: int) -> None:
        self.skipped.append(number)

    def distrust(self, keys: list[str]) -> None:
        """Nothing: no store."""


def pages(*keys: str, **rows: list[int]) -> Pages:
    """Pages of all keys in each space."""
    page_ids = {space: torch.tensor(row) for space, row in (rows or {"full": [1]}).items()}
    positions = {space: range(len(row)) for space, row in page_ids.items()}
    return Pages(list(keys), positions, page_ids, Fence())


@pytest.fixture
def linker() -> FakeLinker:
    return FakeLinker()


@pytest.fixture
def offloads(linker: Any) -> Iterator[Offloads]:
    made = Offloads(linker, Ranks(), frozenset())
    yield made
    made.close(LIMIT_S)


def test_verdicts_come_in_the_order_of_the_calls(offloads: Offloads, linker: FakeLinker) -> None:
    for key in "abc":
        offloads.put(pages(key), [])
    wait_for(lambda: len(linker.saves) == 3)
    handles = [handle for _, _, handle in linker.saves]
    handles[2].ended.set()
    handles[1].error = TransferFailed("not in time")
    handles[1].ended.set()
    assert offloads.num_completed == 0, "the first is still under way"
    with pytest.raises(IndexError):
        offloads.pop()
    handles[0].failures = {"key": "no space"}
    handles[0].ended.set()
    assert offloads.num_completed == 3
    assert [offloads.pop() for _ in range(3)] == [False, False, True]
    assert offloads.num_completed == 0


def test_a_rank_stores_its_part_of_what_all_hold(linker: Any) -> None:
    keys = [f"key-{number}" for number in range(40)]
    stored: list[str] = []
    for rank in range(4):
        ranks = Ranks(tp=(rank, 4))
        offloads = Offloads(linker, ranks, frozenset({"full"}))
        offloads.put(pages(*keys, full=list(range(40)), state=list(range(40))), [])
        wait_for(lambda rank=rank: len(linker.saves) == rank + 1)
        _, rows, handle = linker.saves[-1]
        handle.ended.set()
        assert rows["state"] == list(range(40)), "states are each rank's own"
        stored += [keys[at] for at, page in enumerate(rows["full"]) if page >= 0]
        assert all(page in (-1, at) for at, page in enumerate(rows["full"]))
        offloads.close(LIMIT_S)
    assert sorted(stored) == sorted(keys)


def test_a_rank_with_nothing_to_store_is_done(linker: Any) -> None:
    (rank,) = (rank for rank in range(2) if not Ranks(tp=(rank, 2)).writes(["key"])[0])
    offloads = Offloads(linker, Ranks(tp=(rank, 2)), frozenset({"full"}))
    offloads.put(pages("key"), [])
    wait_for(lambda: offloads.num_completed == 1)
    assert offloads.pop()
    assert linker.saves == []
    offloads.close(LIMIT_S)


def test_a_reset_forgets_offloads_and_ends_them(offloads: Offloads, linker: FakeLinker) -> None:
    offloads.put(pages("a"), [])
    wait_for(lambda: len(linker.saves) == 1)
    offloads.reset("flushed")
    assert linker.saves[0][2].given_up == [("flushed", "cancelled")]
    assert offloads.num_completed == 0


def test_page_ids_that_never_come_are_no_verdict_of_success(
    offloads: Offloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = pages("a")
    monkeypatch.setattr(Pages, "on_host", lambda _: (_ for _ in ()).throw(TransferFailed("late")))
    offloads.put(bad, [])
    wait_for(lambda: offloads.num_completed == 1)
    assert not offloads.pop()


# ---- loads ----


@pytest.fixture
def loads(linker: Any) -> Iterator[Loads]:
    made = Loads(linker)
    yield made
    linker.held.set()
    made.close(LIMIT_S)


def none() -> list[Fence]:
    return []


def test_a_batch_is_what_was_queued(loads: Loads, linker: FakeLinker) -> None:
    assert loads.start(lambda: pytest.fail("there is nothing to order")) == -1
    for rid in "abc":
        loads.queue(rid, pages(f"key-{rid}"))
    with pytest.raises(ArgumentError, match="'b' has a load queued already"):
        loads.queue("b", pages("other"))
    assert loads.cancel("b")
    assert not loads.cancel("b")
    index = loads.start(none)
    assert loads.start(none) == -1
    loads.queue("b", pages("key-b"))  # the next batch
    wait_for(lambda: len(linker.loads) == 1)
    assert [request.keys for request in linker.loads[0][0]] == [["key-a"], ["key-c"]]
    linker.loads[0][1].ended.set()
    assert loads.finish(index) is None
    assert loads.finish(index) is None, "it is forgotten"
    assert loads.start(none) == index + 1


def test_a_failed_load_fails_its_batch(loads: Loads, linker: FakeLinker) -> None:
    loads.queue("a", pages("key"))
    index = loads.start(none)
    wait_for(lambda: len(linker.loads) == 1)
    handle = linker.loads[0][1]
    handle.error = TransferFailed("missing", cause="missing")
    handle.ended.set()
    error = loads.finish(index)
    assert error is not None
    assert error.cause == "missing"
    assert handle.given_up, "no other request's pages are touched any more"
    assert error.__traceback__ is None
    assert handle.error.__traceback__ is None


def test_a_counter_waits_for_its_batch_alone(loads: Loads, linker: FakeLinker) -> None:
    counter = LayerDoneCounter(3, loads, LIMIT_S)
    counter.wait_until(0)  # no batch
    loads.queue("a", pages("key"))
    index = loads.start(none)
    counter.set_consumer(index)
    wait_for(lambda: len(linker.loads) == 1)
    for layer in (0, 0, 1, 0, 7, 2):
        counter.wait_until(layer)
    assert linker.loads[0][1].waited == [0, 1, 2], "once each, the last one for what is behind it"
    counter.set_consumer(-1)
    counter.wait_until(2)
    counter.set_consumer(index + 5)
    counter.wait_until(2)  # a batch that nobody knows
    assert linker.loads[0][1].waited == [0, 1, 2]
    loads.reset("end of test")


@pytest.mark.parametrize(("wait", "waited"), [("host", [0, 1, 4]), ("device", [0, 1, 2, 3, 4])])
def test_one_wait_is_for_all_layers_of_a_group(
    linker: FakeLinker, wait: str, waited: list[int]
) -> None:
    linker.config.wait = wait
    loads = Loads(linker)  # type: ignore[arg-type]
    counter = LayerDoneCounter(5, loads, LIMIT_S)
    loads.queue("a", pages("key"))
    counter.set_consumer(loads.start(none))
    wait_for(lambda: len(linker.loads) == 1)
    handle = linker.loads[0][1]
    handle.groups = ((0, 1), (1, 4), (4, 5))
    for layer in (0, 1, 2, 2, 3, 4):
        counter.wait_until(layer)
    assert handle.waited == waited
    loads.close(LIMIT_S)


def test_pools_that_nobody_asks_layer_by_layer_are_there_at_once(
    loads: Loads, linker: FakeLinker
) -> None:
    counter = LayerDoneCounter(3, loads, LIMIT_S, by_layer=False)
    counter.set_consumer(-1)
    loads.queue("a", pages("key"))
    counter.set_consumer(loads.start(none))
    assert linker.loads[0][1].waited == [2]
    loads.reset("end of test")


def test_a_reset_ends_a_batch_that_is_not_begun(loads: Loads, linker: FakeLinker) -> None:
    linker.held.clear()
    loads.queue("a", pages("key"))
    loads.queue("b", pages("key"))
    index = loads.start(none)
    loads.queue("c", pages("key"))
    counter = LayerDoneCounter(3, loads, LIMIT_S)
    counter.set_consumer(index)
    held = threading.Thread(target=counter.wait_until, args=(2,))
    held.start()
    loads.reset("flushed")
    held.join(LIMIT_S)
    assert not held.is_alive(), "who waits is let through"
    linker.held.set()
    assert loads.finish(index) is None
    assert loads.start(none) == -1
    loads.close(LIMIT_S)
    assert not linker.loads or linker.loads[0][1].waited == []


def test_ended_batches_are_not_kept(loads: Loads, linker: FakeLinker) -> None:
    gc.collect()
    gc.disable()
    try:
        first = pages("key")
        kept = weakref.ref(first.page_ids["full"])
        loads.queue("a", first)
        index = loads.start(none)
        wait_for(lambda: len(linker.loads) == 1)
        handle = linker.loads[0][1]
        handle.error = TransferFailed("missing", cause="missing")
        handle.ended.set()
        loads.finish(index)
        linker.loads.clear()
        del first
        loads.queue("b", pages("key"))  # the thread remembers its last batch, and no more
        loads.start(none)
        wait_for(lambda: kept() is None)
    finally:
        gc.enable()
        loads.reset("end of test")


def test_an_opener_that_was_left_ends() -> None:
    opener: Opener[Job[Handle]] = Opener("test-opener-left", CPU, lambda job: None)
    thread = opener._worker._thread
    opener.leave()
    thread.join(5.0)
    assert not thread.is_alive()
