"""The memory of layer counters: the numbers, the targets, and what the host sees of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvferry.kernels.handles import Launch
from kvferry.kernels.signals import (
    has_clock,
    signal_launch,
    signal_reference,
    wait_launch,
    wait_reference,
)

POLL_US = 1_000
"""What a poll on a CPU is taken for: an interpreted one lasts about 1 ms."""


class CounterMemory:
    """Counters of some layers, changed in the order of one stream. Not locked.

    Attributes:
        values: int64 `[num_layers]`, the counters.
        stream: the producer's; None on a CPU.
        by_kernels: whether kernels change and await the numbers, or the reference does.
    """

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        scope: str,
        stream: torch.cuda.Stream | None,
        by_kernels: bool,
    ) -> None:
        self.device = device
        self.stream = stream
        self.by_kernels = by_kernels
        self._scope = scope
        self.values = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._targets = torch.zeros(num_layers + 1, dtype=torch.int64, device=device)
        self._limits = torch.zeros(num_layers, dtype=torch.int64, device=device)
        # No step has such a number: a fresh word must not look like a wait that was given up.
        self._expired = torch.full((num_layers + 1,), -1, dtype=torch.int64, device=device)
        # What the host reads without asking the GPU's driver; on a CPU the numbers themselves. The
        # copies wait for the device, so all of the above is there for whatever stream comes first.
        self._mirror = _in_host_memory(self.values)
        self._expired_mirror = _in_host_memory(self._expired)
        self._seen = self._mirror.numpy()
        self._given_up = self._expired_mirror.numpy()

    def add(self, first_layer: int, end_layer: int, num_signals: int) -> None:
        """Add to a range of counters, behind all that the producer's stream was given; publish."""
        self._change(first_layer, end_layer, num_signals, None, self.stream)

    def raise_to(self, limits: Sequence[int], stream: torch.cuda.Stream | None = None) -> None:
        """Raise every counter that is lower than its limit; publish.

        Args:
            limits: one for each layer.
            stream: in whose order; the producer's by default.
        """
        stream = stream or self.stream
        with _on(stream):
            # Other words in another order: the producer's stream may yet read the first.
            words = self._limits if stream is self.stream else torch.empty_like(self._limits)
            self._copy(limits, words)
        self._change(0, len(limits), 0, words, stream)

    def arm(self, targets: Sequence[int], step_number: int) -> None:
        """Set what waits read from now on, in the order of the current stream."""
        self._copy([*targets, step_number], self._targets)

    def wait_launch(self, layer: int, timeout_us: int) -> Launch:
        """Return the launch of the wait kernel: until `layer` has reached what was armed."""
        return wait_launch(*self._awaited(layer, timeout_us))

    def wait(self, layer: int, timeout_us: int) -> None:
        """Hold the current stream (CPU: this thread) until `layer` has reached what was armed."""
        if self.by_kernels:
            self.wait_launch(layer, timeout_us).start(self.device)
        else:
            wait_reference(*self._awaited(layer, timeout_us))

    def count_of(self, layer: int) -> int:
        """Return a counter as last published; no CUDA call."""
        return int(self._seen[layer])

    def expired(self, targets: Sequence[int], step_number: int) -> list[int]:
        """Return the layers at which a wait for these targets was given up; no CUDA call."""
        if int(self._given_up[-1]) < step_number:
            return []
        return [i for i, target in enumerate(targets) if int(self._given_up[i]) == target]

    def _change(
        self,
        first_layer: int,
        end_layer: int,
        num_signals: int,
        limits: torch.Tensor | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        arguments = (self.values, self._mirror, limits, first_layer, end_layer, num_signals)
        if self.by_kernels:
            with _on(stream):
                signal_launch(*arguments, scope=self._scope).start(self.device)
        else:
            signal_reference(*arguments, scope=self._scope)

    def _awaited(
        self, layer: int, timeout_us: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        if self.device.type == "cpu":
            limit = -(-timeout_us // POLL_US)
        else:  # nanoseconds, or polls of about a microsecond
            limit = timeout_us * 1_000 if has_clock() else timeout_us
        return self.values, self._targets, self._expired, self._expired_mirror, layer, limit

    def _copy(self, numbers: Sequence[int], to: torch.Tensor) -> None:
        """Write numbers in the order of the current stream, without waiting for it."""
        words = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        to.copy_(words, non_blocking=True)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _in_host_memory(words: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in memory of the host that the device can write; on a CPU, these."""
    if words.device.type == "cpu":
        return words
    return torch.empty(words.shape, dtype=words.dtype, pin_memory=True).copy_(words)
