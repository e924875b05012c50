"""Layer counters for loads in flight: a few sets, taken in turn, each with its wait."""

import itertools
import threading
import time

import torch

from kvferry.errors import TransferFailed
from kvferry.kernels.counters import LayerCounters
from kvferry.linker.event_wait import EventWait
from kvferry.linker.waits import LayerWait, layer_wait

WAITS = ("auto", "host", "event", "device")


class CounterSet:
    """Counters that one load at a time raises, and how they are waited for.

    Attributes:
        index: which set.
        counters: one per layer.
        wait: holds whoever needs a layer.
    """

    def __init__(self, index: int, counters: LayerCounters, wait: LayerWait) -> None:
        self.index = index
        self.counters = counters
        self.wait = wait

    @property
    def events(self) -> EventWait | None:
        """The wait, if it must be told what is enqueued."""
        return self.wait if isinstance(self.wait, EventWait) else None


class CounterSets:
    """A fixed number of sets, handed out in turn. Safe from any thread.

    In turn, so that whoever captures waits into CUDA graphs knows which set a step will use.
    """

    def __init__(
        self,
        num_sets: int,
        num_layers: int,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        kind: str,
        timeout_s: float,
    ) -> None:
        """Make the sets; on a GPU this loads their kernels and waits for the device.

        Args:
            num_sets: loads that may be in flight at once.
            num_layers: of the model.
            device: of those who wait.
            stream: that the loads' unpacks are ordered on.
            kind: `host`, `event`, `device`, or `auto`: `event` on a GPU, else `host`.
            timeout_s: longest wait for one layer.

        Raises:
            ArgumentError: the kind would be wrong here; see `layer_wait`.
        """
        if kind == "auto":
            kind = "event" if device.type == "cuda" else "host"
        self._sets = []
        for index in range(num_sets):
            counters = LayerCounters(num_layers, device, stream=stream)
            counters.preload()
            self._sets.append(
                CounterSet(index, counters, layer_wait(kind, counters, timeout_s=timeout_s))
            )
        self._turns = itertools.count()
        self._taken: set[int] = set()
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> CounterSet:
        """Return the set whose turn it is, once its last load is through.

        Raises:
            TransferFailed: that load was not through within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            index = next(self._turns) % len(self._sets)
            while index in self._taken:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TransferFailed(
                        f"load refused: {len(self._sets)} layer-wise loads are in flight already, "
                        f"and the first was not through within {timeout_s:g} s",
                        cause="busy",
                    )
                self._changed.wait(left_s)
            self._taken.add(index)
            return self._sets[index]

    def give_back(self, taken: CounterSet) -> None:
        """Let the next load have a set: every signal of the last step is given, or it failed."""
        with self._changed:
            self._taken.discard(taken.index)
            self._changed.notify_all()

    def close(self) -> None:
        """Let through whoever still waits."""
        for one in self._sets:
            one.wait.close()
