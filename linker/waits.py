"""Three ways to wait for a layer, behind one interface: by the host, by events, on the device.

No wait hangs and none raises into a running forward pass: one that ends in vain fails its step,
which lets all others of the step through, and `verdict` tells afterwards.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from kvferry.errors import ArgumentError
from kvferry.kernels.counters import LayerCounters, Step
from kvferry.linker.device_wait import DeviceWait
from kvferry.linker.event_wait import EventWait
from kvferry.linker.host_wait import HostWait
from kvferry.linker.stream_memory import StreamMemory, StreamOperations
from kvferry.linker.waited import DEFAULT_TIMEOUT_S, Waited

KINDS = ("host", "event", "device")


class LayerWait(Protocol):
    """Holds whoever needs a layer until all its signals of a step are given."""

    def arm(self, step: Step) -> None:
        """Prepare the stream that is current, and that will wait, for a step's waits.

        Needed before a captured graph is replayed; else the first wait does it.
        """

    def wait(self, step: Step, layer: int, limit_s: float | None = None) -> Waited:
        """Hold the thread or the current stream until a layer has landed; never raises for that.

        Args:
            step: which.
            layer: which.
            limit_s: wait no longer than that, where it is less than the wait's own bound.
        """

    def verdict(self, step: Step) -> str | None:
        """Return why a step's bytes cannot be used, None if they can so far; does not wait."""

    def close(self) -> None:
        """Let through whoever is held, and end what was started."""


def layer_wait(
    kind: str,
    counters: LayerCounters,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    via: str = "auto",
    environment: Mapping[str, str] = os.environ,
    operations: StreamOperations | None = None,
) -> LayerWait:
    """Return a wait of some kind, if it can be right here.

    Args:
        kind: "host", "event" or "device".
        counters: what is waited for.
        timeout_s: how long at most; then the step fails.
        via: how "device" waits: "memory" by the driver's operation, "kernel", or "auto", by the
            first that there is.
        environment: where CUDA_DEVICE_MAX_CONNECTIONS is looked up.
        operations: the driver; by default that of the counters' device.

    Raises:
        ArgumentError: an argument is wrong, or `refusal` has a reason.
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}, wanted one of {list(KINDS)}")
    if via not in ("auto", "memory", "kernel"):
        raise ArgumentError(f"via is {via!r}, wanted 'auto', 'memory' or 'kernel'")
    device = counters.device
    if kind == "device" and via != "kernel" and device.type == "cuda" and operations is None:
        operations = StreamMemory(device.index or 0)
    reason = refusal(kind, device.type, counters.preloaded, via, environment, operations)
    if reason is not None:
        raise ArgumentError(f"kind is {kind!r}: {reason}")
    if kind == "host":
        return HostWait(counters, timeout_s)
    if kind == "event":
        return EventWait(counters, timeout_s)
    usable = via != "kernel" and operations is not None and operations.reason is None
    return DeviceWait(counters, timeout_s, operations if usable else None)


def refusal(
    kind: str,
    device_type: str,
    preloaded: bool,
    via: str,
    environment: Mapping[str, str],
    operations: StreamOperations | None,
) -> str | None:
    """Return why a kind of wait would be wrong here, None if it would not; see `layer_wait`."""
    if kind == "host":
        return None
    if device_type != "cuda":
        return f"the counters are on a {device_type} device, which has no streams; wanted 'host'"
    if kind == "event":
        return None
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    if connections == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: a held stream would hold its producer too; wanted "
            "at least 2, or 'event'"
        )
    if not preloaded:
        return "the kernels are not loaded, wanted `LayerCounters.preload()` before"
    if via == "memory" and (operations is None or operations.reason is not None):
        return f"via is 'memory', but {operations.reason if operations else 'there is no driver'}"
    return None
