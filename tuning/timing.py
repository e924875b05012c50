"""Times calls turn by turn, from cold caches, so that they can be compared with each other."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvferry.errors import ArgumentError

LEAST_FLUSH_BYTES = 256 << 20
"""Written before each sample on a GPU. It also takes the GPU longer (some 0.1 ms) than the host
needs to issue the next call, so that no sample holds the host's time."""

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """How long a call takes.

    Attributes:
        median_us: the median.
        low_us: the 10th percentile, interpolated between samples.
        high_us: the 90th percentile.
        num_samples: how many there were.
    """

    median_us: float
    low_us: float
    high_us: float
    num_samples: int

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median."""
        return (self.high_us - self.low_us) / self.median_us


def time_together(
    calls: Mapping[str, Sequence[Call]],
    device: torch.device,
    *,
    num_rounds: int,
    num_warmups: int = 2,
    cold: bool = True,
) -> dict[str, list[float]]:
    """Return samples in us of each name, one per round.

    In a round every name has its turn once, forwards and backwards by turns, so that a clock or a
    machine that drifts does the same to all: `median_ratio` compares two names round by round.

    On a GPU, events on the current stream time the work that a call enqueues there; the host waits
    once per round. On a CPU the clock times the call itself.

    Args:
        calls: by name, a rotation of equal calls on different inputs: round i takes number i,
            modulo how many there are.
        device: where the calls work.
        num_rounds: samples of each name.
        num_warmups: rounds before these, not kept: they compile, and fill what is remembered.
        cold: on a GPU, write a buffer of twice its L2 cache, and of at least 256 MiB, before each
            sample. Without, a call shorter than the host's own part is timed too long. A CPU's
            caches are left as they are.

    Raises:
        ArgumentError: no calls, an empty rotation, or a number of rounds that is too small.
    """
    if not calls:
        raise ArgumentError("calls are empty, wanted at least one name")
    for name, rotation in calls.items():
        if not rotation:
            raise ArgumentError(f"calls of {name!r} are empty, wanted at least one")
    for what, number, least in (("num_rounds", num_rounds, 1), ("num_warmups", num_warmups, 0)):
        if number < least:
            raise ArgumentError(f"{what} is {number}, wanted at least {least}")
    measure = _measure_on_cpu if device.type == "cpu" else _EventClock(device, cold)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(num_warmups + num_rounds):
        order = list(calls)[:: 1 if number % 2 else -1]
        times_us = measure([calls[name][number % len(calls[name])] for name in order])
        if number >= num_warmups:
            for name, time_us in zip(order, times_us, strict=True):
                samples[name].append(time_us)
    return samples


def timing_of(samples: Sequence[float]) -> Timing:
    """Return the median and the percentiles of samples in us.

    Raises:
        ArgumentError: there are none.
    """
    if not samples:
        raise ArgumentError("samples are empty, wanted at least one")
    low, high = samples[0], samples[0]
    if len(samples) > 1:
        low, *_, high = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), low, high, len(samples))


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median, over rounds, of one name's sample divided by another's.

    Raises:
        ArgumentError: there are none, or the two are of different rounds.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ArgumentError(
            f"numerator and denominator have {len(numerator)} and {len(denominator)} samples, "
            "wanted as many of each, at least one"
        )
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def _measure_on_cpu(calls: Sequence[Call]) -> list[float]:
    """Call each; return how long it took, in us."""
    times_us = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times_us.append((time.perf_counter() - begin) * 1e6)
    return times_us


class _EventClock:
    """Times calls on a GPU's current stream."""

    def __init__(self, device: torch.device, cold: bool) -> None:
        self._device = device
        self._flush: torch.Tensor | None = None
        if cold:
            # AMD's properties may name no L2 cache.
            l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            num_bytes = max(2 * l2_bytes, LEAST_FLUSH_BYTES)
            self._flush = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        """Enqueue all, wait, and return how long each took, in us."""
        with torch.cuda.device(self._device):
            pairs: list[tuple[Any, Any]] = []
            for call in calls:
                if self._flush is not None:
                    self._flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                pairs.append((start, end))
            torch.cuda.current_stream(self._device).synchronize()
        return [float(start.elapsed_time(end)) * 1e3 for start, end in pairs]
