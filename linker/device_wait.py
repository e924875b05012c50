"""The stream is held until a layer's counter in the device's memory is at its target."""

import time

import torch

from kvferry.errors import ArgumentError, KVFerryError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.stream_memory import StreamOperations
from kvferry.linker.wait_watch import WaitWatch, name_of
from kvferry.linker.waited import DEFAULT_TIMEOUT_S, Waited, checked_s, least_s, since_us


class DeviceWait:
    """The current stream is held until the counter in the device's memory is at its target.

    By the driver's stream memory operation if one is handed in, else by a kernel of one warp.
    A stream that is being captured always takes the kernel: it reads its target when it runs, while
    the driver's operation would keep the number that it was captured with.

    Attributes:
        refused: why the driver refused, whereupon kernels took over; None if it did not.
    """

    def __init__(
        self,
        counters: LayerCounters,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operations: StreamOperations | None = None,
    ) -> None:
        self._counters = counters
        self._timeout_s = checked_s(timeout_s)
        self._operations = operations
        self._watch = WaitWatch(counters, timeout_s)
        self._armed: Step | None = None
        self._limits_s = [self._timeout_s] * counters.num_layers  # of the last wait for each
        self.refused: str | None = None

    def arm(self, step: Step) -> None:
        """Write the step's targets where the wait kernels read them, in the stream's order."""
        self._counters.arm(step)
        self._armed = step

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the current stream; the thread goes on. The driver's operation has its own bound.

        Raises:
            ArgumentError: the current stream is the producer's, which would wait for itself, or
                this was closed.
        """
        begin = time.monotonic()
        on_gpu = self._counters.device.type == "cuda"
        stream = torch.cuda.current_stream(self._counters.device) if on_gpu else None
        if stream is not None and stream == self._counters.stream:
            raise ArgumentError("the current stream is the producer's, wanted another to be held")
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        if step.cause is not None and not capturing:
            return Waited(name_of(step, layer), "failed", since_us(begin))
        held = not capturing and self._hold_by_driver(stream, step, layer)
        if not held:
            if self._armed is not step and not capturing:
                self.arm(step)
            self._limits_s[layer] = least_s(self._timeout_s, limit_s)
            self._counters.wait_on_stream(layer, round(self._limits_s[layer] * 1e6))
        return Waited(name_of(step, layer), "enqueued", since_us(begin))

    def verdict(self, step: Step) -> str | None:
        """Return why the step failed, or which layers its wait kernels gave up."""
        layers = self._counters.expired(step)
        if layers and step.cause is None:
            self._counters.fail(
                step,
                f"step {step.number}: layers {layers} were waited for in vain on the device, "
                f"{max(self._limits_s[layer] for layer in layers):.3g} s",
            )
        return step.cause

    def _hold_by_driver(self, stream: torch.cuda.Stream | None, step: Step, layer: int) -> bool:
        """Whether the driver holds the stream; if it refuses once, it is not asked again."""
        if self._operations is None:
            return False
        self._watch.add(step, layer)  # before, so that no stream is held without a bound
        try:
            self._operations.wait_at_least(
                0 if stream is None else stream.cuda_stream,
                self._counters.address_of(layer),
                step.targets[layer],
            )
        except KVFerryError as error:
            self._operations, self.refused = None, str(error)
            self._watch.drop(step, layer)
            return False
        return True

    def close(self) -> None:
        """Let through whoever the driver still holds, and end the thread that bounds it."""
        self._watch.close()
