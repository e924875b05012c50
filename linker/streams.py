"""Order on a device without waiting for it: fences, and one side stream per direction.

On a CPU there is no stream: work is done when its call returns, and a fence is passed at once.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvferry.errors import ArgumentError

log = logging.getLogger(__name__)

POLL_S = 20e-6

DRAIN_LIMIT_S = 60.0
"""How long a failure waits for what was launched before it."""


class Fence:
    """A point in a stream's work, `start` marking where the work before it began.

    Attributes:
        device_us: how long the work between took; None until it is done, or if there is no start.
        has_start: whether it is known where the work began.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        start: torch.cuda.Event | None = None,
        host_s: tuple[float, float] | None = None,
    ) -> None:
        """Mark a point.

        Args:
            event: recorded behind the work; None on a CPU.
            start: recorded before the work, if its time is wanted.
            host_s: begin and end of work that a CPU has done, by `time.perf_counter()`.
        """
        self._event = event
        self._start = start
        self._host_s = host_s

    def wait(self, timeout_s: float) -> bool:
        """Block this thread until the work is done; whether it is, within `timeout_s`.

        Polls, since the runtime's own wait has no bound. Returns at once on a CPU.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_passed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def is_passed(self) -> bool:
        """Whether the work is done; asks without waiting."""
        return self._event is None or bool(self._event.query())

    def after_this(self, stream: torch.cuda.Stream) -> None:
        """Hold a stream's later work until this point is passed; the host does not wait."""
        if self._event is not None:
            stream.wait_event(self._event)

    @property
    def device_us(self) -> float | None:
        """Duration of the work up to here, in microseconds."""
        if self._event is None:
            return None if self._host_s is None else (self._host_s[1] - self._host_s[0]) * 1e6
        if self._start is None or not self.is_passed():
            return None
        return float(self._start.elapsed_time(self._event)) * 1e3

    @property
    def has_start(self) -> bool:
        """Whether it is known where the work began."""
        return self._host_s is not None or (self._event is not None and self._start is not None)

    def times_s(self, clock: "DeviceClock") -> tuple[float, float] | None:
        """Return when the work began and ended, by `time.perf_counter()`.

        Args:
            clock: of the stream's device, made before the work began.

        Returns:
            None until the work is done, or if there is no start.
        """
        duration_us = self.device_us
        if self._event is None or self._start is None or duration_us is None:
            return self._host_s
        begin_s = clock.host_s(self._start)
        return begin_s, begin_s + duration_us * 1e-6


class DeviceClock:
    """Tells an event's time by the host's clock, from one event whose host time is known.

    Reading events' times needs no synchronisation. Their distance is a float of milliseconds: 1 µs
    is told apart for 8 seconds, 16 µs for two minutes, so a long recording takes a new clock.
    """

    TRIES = 5

    def __init__(self, device: torch.device) -> None:
        """Record the known event on an idle stream and wait for it; nothing on a CPU."""
        self._zero: torch.cuda.Event | None = None
        self._zero_s = time.perf_counter()
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        best_s = float("inf")
        for _ in range(self.TRIES):  # the quickest one is known best
            event = torch.cuda.Event(enable_timing=True)
            begin_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
            end_s = time.perf_counter()
            if end_s - begin_s < best_s:
                best_s = end_s - begin_s
                self._zero, self._zero_s = event, (begin_s + end_s) / 2

    def host_s(self, event: torch.cuda.Event) -> float:
        """Return when a passed event happened, by `time.perf_counter()`.

        Raises:
            ArgumentError: this is the clock of a CPU.
        """
        if self._zero is None:
            raise ArgumentError("the clock is a CPU's, wanted that of the event's device")
        return self._zero_s + float(self._zero.elapsed_time(event)) * 1e-3


def fence_of_caller(device: torch.device) -> Fence:
    """Return a fence after all that the calling thread's current stream has been given so far."""
    if device.type == "cpu":
        return Fence()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)


def current_stream_id(device: torch.device) -> int:
    """Return a number that tells the calling thread's current streams apart; 0 on a CPU."""
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


class Lane:
    """A stream of high priority for one direction's packing; nothing on a CPU.

    High priority, so that its few programs start beside a running model instead of behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream; None on a CPU."""
        return self._stream

    def adopt_device(self) -> None:
        """Make the device current in the calling thread; once per thread."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    @contextmanager
    def work(self, after: Fence) -> Iterator[list[Fence]]:
        """Order the body's launches on the lane, behind `after`.

        If the body raises, what it has launched is through before this does (`DRAIN_LIMIT_S`).

        Yields:
            A list that holds, once the body has ended, the fence after its work.
        """
        fences: list[Fence] = []
        if self._stream is None:
            begin = time.perf_counter()
            yield fences
            fences.append(Fence(host_s=(begin, time.perf_counter())))
            return
        with torch.cuda.stream(self._stream):
            after.after_this(self._stream)
            start = torch.cuda.Event(enable_timing=True)
            start.record(self._stream)
            try:
                yield fences
            except BaseException:
                # Who hears of the failure may use the pages at once: what was launched ends first.
                self._drain()
                raise
            end = torch.cuda.Event(enable_timing=True)
            end.record(self._stream)
            fences.append(Fence(end, start))

    def _drain(self) -> None:
        event = torch.cuda.Event()
        event.record(self._stream)
        if not Fence(event).wait(DRAIN_LIMIT_S):
            log.error("work on %s did not end within %g s", self._device, DRAIN_LIMIT_S)
