"""A Mooncake client that answers at once and moves no bytes, and notes what it was asked.

It stands at the boundary where a linker calls `mooncake.store.MooncakeDistributedStore`, so that
what is left of a transfer is the linker's own Python. Only the last bytes of objects are kept: they
hold the trailers that kvferry verifies.
"""

import ctypes
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

KEPT_BYTES = 4096
"""Of an object's end; trailers are shorter."""

CallT = TypeVar("CallT", bound=Callable[..., Any])


def _noted(method: CallT) -> CallT:
    """Count a call, and the processor time that the client itself takes for it."""

    @wraps(method)
    def call(client: "InstantClient", *arguments: Any, **options: Any) -> Any:
        begin_s = time.thread_time()
        try:
            return method(client, *arguments, **options)
        finally:
            client.calls[method.__name__] += 1
            client.seconds[threading.get_ident()] += time.thread_time() - begin_s

    return cast(CallT, call)


class InstantClient:
    """See the module. Safe from any thread as far as Python's own containers are.

    Attributes:
        calls: how often each method was called.
        seconds: processor time that the client took itself, by thread ident.
        keys: keys that session starts and puts named.
        ranges: contiguous pieces of memory that calls with bytes named.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._ends: dict[str, bytes] = {}
        self._values: dict[str, bytes] = {}
        self.forget()

    def forget(self) -> None:
        """Set all that was noted to zero; objects stay."""
        self.calls: Counter[str] = Counter()
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self.num_keys = 0
        self.num_ranges = 0

    # ---- what both linkers set up with ----

    def setup(self, *arguments: Any, **options: Any) -> int:
        """Accept anything."""
        return 0

    def close(self) -> int:
        """Do nothing."""
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        """Accept any memory."""
        return 0

    def unregister_buffer(self, address: int) -> int:
        """Accept any memory."""
        return 0

    def put(self, key: str, value: bytes) -> int:
        """Keep a value, as upstream's warm-up wants."""
        self._values[key] = value
        return 0

    def get(self, key: str) -> bytes:
        """Return a kept value."""
        return self._values[key]

    def is_exist(self, key: str) -> int:
        """Whether there is such a value or object."""
        return int(key in self._values or key in self._sizes)

    def get_size(self, key: str) -> int:
        """Return an object's size."""
        return self._sizes.get(key, -704)

    def remove_all(self, force: bool = False) -> int:
        """Forget every object."""
        num = len(self._sizes)
        self._sizes.clear()
        self._ends.clear()
        return num

    # ---- transfers ----

    @_noted
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each object that was put."""
        return [int(key in self._sizes) for key in keys]

    @_noted
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0 for each object that was put."""
        self.num_keys += len(keys)
        return [0 if key in self._sizes else -703 if key in self._open else -704 for key in keys]

    @_noted
    def batch_get_session_end(self, keys: Sequence[str]) -> list[int]:
        """0 for all."""
        return [0] * len(keys)

    @_noted
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Return the bytes asked for; write those alone that were kept of an object's end."""
        self.num_ranges += sum(map(len, sizes))
        for key, places, lengths, starts in zip(keys, addresses, sizes, offsets, strict=True):
            if starts[-1] + lengths[-1] == self._sizes[key]:
                kept = self._ends.get(key, b"")[-lengths[-1] :]
                ctypes.memmove(places[-1] + lengths[-1] - len(kept), kept, len(kept))
        return [
            sum(lengths) if starts[-1] + lengths[-1] <= self._sizes[key] else -600
            for key, lengths, starts in zip(keys, sizes, offsets, strict=True)
        ]

    @_noted
    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *config: Any
    ) -> list[int]:
        """Keep sizes, and the ends of objects."""
        self.num_keys += len(keys)
        self.num_ranges += len(sizes)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self._sizes[key] = size
            length = min(size, KEPT_BYTES)
            self._ends[key] = ctypes.string_at(address + size - length, length)
        return [0] * len(keys)

    @_noted
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        *config: Any,
    ) -> list[int]:
        """Keep sizes."""
        self.num_keys += len(keys)
        self.num_ranges += sum(map(len, sizes))
        for key, lengths in zip(keys, sizes, strict=True):
            self._sizes[key] = sum(lengths)
        return [0] * len(keys)

    # ---- kvferry's puts ----

    @_noted
    def batch_put_session_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """Open objects for writing, those alone that are not there."""
        self.num_keys += len(keys)
        answers = [-705 if key in self._sizes or key in self._open else 0 for key in keys]
        self._open.update(
            (key, size) for key, size, code in zip(keys, sizes, answers, strict=True) if code == 0
        )
        return answers

    @_noted
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Return the bytes given; keep the ends of objects."""
        self.num_ranges += sum(map(len, sizes))
        for key, places, lengths, starts in zip(keys, addresses, sizes, offsets, strict=True):
            if starts[-1] + lengths[-1] == self._open[key]:
                kept = min(lengths[-1], KEPT_BYTES)
                self._ends[key] = ctypes.string_at(places[-1] + lengths[-1] - kept, kept)
        return [sum(lengths) for lengths in sizes]

    @_noted
    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make open objects readable."""
        self._sizes.update((key, self._open.pop(key)) for key in keys)
        return [0] * len(keys)

    @_noted
    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Drop open objects."""
        for key in keys:
            self._open.pop(key, None)
        return [0] * len(keys)
