"""Layer-wise loads for SGLang: queued by request, started by batch, waited for by layer.

The scheduler's thread never waits here before the forward pass does: a thread of its own waits for
the page ids to reach the host and opens the load.
"""

import itertools
from collections.abc import Callable, Sequence

from kvferry.errors import ArgumentError, TransferFailed
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.linker import Linker
from kvferry.linker.sglang_jobs import Job, Opener
from kvferry.linker.sglang_transfers import COPY_LIMIT_S, Pages
from kvferry.linker.streams import Fence, current_stream_id
from kvferry.linker.transfer import without_frames

STORE_CAUSES = frozenset({"transport", "unavailable", "deadline", "session lost"})
"""Causes that say more about the store than about the object that failed."""


class Batch(Job[LayerLoad]):
    """The loads of one forward pass.

    Attributes:
        index: of the layer counter's consumer.
        requests: request id to its pages.
    """

    def __init__(self, index: int, requests: dict[str, Pages], behind: Sequence[Fence]) -> None:
        super().__init__(behind)
        self.index = index
        self.requests = requests

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Hold this thread, or its stream, until a layer may be read; a failure raises nothing."""
        self.wait_begun(timeout_s)
        if self.handle is not None:
            self.handle.wait_layer(layer)

    def last_with(self, layer: int) -> int:
        """Return the last layer that comes with a layer: of its group, once the load is begun."""
        groups = () if self.handle is None else self.handle.groups
        return next((end - 1 for first, end in groups if first <= layer < end), layer)

    def verdict(self, timeout_s: float) -> TransferFailed | None:
        """Wait until no page is touched any more; why the load failed, None if it did not."""
        self.wait_begun(timeout_s)
        if self.handle is not None and self.error is None:
            try:
                self.handle.result()
            except TransferFailed as error:
                without_frames(error)
                self.give_up(str(error), error.cause)  # the other requests' pages too
        return self.error


class Loads:
    """Queued and running loads. For the scheduler's thread alone.

    Attributes:
        device: of the pools.
        comes_by_group: whether who has waited for a layer has waited for its whole group.
    """

    def __init__(self, linker: Linker) -> None:
        """Start the thread that begins loads."""
        assert linker.layout.device is not None
        self.device = linker.layout.device
        # Signals of a group follow its last unpack: on the host and by events one wait is for all
        # its layers. Waits on the device may be captured in a graph, for other groups later on.
        self.comes_by_group = linker.config.wait != "device"
        self._linker = linker
        self._queued: dict[str, Pages] = {}
        self._running: dict[int, Batch] = {}
        self._numbers = itertools.count()
        self._opener: Opener[Batch] = Opener("kvferry-sglang-loads", self.device, self._begin)

    def queue(self, rid: str, pages: Pages) -> None:
        """Remember a request's load for the next batch.

        Raises:
            ArgumentError: the request has one already.
        """
        if rid in self._queued:
            raise ArgumentError(f"rid {rid!r} has a load queued already, wanted one")
        self._queued[rid] = pages

    def cancel(self, rid: str) -> bool:
        """Forget a queued load; whether there was one."""
        return self._queued.pop(rid, None) is not None

    def start(self, behind: Callable[[], Sequence[Fence]]) -> int:
        """Begin all queued loads as one batch; return its index, -1 if there are none.

        Args:
            behind: called if there are some; what it returns must be passed before pages are
                written.
        """
        if not self._queued:
            return -1
        requests, self._queued = self._queued, {}
        batch = Batch(next(self._numbers), requests, behind())
        self._running[batch.index] = batch
        self._opener.put(batch)
        return batch.index

    def running(self, index: int) -> Batch | None:
        """Return a batch that was started and not finished."""
        return self._running.get(index)

    def finish(self, index: int) -> TransferFailed | None:
        """Wait for a batch's end, and forget it; why it failed, None if it did not.

        Its pages are not touched any more.
        """
        batch = self._running.get(index)
        if batch is None:
            return None
        error = batch.verdict(COPY_LIMIT_S + self._linker.config.transfer_timeout_s)
        del self._running[index]
        if error is not None and error.cause in STORE_CAUSES:
            # SGLang ends all requests of the batch, tried or not. Asked again, none of them must
            # fail a second time by another page of the same lost owner.
            for pages in batch.requests.values():
                self._linker.distrust(pages.keys)
        return error

    def reset(self, reason: str) -> None:
        """Drop what is queued, and end what runs; no page is touched any more."""
        self._queued.clear()
        for batch in self._running.values():
            batch.give_up(reason, "cancelled")
        self._running.clear()

    def leave(self) -> None:
        """End the thread, for whoever was dropped; does not wait."""
        self._opener.leave()

    def close(self, timeout_s: float) -> None:
        """End what runs, and the thread."""
        self.reset("the linker is closed")
        self._opener.close(timeout_s)

    def _begin(self, batch: Batch) -> None:
        """In the thread of loads."""
        try:
            # Partial: SGLang asks for what it lacks, in one pool pages that another has already.
            requests = [
                LoadRequest(each.keys, each.on_host(), partial=True)
                for each in batch.requests.values()
            ]
            load = self._linker.load_batch(requests, number=batch.index)
            batch.begin(load.start)
        finally:
            if batch.handle is None:  # given up before, or refused
                self._linker.skip_load(batch.index)


class LayerDoneCounter:
    """What SGLang's pools wait on before a layer is read.

    Registered once, before graphs are captured, and the same object ever after.

    Most pools ask for a layer before they hand it out. Some of SGLang's readers take the tensors as
    they are: for those pools every layer must be there before the forward pass begins.

    Attributes:
        num_layers: of this pipeline stage, up to the last one with a buffer.
        consumer_index: the batch whose layers the forward pass that begins now reads; -1: none.
    """

    def __init__(
        self, num_layers: int, loads: Loads, timeout_s: float, *, by_layer: bool = True
    ) -> None:
        """Make the counter of a pipeline stage.

        Args:
            num_layers: see above.
            loads: whose layers they are.
            timeout_s: longest wait for one layer.
            by_layer: whether every reader of the pools asks for its layer.
        """
        self.num_layers = num_layers
        self._by_layer = by_layer
        self.consumer_index = -1
        self._loads = loads
        self._timeout_s = timeout_s
        self._reached: tuple[int, int, int] = (-1, -1, 0)  # batch, layer, stream

    def set_consumer(self, index: int) -> None:
        """Say which batch the next forward pass reads; -1 for none. On that pass's stream."""
        self.consumer_index = index
        if not self._by_layer:
            self.wait_until(self.num_layers - 1)

    def wait_until(self, threshold: int) -> None:
        """Hold the forward pass until a layer may be read: its thread, or its stream.

        Cheap when asked again for the same layer, or one of its group. Bounded, and never raises
        for a load that failed: the forward pass goes on, and the batch's verdict tells.

        Args:
            threshold: the layer, counted in this stage; those behind the last buffer wait for that.
        """
        index = self.consumer_index
        if index < 0:
            return
        batch = self._loads.running(index)
        if batch is None:
            return
        layer = min(threshold, self.num_layers - 1)
        stream = current_stream_id(self._loads.device)
        # What this stream waited for needs no second wait; another stream knows nothing of it.
        if self._reached[0] == index and self._reached[2] == stream and layer <= self._reached[1]:
            return
        batch.wait_layer(layer, self._timeout_s)
        last = batch.last_with(layer) if self._loads.comes_by_group else layer
        self._reached = (index, last, stream)

    def reset(self) -> None:
        """Forget the batch."""
        self.consumer_index = -1
