"""Layer counters: one number per layer that only grows, raised by signals, read by waits.

A step's target for a layer is the target of the step before plus the step's number of signals, so
nothing is ever reset. A counter is int64: it never wraps, stream memory operations compare 64-bit
numbers, and the host reads 8 bytes at once.

On a GPU everything that raises counters goes out on one stream, the producer's. That order is what
keeps steps apart: a failed step's counters are raised behind all signals that were given before, so
none comes late and counts for the next step.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvferry.arguments import device_of, of_type, one_of, or_none, sequence, whole_number
from kvferry.errors import ArgumentError
from kvferry.kernels.counter_memory import CounterMemory
from kvferry.kernels.handles import Launch, is_interpreted
from kvferry.kernels.signals import _wait_kernel

MOST_SIGNALS = 2**31 - 1

CPU_POLL_S = 1e-3

ABANDONED = 1 << 62
"""What every counter is raised to when a producer will never answer again."""


class Step:
    """One step of some layer counters.

    Attributes:
        number: from 1, in order.
        num_signals: what each layer takes in this step.
        targets: what each layer's counter has reached once it has had them.
        cause: why the step failed; None unless it did. Its counters are raised all the same.
    """

    def __init__(self, number: int, num_signals: Sequence[int], targets: Sequence[int]) -> None:
        self.number = number
        self.num_signals = tuple(num_signals)
        self.targets = tuple(targets)
        self.cause: str | None = None


class LayerCounters:
    """The counters of one producer's layers. Safe from any thread.

    Keep it until every stream that raises or awaits the counters is through.

    Attributes:
        num_layers: how many; layers that own no buffer have a counter too.
        device: where the counters and those who wait for them are.
        stream: what everything that raises counters is ordered on; None on a CPU.
        preloaded: whether `preload` was called.
    """

    def __init__(
        self,
        num_layers: int,
        device: torch.device | str,
        *,
        scope: str = "sys",
        stream: torch.cuda.Stream | None = None,
        backend: str = "auto",
    ) -> None:
        """Allocate counters at 0.

        Args:
            num_layers: how many.
            device: where.
            scope: who sees what came before a signal: "gpu" for kernels of this GPU alone, "sys"
                also for the host, for network cards and for stream memory operations.
            stream: the producer's; by default the stream that is current now.
            backend: "auto", "triton" or "reference"; on a CPU "auto" is the reference, and "triton"
                is Triton's interpreter, where a wait shuts out every other kernel.

        Raises:
            ArgumentError: an argument is none of these.
        """
        num_layers = whole_number("num_layers", num_layers, 1, 2**31 - 1)
        device = device_of("device", device)
        one_of("scope", scope, ("gpu", "sys"))
        one_of("backend", backend, ("auto", "triton", "reference"))
        or_none("stream", stream, of_type, torch.cuda.Stream)
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"device is {device}, wanted a CPU or CUDA device")
        on_cpu = device.type == "cpu"
        if on_cpu and backend == "triton" and not is_interpreted(_wait_kernel):
            raise ArgumentError("backend is 'triton' on a CPU: set TRITON_INTERPRET=1 beforehand")
        if not on_cpu and backend == "reference":
            raise ArgumentError(f"backend is 'reference' on {device}, wanted 'auto' or 'triton'")
        self.num_layers = num_layers
        self.device = device
        self.stream = None if on_cpu else stream or torch.cuda.current_stream(device)
        self.preloaded = False
        self._memory = CounterMemory(
            num_layers, device, scope, self.stream, backend == "triton" or not on_cpu
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._step = Step(0, [0] * num_layers, [0] * num_layers)
        self._num_issued = [0] * num_layers
        self._abandoned = False

    # ---- who raises ----

    def begin_step(self, num_signals: int | Sequence[int] = 1) -> Step:
        """Begin the next step, once all signals of the one before are given, or it has failed.

        Args:
            num_signals: what a layer takes: one number, or one for each layer. At least 1, also for
                layers that own nothing: whoever waits for these must get through too.

        Raises:
            ArgumentError: a number is wrong, the step before is not over, or the counters were
                abandoned.
        """
        if isinstance(num_signals, Sequence):
            counts = list(sequence("num_signals", num_signals, "integers"))
        else:
            counts = [whole_number("num_signals", num_signals, 1, MOST_SIGNALS)] * self.num_layers
        if len(counts) != self.num_layers:
            raise ArgumentError(f"num_signals has {len(counts)} numbers, wanted {self.num_layers}")
        for layer, count in enumerate(counts):
            whole_number(f"num_signals of layer {layer}", count, 1, MOST_SIGNALS)
        with self._lock:
            if self._abandoned:
                raise ArgumentError("the counters were abandoned, wanted new ones")
            before = self._step
            for layer, count in enumerate(before.num_signals):
                if before.cause is None and self._num_issued[layer] < count:
                    raise ArgumentError(
                        f"step {before.number} is not over: layer {layer} has had "
                        f"{self._num_issued[layer]} of {count} signals; wanted all, or `fail`"
                    )
            targets = [base + count for base, count in zip(before.targets, counts, strict=True)]
            self._step = Step(before.number + 1, counts, targets)
            self._num_issued = [0] * self.num_layers
            return self._step

    def signal(
        self, step: Step, first_layer: int, end_layer: int | None = None, *, num_signals: int = 1
    ) -> bool:
        """Raise the counters of `first_layer` up to `end_layer`, by default of that layer alone.

        On a GPU the signal comes behind all that the producer's stream has been given; on a CPU, at
        once, behind all that this thread has done.

        Returns:
            Whether they were raised: False if the step has failed, or another has begun since.

        Raises:
            ArgumentError: the range is wrong, or a layer would get more signals than the step has.
        """
        end_layer = first_layer + 1 if end_layer is None else end_layer
        with self._lock:
            if not self._count(step, first_layer, end_layer, num_signals):
                return False
            self._memory.add(first_layer, end_layer, num_signals)
            self._changed.notify_all()
            return True

    @contextmanager
    def count_signals(
        self, step: Step, first_layer: int, end_layer: int, num_signals: int
    ) -> Iterator[bool]:
        """Account for signals that a kernel of the caller's gives by `signals.signal_layers`.

        The body launches it on the producer's stream if what it is handed is true; a failure of the
        step comes before or behind the body. The host does not see these signals before `publish`.

        Yields:
            Whether the signals are still wanted, as `signal` returns it.
        """
        with self._lock:
            yield self._count(step, first_layer, end_layer, num_signals)

    def publish(self, first_layer: int = 0, end_layer: int | None = None) -> None:
        """Bring the host's mirror up to date, behind all that the producer's stream was given."""
        end_layer = self.num_layers if end_layer is None else end_layer
        self._check_range(first_layer, end_layer)
        with self._lock:
            self._memory.add(first_layer, end_layer, 0)

    def fail(self, step: Step, cause: str) -> bool:
        """Let everyone through who waits for a step, and keep why it failed in `step.cause`.

        The first cause stays. Counters are raised to the step's targets behind all that the
        producer's stream was given; signals of the step that come later are dropped.

        Returns:
            Whether the step had not failed before.
        """
        with self._lock:
            if step.cause is not None:
                return False
            step.cause = cause
            # Of an earlier step all signals are given: its counters need no raising.
            if step is self._step and not self._abandoned:
                self._memory.raise_to(step.targets)
            self._changed.notify_all()
            return True

    def abandon(self, cause: str) -> None:
        """Let everyone through for ever, at once: the producer's stream does not move any more.

        The step fails, and no other can begin. Waits for earlier steps end too.
        """
        with self._lock:
            if self._abandoned:
                return
            self._abandoned = True
            if self._step.cause is None:
                self._step.cause = cause
            stream = None if self.stream is None else torch.cuda.Stream(self.device)
            self._memory.raise_to([ABANDONED] * self.num_layers, stream)
            self._changed.notify_all()

    def preload(self) -> None:
        """Compile and load every kernel now, before the first step, and wait for the GPU.

        The first launch of a kernel loads it, which may wait for running kernels: for a wait whose
        signal is about to be loaded, that would be for ever.

        Raises:
            ArgumentError: a step has begun.
        """
        with self._lock:
            if self._step.number:
                raise ArgumentError(
                    f"preload came in step {self._step.number}, wanted it before the first"
                )
            if self._memory.by_kernels:
                self._memory.add(0, self.num_layers, 0)
                self._memory.raise_to([0] * self.num_layers)
                self._memory.wait(0, 0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.preloaded = True

    # ---- who waits ----

    def arm(self, step: Step) -> None:
        """Hand a step's targets to the wait kernels that the current stream is given from now on.

        Captured kernels read them too: arm before a graph is replayed, on the stream that replays
        it. Only one stream may wait by kernels.

        Raises:
            ArgumentError: the current stream is being captured: its replays would arm this step.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("arm came while the current stream is captured, wanted it before")
        self._memory.arm(step.targets, step.number)

    def wait_on_stream(self, layer: int, timeout_us: int) -> None:
        """Hold the current stream until `layer` has reached its armed target, or give up.

        A wait that gives up lets the stream go on, and so do the step's others from then on:
        `expired` tells. On a CPU it is the calling thread that is held.
        """
        self._check_wait(layer, timeout_us)
        self._memory.wait(layer, timeout_us)

    def wait_launch(self, layer: int, timeout_us: int) -> Launch:
        """Return the launch by which `wait_on_stream` holds a stream."""
        self._check_wait(layer, timeout_us)
        return self._memory.wait_launch(layer, timeout_us)

    def address_of(self, layer: int) -> int:
        """Return where a layer's counter lies on the device, for those who read it there."""
        self._check_range(layer, layer + 1)
        return self._memory.values.data_ptr() + 8 * layer

    def reached(self, step: Step, layer: int) -> bool:
        """Whether a layer has had all signals of a step, as the host sees it; no CUDA call."""
        self._check_range(layer, layer + 1)
        return self._abandoned or self._memory.count_of(layer) >= step.targets[layer]

    def pause(self, step: Step, layer: int, poll_s: float) -> None:
        """Hold the thread for a moment before it asks `reached` again.

        What a GPU raises wakes nobody: `poll_s`. On a CPU until something is signalled here, or
        `CPU_POLL_S` for what a caller's own kernel raises.
        """
        if self.stream is not None:
            time.sleep(poll_s)
            return
        with self._changed:
            if step.cause is None and not self.reached(step, layer):
                self._changed.wait(CPU_POLL_S)

    def count_of(self, layer: int) -> int:
        """Return a counter, as the host sees it; no CUDA call."""
        self._check_range(layer, layer + 1)
        return self._memory.count_of(layer)

    def expired(self, step: Step) -> list[int]:
        """Return the layers at which a wait kernel gave a step up; no CUDA call."""
        return self._memory.expired(step.targets, step.number)

    # ---- inside ----

    def _count(self, step: Step, first_layer: int, end_layer: int, num_signals: int) -> bool:
        """Account for signals; whether they are still wanted. The lock is held."""
        self._check_range(first_layer, end_layer)
        whole_number("num_signals", num_signals, 1, MOST_SIGNALS)
        if step is not self._step or step.cause is not None:
            return False
        for layer in range(first_layer, end_layer):
            if self._num_issued[layer] + num_signals > step.num_signals[layer]:
                raise ArgumentError(
                    f"layer {layer} has had {self._num_issued[layer]} of "
                    f"{step.num_signals[layer]} signals of step {step.number}, and {num_signals} "
                    "more came"
                )
        for layer in range(first_layer, end_layer):
            self._num_issued[layer] += num_signals
        return True

    def _check_wait(self, layer: int, timeout_us: int) -> None:
        self._check_range(layer, layer + 1)
        whole_number("timeout_us", timeout_us, 0, 2**63 - 1)

    def _check_range(self, first_layer: int, end_layer: int) -> None:
        for each in (first_layer, end_layer):
            if type(each) is not int:
                whole_number("layers", each, 0, self.num_layers)
        if not 0 <= first_layer < end_layer <= self.num_layers:
            raise ArgumentError(
                f"layers are {first_layer} .. {end_layer - 1}, wanted a range within "
                f"0 .. {self.num_layers - 1}"
            )
