"""Handle of a layer-wise load: a batch of requests, waited for layer by layer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.arguments import of_type, seconds_or_none, whole_number
from kvferry.errors import ArgumentError, TransferFailed
from kvferry.kernels.counters import Step
from kvferry.linker.counter_sets import CounterSet
from kvferry.linker.home import Home
from kvferry.linker.layer_plan import Rows
from kvferry.linker.plan import SpaceIds
from kvferry.linker.ranges import Range, ranged
from kvferry.linker.streams import Fence, fence_of_caller
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Timings, Transfer, TransferResult
from kvferry.linker.waited import Waited


@dataclass(frozen=True)
class LoadRequest:
    """One request of a batch; see `Linker.load` for its arguments.

    Attributes:
        keys: a key for each page.
        page_ids: destinations.
        tail_tokens: how many tokens of the last key's page are wanted; all by default.
        tail: what becomes of that page's other tokens, `zero` or `keep`.
        partial: whether pages that the prefix needs may be left out.
    """

    keys: Sequence[str]
    page_ids: SpaceIds
    tail_tokens: int | None = None
    tail: str = "zero"
    partial: bool = False


class LayerLoad:
    """A batch of loads whose layers may be used as they arrive. Made by `Linker.load_batch`.

    `start`, then before each layer `wait_layer`, and after the last one `result`: only that tells
    whether what the layers have read was right. Objects are verified when they are there whole,
    which is after their first layers were used; whoever has used a failed load must throw away what
    came of it.

    Attributes:
        transfers: a handle for each request, in order: `result`, `done`, `cancel`.
        rows: what travels, by index space.
        groups: the layer groups, `[first, end)` ranges of layers: what arrives together.
        timings: of the batch.
        behind: the point in the forward's stream that pages may be touched after.
        step: of the counters; None before `start`.
        complete: whether the counters of every layer were raised.
        number: of the load, where its reads are shared with other ranks.
    """

    def __init__(
        self,
        transfers: tuple[Transfer, ...],
        rows: dict[str, Rows],
        groups: tuple[tuple[int, int], ...],
        device: torch.device,
        begin: "Callable[[LayerLoad], None]",
        trace: Trace | None,
        number: int | None = None,
    ) -> None:
        self.transfers = transfers
        self.rows = rows
        self.groups = groups
        self.timings = Timings()
        self.behind = Fence()
        self.step: Step | None = None
        self.complete = False  # whether all counters were raised
        self.number = number
        self._home = Home("the load")
        self._set: CounterSet | None = None
        self._device = device
        self._begin: Callable[[LayerLoad], None] | None = begin
        self._trace = trace
        for transfer in transfers:
            transfer.on_end.append(self._one_ended)

    def __repr__(self) -> str:
        return f"<LayerLoad of {len(self.transfers)} requests, {self._state}>"

    @property
    def index(self) -> int | None:
        """Which set of counters the load raises; None before `start`."""
        return None if self._set is None else self._set.index

    def start(self, stream: torch.cuda.Stream | None = None) -> "LayerLoad":
        """Begin to fetch. The requests' deadlines count from here.

        Nothing is written to the pages before all that `stream` has been given so far: a forward
        pass that still reads or writes them, for one.

        Args:
            stream: by default the one that is current in this thread.

        Raises:
            ArgumentError: it was started before.
            TransferFailed: the linker is closing, or too many loads are in flight.
        """
        self._home.check()
        begin, self._begin = self._begin, None  # a handle does not keep the linker's threads
        if begin is None:
            raise ArgumentError("start was called before, wanted it once")
        if stream is not None:
            of_type("stream", stream, torch.cuda.Stream)
        if stream is None:
            self.behind = fence_of_caller(self._device)
        else:
            with torch.cuda.stream(stream):
                self.behind = fence_of_caller(self._device)
        for transfer in self.transfers:
            transfer.restart_clock()
        begin(self)
        return self

    def attach(self, taken: CounterSet) -> None:
        """Take counters for the load, and begin their next step."""
        self.step = taken.counters.begin_step()
        self._set = taken

    @property
    def counter_set(self) -> CounterSet:
        """The counters that the load raises.

        Raises:
            ArgumentError: `start` was not called.
        """
        return self._started()[0]

    def arm(self) -> None:
        """Prepare the current stream for waits in a captured graph that is replayed next."""
        taken, step = self._started()
        taken.wait.arm(step)

    @ranged(lambda _, layer: Range("wait", f"layer {layer}"))
    def wait_layer(self, layer: int) -> Waited:
        """Hold this thread, or the current stream, until a layer's pages may be read.

        Never raises for a load that failed, and never waits longer than `wait_timeout_s`, nor past
        the requests' deadlines: a forward pass that has begun goes on, and `result` tells.

        Args:
            layer: 0 .. num_layers - 1; also layers without pages.

        Returns:
            What came of it; its state tells a failure of the whole batch early.

        Raises:
            ArgumentError: no such layer, or `start` was not called.
        """
        taken, step = self._started()
        layer = whole_number("layer", layer, 0, len(step.targets) - 1)
        begin_s = time.perf_counter()
        left_s = max(transfer.left_s for transfer in self.transfers)
        waited = taken.wait.wait(step, layer, left_s)
        if self._trace is not None:
            self._trace.add(
                "wait", f"layer {layer}", begin_s, time.perf_counter(), state=waited.state
            )
        return waited

    def done(self) -> bool:
        """Whether every request has a result or a failure."""
        return all(transfer.done() for transfer in self.transfers)

    def result(self, timeout_s: float | None = None) -> list[TransferResult]:
        """Wait for every request's end, and return what was done, in order.

        Args:
            timeout_s: how long to wait for all; until their own deadlines by default.

        Raises:
            TransferFailed: the first request's that failed. The others' results: `transfers`.
            TimeoutError: `timeout_s` passed, and one is still in flight.
        """
        taken, step = self._started()
        timeout_s = seconds_or_none("timeout_s", timeout_s)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        results = []
        for transfer in self.transfers:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            results.append(transfer.result(left_s))
        # A wait on the device may have given up before the layer came after all.
        cause = taken.wait.verdict(step)
        if cause is not None:
            raise TransferFailed(f"load failed: {cause}", cause="deadline")
        return results

    def cancel(self) -> bool:
        """Give all requests up, and let through whoever waits; False if all had ended already."""
        return self.give_up("load was cancelled", "cancelled")

    def give_up(self, reason: str, cause: str, limit_s: float | None = None) -> bool:
        """End every request that goes on badly, from outside the loader; see `Transfer.give_up`."""
        return sum(transfer.give_up(reason, cause, limit_s) for transfer in self.transfers) > 0

    def fail(self, error: TransferFailed) -> bool:
        """End every request that goes on badly, and let through who waits; for the loader."""
        return sum(transfer.fail(error) for transfer in self.transfers) > 0

    def let_through(self) -> None:
        """Raise every counter that is not raised yet; for the loader, at the end."""
        self._fail_step(not self.complete, "load ended before its last layer")

    def _one_ended(self, _: Transfer, outcome: TransferResult | TransferFailed) -> None:
        """Let through whoever waits once no request is left that bytes could come for."""
        if all(transfer.is_over for transfer in self.transfers):
            self._fail_step(not self.complete, str(outcome))

    def _fail_step(self, wanted: bool, cause: str) -> None:
        if wanted and self._set is not None and self.step is not None:
            self._set.counters.fail(self.step, cause)

    @property
    def going(self) -> bool:
        """Whether any request may still come to a good end."""
        return not self.done() and (self.step is None or self.step.cause is None)

    @property
    def _state(self) -> str:
        if self._set is None:
            return "not started"
        return "ended" if all(transfer.is_over for transfer in self.transfers) else "in flight"

    def _started(self) -> tuple[CounterSet, Step]:
        self._home.check()
        if self._set is None or self.step is None:
            raise ArgumentError("the load was not started, wanted `start` before")
        return self._set, self.step
