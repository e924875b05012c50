"""Threads for store calls: none of their calls is lost, whatever ends a thread."""

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from kvferry.errors import TransferFailed
from kvferry.linker.wire import Wire

LIMIT_S = 10.0


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire = Wire(f"wire-{request.node.name}", 2, lambda: None)
    yield wire
    wire.close()
    until = time.monotonic() + LIMIT_S
    while threads_of(wire) and time.monotonic() < until:
        time.sleep(0.02)
    assert not threads_of(wire)


def threads_of(wire: Wire) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(wire._name)]


def test_calls_are_done_at_once_by_some_threads_and_begin_in_order(wire: Wire) -> None:
    barrier, begun = threading.Barrier(2), []

    def work(number: int) -> int:
        begun.append(number)
        if number < 2:
            barrier.wait(LIMIT_S)  # passed only if both are at work
        return number * number

    calls = [wire.call(lambda number=number: work(number)) for number in range(20)]
    assert [call.result(LIMIT_S) for call in calls] == [n * n for n in range(20)]
    assert [number for number in begun if number > 1] == list(range(2, 20))
    assert len(threads_of(wire)) == 2


def test_what_a_call_raises_is_the_callers(wire: Wire) -> None:
    with pytest.raises(ZeroDivisionError):
        wire.call(lambda: 1 // 0).result(LIMIT_S)
    assert wire.call(lambda: 3).result(LIMIT_S) == 3


def test_a_call_that_was_not_begun_can_be_cancelled(wire: Wire) -> None:
    entered, leave, done = threading.Barrier(3), threading.Event(), []
    running = [
        wire.call(lambda: entered.wait(LIMIT_S) >= 0 and leave.wait(LIMIT_S)) for _ in range(2)
    ]
    waiting = wire.call(lambda: done.append(1))
    entered.wait(LIMIT_S)
    assert waiting.cancel()
    assert not any(call.cancel() for call in running)
    leave.set()
    assert all(call.result(LIMIT_S) for call in running)
    with pytest.raises(CancelledError):
        waiting.result(LIMIT_S)
    assert wire.call(lambda: 3).result(LIMIT_S) == 3
    assert done == []


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_out_of_a_call_fails_that_call_alone(
    wire: Wire, error: type[BaseException]
) -> None:
    def leave() -> None:
        raise error

    for _ in range(5):
        calls: list[Future[Any]] = [wire.call(leave), wire.call(leave), wire.call(lambda: 3)]
        for call in calls[:2]:
            with pytest.raises(TransferFailed, match=error.__name__) as caught:
                call.result(LIMIT_S)
            assert caught.value.cause == "thread"
        assert calls[2].result(LIMIT_S) == 3


def test_exits_thrown_into_idle_threads_leave_no_call_without_end(wire: Wire) -> None:
    assert wire.call(lambda: 3).result(LIMIT_S) == 3
    for turn in range(10):
        time.sleep(
            0.2
        )  # until they are idle: nothing in Python outlives an exit in a lock's own code
        for thread in threads_of(wire):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        if turn % 2:
            time.sleep(1.2)  # it strikes when the thread looks up, or else with the next call
        failures = [wire.call(lambda: 3).exception(LIMIT_S) for _ in range(6)]
        assert {getattr(error, "cause", error) for error in failures} <= {None, "thread"}
    assert [wire.call(lambda: 3).result(LIMIT_S) for _ in range(6)] == [3] * 6
    assert len(threads_of(wire)) == 2


def test_threads_that_cannot_begin_fail_their_calls() -> None:
    wire = Wire("wire-no-device", 2, lambda: 1 // 0)
    with pytest.raises(TransferFailed, match="ZeroDivisionError") as caught:
        wire.call(lambda: 3).result(LIMIT_S)
    assert caught.value.cause == "thread"


def test_a_closed_wire_finishes_what_it_has_and_takes_no_more(wire: Wire) -> None:
    leave = threading.Event()
    calls = [wire.call(lambda: leave.wait(LIMIT_S)) for _ in range(4)]
    wire.close()
    with pytest.raises(TransferFailed, match="closed") as caught:
        wire.call(lambda: 3)
    assert caught.value.cause == "closed"
    leave.set()
    assert all(call.result(LIMIT_S) for call in calls)
