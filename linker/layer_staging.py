"""Spans of group parts on their way: taken without deadlock, given back when nobody uses them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import StagingTimeout
from kvferry.linker.attempts import Attempts
from kvferry.linker.layer_plan import GroupPart
from kvferry.linker.seal import wait
from kvferry.linker.staging import Span, StagingBuffer
from kvferry.linker.streams import Fence


@dataclass
class StagedPart:
    """A group part in staging: its span, its kernels, its store call.

    Attributes:
        part: what it is.
        span: its memory.
        rows: of each piece, that travel.
        fence: behind the last kernel that was launched on it.
        call: its store call, once it was handed to a wire thread.
        attempts: what the store call may leave behind.
        seal_us: time that writing its objects' ends took.
    """

    part: GroupPart
    span: Span
    rows: Sequence[Sequence[int]]
    fence: Fence = field(default_factory=Fence)
    call: "Future[Any] | None" = None
    attempts: Attempts = field(default_factory=Attempts)
    seal_us: float = 0.0

    def release(self) -> None:
        """Give the span back, once no kernel and no store call uses it any more."""
        if self.call is not None and not self.call.cancel():
            self.call.exception()  # the store bounds it; whose failure it is, others have seen to
        wait(self.fence)
        self.span.release(after_s=self.attempts.drain_s)


def leaves_room(spans: Sequence[Span], needed_bytes: int) -> bool:
    """Whether one transfer may hold spans for as long as it likes: others always find room.

    Args:
        spans: at least one, of one staging buffer.
        needed_bytes: what each of the others needs at once, in one piece.

    Returns:
        Whether they take no more than half of the buffer, and one of the gaps that they leave, were
        they alone in it, is that long.
    """
    total = spans[0].staging.num_bytes
    edges = [0, *(edge for s in sorted(spans, key=lambda s: s.offset) for edge in
                  (s.offset, s.offset + s.num_bytes)), total]  # fmt: skip
    gaps = [end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return 2 * sum(gaps) >= total and max(gaps) >= needed_bytes


def acquire(
    staging: StagingBuffer,
    num_bytes: int,
    left_s: Callable[[], float],
    make_room: Callable[[], bool],
) -> Span | None:
    """Hold a span; while holding others, give those up rather than wait.

    Two threads that each held a span and waited for a second could wait for each other.

    Args:
        staging: where.
        num_bytes: how long.
        left_s: how many seconds are left; 0 if nobody wants it any more.
        make_room: gives up one span that is held; False if none is.

    Returns:
        The span; None if nobody wants it any more.

    Raises:
        StagingTimeout: none came free in time.
    """
    waits = False
    while left_s() > 0:
        try:
            return staging.acquire(num_bytes, left_s() if waits else 0.0, lambda: left_s() > 0)
        except StagingTimeout:
            if waits and left_s() > 0:
                raise
            waits = waits or not make_room()
    return None
