"""A layer's compute: matmuls on a GPU; on a CPU a sleep, since a GPU's leaves the CPU free."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvferry.linker.streams import Fence
from kvferry.linker.trace import Trace

ASK_S = 300e-6
"""How long before its end a sleeping layer asks for the next: more than a host wakes up late."""


class Compute:
    """Lets layers take their time, and records it.

    Attributes:
        layer_us: how long a layer takes on a CPU.
    """

    def __init__(
        self,
        device: torch.device,
        trace: Trace,
        *,
        layer_us: float,
        matmul_size: int = 4096,
        num_matmuls: int = 1,
    ) -> None:
        """Allocate what is multiplied.

        Args:
            device: on a GPU, work goes to the stream that is current.
            trace: gets the lane `compute`, and on a GPU `stall`, how long the stream was held.
            layer_us: how long a layer takes on a CPU.
            matmul_size: rows and columns of what a GPU multiplies.
            num_matmuls: how many multiplications a layer takes.
        """
        self.layer_us = layer_us
        self._device = device
        self._trace = trace
        self._num_matmuls = num_matmuls
        self._end_s = 0.0
        self._follows = False
        self._factors: list[torch.Tensor] = []
        if device.type == "cuda":
            shape = (matmul_size, matmul_size)
            self._factors = [
                torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3)
            ]

    def begin_step(self) -> None:
        """Let the next layer begin when it is called, whenever the one before has ended."""
        self._follows = False

    @contextmanager
    def layer(self, layer: int, next_is_there: Callable[[], bool]) -> Iterator[None]:
        """Compute a layer around a body that reads and writes its pages.

        On a CPU both together take `layer_us`, unless the body alone takes longer. If the next
        layer is there by then, it begins by then, as it would on a GPU: a sleeping host wakes up
        some 0.1 ms late, and makes up for it in the next layer.

        Args:
            layer: which one, for the trace.
            next_is_there: whether the next layer can begin; asked on a CPU only.
        """
        begin_s = time.perf_counter()
        with self._on_stream("compute", layer):
            yield
            for _ in range(self._num_matmuls if self._factors else 0):
                torch.mm(self._factors[0], self._factors[1], out=self._factors[2])
        if not self._factors:
            self._sleep((self._end_s if self._follows else begin_s), next_is_there)
            self._trace.add("compute", f"layer {layer}", begin_s, time.perf_counter())

    @contextmanager
    def stalled(self, layer: int) -> Iterator[None]:
        """Record how long the stream is held by a body that makes it wait; nothing on a CPU."""
        with self._on_stream("stall", layer):
            yield

    def finish(self) -> None:
        """Wait for all that was computed."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _sleep(self, begin_s: float, next_is_there: Callable[[], bool]) -> None:
        """Sleep until a layer's time is up, and find out whether the next one was there by then."""
        self._end_s = begin_s + self.layer_us * 1e-6
        self._follows = next_is_there()
        if not self._follows:
            _sleep_until(self._end_s - ASK_S)
            # What is only found too late may have come too late.
            self._follows = next_is_there() and time.perf_counter() <= self._end_s
        _sleep_until(self._end_s)

    @contextmanager
    def _on_stream(self, lane: str, layer: int) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._trace.add_fence(lane, f"layer {layer}", Fence(end, start))


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
