"""Order on a device without waiting for it: fences, and one side stream per direction.

On a CPU there is no stream: work is done when its call returns, and a fence is passed at once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

POLL_S = 20e-6


class Fence:
    """A point in a stream's work, `start` marking where the work before it began.

    Attributes:
        device_us: how long the work between took; None until it is done, or if there is no start.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        start: torch.cuda.Event | None = None,
        host_us: float | None = None,
    ) -> None:
        self._event = event
        self._start = start
        self._host_us = host_us

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
        if self._event is None or self._start is None:
            return self._host_us
        return float(self._start.elapsed_time(self._event)) * 1e3 if self.is_passed() else None


def fence_of_caller(device: torch.device) -> Fence:
    """Return a fence after all that the calling thread's current stream has been given so far."""
    if device.type == "cpu":
        return Fence()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Fence(event)


class Lane:
    """A stream of high priority for one direction's packing; nothing on a CPU.

    High priority, so that its few programs start beside a running model instead of behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def adopt_device(self) -> None:
        """Make the device current in the calling thread; once per thread."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    @contextmanager
    def work(self, after: Fence) -> Iterator[list[Fence]]:
        """Order the body's launches on the lane, behind `after`.

        Yields:
            A list that holds, once the body has ended, the fence after its work.
        """
        fences: list[Fence] = []
        if self._stream is None:
            begin = time.perf_counter()
            yield fences
            fences.append(Fence(host_us=(time.perf_counter() - begin) * 1e6))
            return
        with torch.cuda.stream(self._stream):
            after.after_this(self._stream)
            start = torch.cuda.Event(enable_timing=True)
            start.record(self._stream)
            yield fences
            end = torch.cuda.Event(enable_timing=True)
            end.record(self._stream)
            fences.append(Fence(end, start))
