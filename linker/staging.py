"""Contiguous memory, registered once, that transfers hold in spans; bounded, with back-pressure."""

import contextlib
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

from kvferry.arguments import device_of, of_type, one_of, seconds, whole_number
from kvferry.errors import ArgumentError, StagingTimeout, StoreClosed
from kvferry.linker.home import Home
from kvferry.linker.memory import allocate
from kvferry.linker.spans import SpanAllocator
from kvferry.linker.store import Store

SPAN_ALIGN_BYTES = 256
"""Every span begins at a multiple of this; it serves the kernels and the NIC alike."""

MAX_BYTES = 2**48
"""What an address space holds."""

MEMORIES = ("auto", "device", "pinned", "cpu")

WANTED_POLL_S = 0.05
"""How often a thread that waits for a span asks whether it still wants it."""


@dataclass(frozen=True)
class Span:
    """A part of a staging buffer, held by one transfer until it is released.

    A context manager that releases it. The bytes may be used only while it is held.

    Attributes:
        staging: the buffer it belongs to.
        offset: first byte, from the buffer's first.
        num_bytes: length.
    """

    staging: "StagingBuffer"
    offset: int
    num_bytes: int

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.staging.address + self.offset

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, uint8 `[num_bytes]`, over the staging buffer's memory."""
        return self.staging.tensor[self.offset : self.offset + self.num_bytes]

    def release(self, *, after_s: float = 0.0) -> None:
        """Give the span back. Nothing may still read or write it: no kernel, no transfer.

        Args:
            after_s: keep it from others that much longer, where a failed call may have left a
                transfer behind that still lands.

        Raises:
            ArgumentError: it was released before.
        """
        self.staging.release(self, after_s=after_s)

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.staging.home.is_here:
            self.release()


class StagingBuffer:
    """One allocation, cut into spans first come, first served. It never grows.

    Waiting callers are served in the order they came, so that a large span is not starved by small
    ones. Safe from any thread.

    Attributes:
        tensor: all of the memory, uint8 `[num_bytes]`. The buffer owns it; it is freed with it.
        address: address of its first byte, a multiple of 4096.
        num_bytes: its size.
        memory: `device`, `pinned` or `cpu`: where it is.
        home: the process; in a forked child nothing of it can be held or registered.
    """

    def __init__(self, num_bytes: int, *, device: torch.device | str, memory: str = "auto") -> None:
        """Allocate.

        Args:
            num_bytes: at least `SPAN_ALIGN_BYTES`; rounded up to a multiple of it.
            device: of the pools.
            memory: `device` (the GPU's memory, by a plain driver allocation that the NIC can
                register), `pinned` (host memory that the GPU's kernels write to directly), `cpu`
                (ordinary memory, for pools on a CPU), or `auto`: `device` on a GPU, else `cpu`.

        Raises:
            ArgumentError: a size or a memory that does not fit the device.
        """
        num_bytes = whole_number("num_bytes", num_bytes, SPAN_ALIGN_BYTES, MAX_BYTES)
        device = device_of("device", device)
        memory = one_of("memory", memory, MEMORIES)
        self.num_bytes = -(-num_bytes // SPAN_ALIGN_BYTES) * SPAN_ALIGN_BYTES
        self.memory = ("device" if device.type == "cuda" else "cpu") if memory == "auto" else memory
        self.tensor = allocate(self.num_bytes, device, self.memory)
        self.address = self.tensor.data_ptr()
        self.home = Home("staging")
        self._spans = SpanAllocator(self.num_bytes, SPAN_ALIGN_BYTES)
        self._held: dict[int, Span] = {}
        self._draining: list[tuple[float, int, int]] = []  # heap of (until, offset, num_bytes)
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._store: Store | None = None

    @property
    def num_free_bytes(self) -> int:
        """Bytes that could be held now, not all of them in one piece."""
        self.home.check()
        with self._changed:
            self._end_drains()
            return self._spans.num_free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Length of the largest span that could be held now."""
        self.home.check()
        with self._changed:
            self._end_drains()
            return self._spans.largest_free_bytes

    @property
    def num_held_bytes(self) -> int:
        """Bytes asked for by the spans that are held; without those that only drain."""
        self.home.check()
        with self._changed:
            return sum(span.num_bytes for span in self._held.values())

    def register(self, store: Store) -> None:
        """Make the whole buffer known to a store, once.

        Raises:
            ArgumentError: it is registered already.
            StoreError: the store refused.
        """
        self.home.check()
        if self._store is not None:
            raise ArgumentError("staging is registered already, wanted a buffer that is not")
        store.register(self.address, self.num_bytes)
        self._store = store

    def unregister(self) -> None:
        """Take the registration back; no span may be held. Does nothing if there is none.

        A store that was closed has let go of it by then.

        Raises:
            ArgumentError: spans are still held.
        """
        self.home.check()
        with self._changed:
            if self._held:
                raise ArgumentError(f"{len(self._held)} spans are still held, wanted none")
            store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(StoreClosed):
                store.unregister(self.address)

    def acquire(
        self, num_bytes: int, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> Span:
        """Hold a span, waiting for others to be released if need be.

        Args:
            num_bytes: 1 .. the buffer's size.
            timeout_s: how long to wait; 0 asks without waiting.
            is_wanted: asked now and then while waiting; once it says no, the wait is over.

        Raises:
            ArgumentError: a size that the buffer can never give.
            StagingTimeout: none came free in time.
        """
        self.home.check()
        num_bytes = whole_number("num_bytes", num_bytes, 1, self.num_bytes)
        timeout_s = seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while True:
                    self._end_drains()
                    if self._waiting[0] is ticket:
                        offset = self._spans.take(num_bytes)
                        if offset is not None:
                            span = Span(self, offset, num_bytes)
                            self._held[offset] = span
                            return span
                    left = deadline - time.monotonic()
                    if left <= 0 or not is_wanted():
                        raise StagingTimeout(
                            f"no span of {num_bytes} bytes within {timeout_s:g} s: "
                            f"{self._spans.num_free_bytes} of {self.num_bytes} bytes are free, "
                            f"{self._spans.largest_free_bytes} in one piece"
                        )
                    self._changed.wait(min(left, self._next_drain_s(), WANTED_POLL_S))
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, span: Span, *, after_s: float = 0.0) -> None:
        """See `Span.release`."""
        self.home.check()
        of_type("span", span, Span)
        after_s = seconds("after_s", after_s)
        with self._changed:
            if self._held.get(span.offset) is not span:
                raise ArgumentError(
                    f"span at {span.offset} of {span.num_bytes} bytes is not held, wanted one that "
                    "was acquired here and not yet released"
                )
            del self._held[span.offset]
            if after_s > 0:
                until = time.monotonic() + after_s
                heapq.heappush(self._draining, (until, span.offset, span.num_bytes))
            else:
                self._spans.give_back(span.offset, span.num_bytes)
            self._changed.notify_all()

    def _end_drains(self) -> None:
        now = time.monotonic()
        while self._draining and self._draining[0][0] <= now:
            _, offset, num_bytes = heapq.heappop(self._draining)
            self._spans.give_back(offset, num_bytes)

    def _next_drain_s(self) -> float:
        if not self._draining:
            return math.inf
        return max(0.0, self._draining[0][0] - time.monotonic())
