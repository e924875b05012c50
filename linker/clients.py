"""Mooncake's clients, and the process that they are in: a forked child neither uses nor ends one.

Mooncake's threads, some of which serve all clients of a process, are not in the child, and its
connections are the parent's. So whatever the child does with a client hangs, crashes it, or garbles
what the parent is answered; that goes for ending one too, and for a new one of the child's own.
"""

import ctypes
import os
from typing import Any
from weakref import WeakSet

from kvferry.linker.home import Home

_home: Home | None = None  # where Mooncake's threads are, once there are any
_clients: "WeakSet[Any]" = WeakSet()


def check_process() -> None:
    """Note that Mooncake is about to be used in this process.

    Raises:
        ForkedProcess: it was used in a process that this one was forked from. That its clients are
            closed by now changes nothing: `setup` would not come back.
    """
    global _home
    if _home is None:
        _home = Home("Mooncake, once it was connected,")
        os.register_at_fork(after_in_child=_leave_to_parent)
    _home.check()


def add(client: Any) -> None:
    """Remember a client for as long as it lives."""
    _clients.add(client)


def skip_exit_handlers() -> None:
    """Let this process end without what C libraries have registered for its exit so far."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # comes first, with the status


def _leave_to_parent() -> None:
    """In a forked child: keep Python, and Mooncake's own handler at exit, from ending clients."""
    for client in _clients:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    skip_exit_handlers()
