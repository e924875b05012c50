"""A thread of the linker dies, by an exit from a store call or one that is thrown into it."""

import ctypes
import threading
import time

import pytest
from bed import Bed, words
from cluster import wait_until, within
from forms import MOVES, SLACK_S, Form, Moving, name_of
from hooked import Do, Pause

SAVE_CALLS = ["exists", "put", "put_start", "put_write", "put_end"]
LOAD_CALLS = {False: ["get"], True: ["get_session", "read"]}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(("form", "kind"), MOVES, ids=name_of)
def test_an_exit_out_of_a_store_call_fails_one_transfer(
    bed: Bed, form: Form, kind: str, error: type[BaseException]
) -> None:
    def leave() -> None:
        raise error("a thread that is asked to go")

    calls = SAVE_CALLS if kind == "save" else LOAD_CALLS[form.by_layer]
    for call in calls:
        keys, pages = bed.saved(2)
        bed.store.before[call] = Do(leave)
        with within(SLACK_S):
            if kind == "save":
                ends = bed.save(form, bed.keys(2), bed.sources(2)).end()
            else:
                ends = bed.load(form, keys, bed.targets(pages)).end()
        bed.store.before.clear()
        assert all(words(end) for end in ends), call
        expected = {"thread"} if not issubclass(error, Exception) else {"thread", "other"}
        assert {word for end in ends for word in words(end)} <= expected, call
    bed.check_after(form)


@pytest.mark.parametrize(("form", "kind"), MOVES, ids=name_of)
def test_what_waits_behind_a_thread_that_dies_is_carried_out(
    bed: Bed, form: Form, kind: str
) -> None:
    keys, pages = bed.saved(2)
    call = "exists" if kind == "save" else LOAD_CALLS[form.by_layer][0]
    pause = Pause()

    def hold_and_leave(*_: object) -> None:
        if not pause.entered.is_set():
            pause()
            raise SystemExit("a thread that is asked to go")

    def begin() -> Moving:
        if kind == "save":
            return bed.save(form, bed.keys(2), bed.sources(2))
        return bed.load(form, keys, bed.targets(pages))

    bed.store.before[call] = hold_and_leave
    dying = begin()
    pause.wait()
    waiting = begin()
    pause.release()
    with within(SLACK_S):
        assert {word for end in dying.end() for word in words(end)} == {"thread"}
        assert [words(end) for end in waiting.end()] == [[]] * len(waiting.handles)
    bed.check_after(form)


def threads_of(bed: Bed) -> list[threading.Thread]:
    """Return the linker's threads that run now, those for its store calls too."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.ident is not None and (thread.name in bed.thread_names or "-wire" in thread.name)
    ]


def throw_into(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have an exception raised in a thread at its next step of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)
    )


def test_an_exit_thrown_into_idle_threads(bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(2)
    for _ in range(2):
        bed.save(form, bed.keys(2), bed.sources(2)).result()
        bed.load(form, keys, bed.targets(pages)).result()
        time.sleep(0.2)  # until they are idle
        for thread in threads_of(bed):
            throw_into(thread, SystemExit)
        # Each dies at its next step: now, or with the next transfer, which then fails, not hangs.
        with within(2 * SLACK_S):
            moved = [
                bed.save(form, bed.keys(2), bed.sources(2)),
                bed.load(form, keys, bed.targets(pages)),
            ]
            ends = [end for moving in moved for end in moving.end()]
        assert {word for end in ends for word in words(end)} <= {"thread"}
        time.sleep(1.2)  # an idle thread looks up once a second
    bed.check_after(form)


@pytest.mark.parametrize(("form", "kind"), MOVES, ids=name_of)
def test_an_exit_thrown_into_threads_in_a_store_call(bed: Bed, form: Form, kind: str) -> None:
    for call in SAVE_CALLS if kind == "save" else LOAD_CALLS[form.by_layer]:
        keys, pages = bed.saved(2)
        pause = bed.store.before[call] = Pause()
        if kind == "save":
            moving = bed.save(form, bed.keys(2), bed.sources(2))
        else:
            moving = bed.load(form, keys, bed.targets(pages))
        pause.wait()
        time.sleep(0.2)  # until all others are idle: no lock outlives an exit in its own code
        for thread in threads_of(bed):
            throw_into(thread, SystemExit)
        pause.release()
        with within(SLACK_S):
            ends = moving.end()
        assert {word for end in ends for word in words(end)} == {"thread"}, call
        bed.store.before.clear()
        time.sleep(1.2)
    wait_until(lambda: set(bed.thread_names) <= {thread.name for thread in threads_of(bed)})
    bed.check_after(form)
