"""Forked children for tests, and locks that other threads hold meanwhile."""

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 20.0
AT_ONCE_S = 1.0
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


def end_of(pid: int, limit_s: float = LIMIT_S) -> int:
    """Wait for a child, and return its exit status; one that hangs is killed: -9."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def forked(work: Callable[[], Any]) -> int:
    """Begin something in a child that ends at once after it; return the child's process id.

    Its exit status is 0, or 1 if something was raised.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001  whatever it is, the child ends here
        os.write(2, traceback.format_exc().encode())
    os._exit(status)


def locks_under(made: Any) -> list[Any]:
    """Return every lock and condition that is found in kvferry's objects under one."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [made]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _LOCKS):
            found[id(one)] = one
        elif type(one).__module__.startswith("kvferry.") or isinstance(one, dict | list | tuple):
            todo += gc.get_referents(one)
    return list(found.values())


@contextlib.contextmanager
def held_elsewhere(made: Any) -> Iterator[int]:
    """Let another thread hold all locks under some objects; yields how many."""
    holding, leave, held = threading.Event(), threading.Event(), []

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks_under(made):
                if lock.acquire(timeout=0.05):  # a condition's own lock is among them too
                    stack.callback(lock.release)
                    held.append(lock)
            holding.set()
            leave.wait(LIMIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(LIMIT_S)
    try:
        yield len(held)
    finally:
        leave.set()
        thread.join(LIMIT_S)
