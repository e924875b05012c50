"""A real store whose calls, those on sessions too, a test can delay, watch, answer or break."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.linker.mooncake import MooncakeStore

CALLS = ("exists", "put", "get", "put_session", "get_session")
SESSION_CALLS = ("write", "finish", "abort", "read", "close")
INNER_CALLS = ("put_start", "put_write", "put_end")
"""Of the client, within a put: of the store's last `Hooked`."""

Hook = Callable[..., Any]


class Hooked:
    """Passes everything on to a store, through hooks by the name of the call.

    Attributes:
        store: the real one.
        before: called with the arguments, in the calling thread; what it returns, unless None, is
            the answer instead of the store's.
        calls: name and first argument of every call, in the order that they began.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self.store = store
        self.before: dict[str, Hook] = {}
        self.calls: list[tuple[str, Any]] = []
        inner = store._calls
        for name in INNER_CALLS:
            real = getattr(type(inner), name).__get__(inner)
            setattr(inner, name, self.through(name, real))

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.store, name)
        return self.through(name, real) if name in CALLS else real

    def through(self, name: str, real: Hook) -> Hook:
        """Return a call that goes through the hook of its name."""

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments[0] if arguments else None))
            hook = self.before.get(name)
            answer = hook(*arguments) if hook else None
            if answer is None:
                answer = real(*arguments, **options)
            return _HookedSession(self, answer) if name.endswith("_session") else answer

        return call

    def count(self, name: str) -> int:
        """Return how often a call was made."""
        return sum(made == name for made, _ in self.calls)


class _HookedSession:
    """A put or get session whose calls go through the hooks too."""

    def __init__(self, hooked: Hooked, session: Any) -> None:
        self._hooked = hooked
        self._session = session

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._session, name)
        return self._hooked.through(name, real) if name in SESSION_CALLS else real

    def __enter__(self) -> "_HookedSession":
        return self

    def __exit__(self, *_: object) -> None:
        # What the real one's exit does: leaving revokes, or lets go.
        if hasattr(self._session, "abort"):
            self.abort()
        else:
            self.close()


class Pause:
    """A hook that holds its `nth` call until it is let go, and lets all others through.

    Attributes:
        entered: set once the call is held.
    """

    def __init__(self, nth: int = 0, limit_s: float = 30.0) -> None:
        self.entered = threading.Event()
        self._leave = threading.Event()
        self._limit_s = limit_s
        self._left = nth
        self._lock = threading.Lock()

    def __call__(self, *_: Any) -> None:
        with self._lock:
            self._left -= 1
            mine = self._left == -1
        if mine:
            self.entered.set()
            assert self._leave.wait(self._limit_s), "a test never let a call go"

    def wait(self, limit_s: float = 10.0) -> None:
        """Wait until the call is held."""
        assert self.entered.wait(limit_s), "the call was never made"

    def release(self) -> None:
        """Let it go."""
        self._leave.set()


class Do:
    """A hook that does something once, before its `nth` call."""

    def __init__(self, action: Callable[[], Any], nth: int = 0) -> None:
        self._action = action
        self._left = nth
        self._lock = threading.Lock()
        self.done = threading.Event()

    def __call__(self, *_: Any) -> None:
        with self._lock:
            self._left -= 1
            mine = self._left == -1
        if mine:
            self._action()
            self.done.set()


def named(calls: Sequence[tuple[str, Any]], name: str) -> list[Any]:
    """Return the first arguments of the calls of a name."""
    return [argument for made, argument in calls if made == name]
