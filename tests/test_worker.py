"""The thread behind a linker's queue: in order, to the end, alive whatever is thrown into it."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.errors import TransferFailed
from kvferry.linker.worker import Worker


class Errand:
    """A job that does what a test says."""

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        self.do = do
        self.error: TransferFailed | None = None
        self.over = threading.Event()

    def finish(self) -> None:
        self.over.set()

    def fail(self, error: TransferFailed) -> bool:
        if self.over.is_set():
            return False
        self.error = error
        self.over.set()
        return True

    def give_up(self, reason: str, cause: str, limit_s: float | None = None) -> bool:
        return self.fail(TransferFailed(reason, cause=cause))


def carry_out(job: Errand) -> None:
    job.do()
    job.finish()


@pytest.fixture
def worker() -> Iterator[Worker[Errand]]:
    made = Worker("kvferry-test", carry_out, lambda: None)
    yield made
    made.close()
    assert made.join(10)
    assert not made.is_alive


def throw(name: str, kind: type[BaseException]) -> None:
    """Raise in a running thread, as `PyThreadState_SetAsyncExc` does."""
    (thread,) = [one for one in threading.enumerate() if one.name == name]
    assert thread.ident is not None
    count = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
    )
    assert count == 1


def test_jobs_are_done_in_order(worker: Worker[Errand]) -> None:
    done: list[int] = []
    jobs = [Errand(lambda number=number: done.append(number)) for number in range(50)]
    for job in jobs:
        worker.put(job)
    assert jobs[-1].over.wait(10)
    assert done == list(range(50))
    assert worker.num_waiting == 0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError, RuntimeError])
def test_what_a_job_raises_fails_it_and_no_other(
    worker: Worker[Errand], kind: type[BaseException]
) -> None:
    def break_down() -> None:
        raise kind("now")

    broken, next_one = Errand(break_down), Errand()
    worker.put(broken)
    worker.put(next_one)
    assert next_one.over.wait(10)
    assert next_one.error is None
    assert broken.error is not None
    assert broken.error.cause == "thread"
    assert kind.__name__ in str(broken.error)


def test_an_idle_thread_that_is_killed_loses_no_job(worker: Worker[Errand]) -> None:
    for _ in range(20):
        throw("kvferry-test", SystemExit)
        job = Errand()
        worker.put(job)
        assert job.over.wait(10)
        assert job.error is None or job.error.cause == "thread"
        again = Errand()
        worker.put(again)
        assert again.over.wait(10)
        assert again.error is None
        while not worker.is_alive:
            time.sleep(0.001)


def test_a_closed_worker_ends_after_its_jobs_and_takes_no_more() -> None:
    worker = Worker("kvferry-test-close", carry_out, lambda: None)
    held = threading.Event()
    jobs = [Errand(lambda: held.wait(10)), Errand()]
    for job in jobs:
        worker.put(job)
    worker.close()
    with pytest.raises(TransferFailed, match="the linker is closed"):
        worker.put(Errand())
    assert not worker.join(0.1)
    held.set()
    assert worker.join(10)
    assert [job.error for job in jobs] == [None, None]


def test_all_jobs_can_be_given_up(worker: Worker[Errand]) -> None:
    held, entered = threading.Event(), threading.Event()
    jobs = [Errand(lambda: (entered.set(), held.wait(10))), Errand(), Errand()]
    for job in jobs:
        worker.put(job)
    assert entered.wait(10)
    assert worker.num_waiting == 2
    worker.fail_all("the linker was closed")
    assert [job.error is not None and job.error.cause for job in jobs] == ["closed"] * 3
    held.set()
    last = Errand()
    worker.put(last)
    assert last.over.wait(10)
    assert last.error is None


def test_a_thread_that_cannot_begin_fails_its_jobs_instead_of_starting_for_ever() -> None:
    num_starts = 0

    def begin() -> None:
        nonlocal num_starts
        num_starts += 1
        raise RuntimeError("no such device")

    worker = Worker("kvferry-test-begin", carry_out, begin)
    job = Errand()
    worker.put(job)
    deadline = time.monotonic() + 10
    while not job.over.is_set() and time.monotonic() < deadline:
        worker.put(Errand())
        time.sleep(0.01)
    assert job.error is not None
    assert "no such device" in str(job.error)
    assert num_starts < 200
    worker.close()
