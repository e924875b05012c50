"""A worker's loads for vLLM: begun by a step, between steps or within it, until told as ended."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.errors import KVFerryError, TransferFailed
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.linker import Linker
from kvferry.linker.transfer import Transfer
from kvferry.linker.vllm_jobs import GroupPages, LoadJob, LoadsEnded, StepJobs

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1e-3
"""How long a step that computes nothing waits for a load. vLLM's server pauses as long behind such
steps; an engine within the caller's process spins, and takes the interpreter from the loads."""


@dataclass
class _Load:
    """A request's load in flight.

    Attributes:
        job: what was asked for.
        handles: of its groups' transfers.
        error: why it could not be begun, empty if it was.
    """

    job: LoadJob
    handles: list[Transfer] = field(default_factory=list)
    error: str = ""

    def done(self) -> bool:
        """Whether all of it has ended."""
        return all(handle.done() for handle in self.handles)

    def verdict(self) -> str:
        """Return why it failed, empty if it did not. Waits until no page is touched any more."""
        reasons = [self.error] if self.error else []
        for handle in self.handles:
            try:
                handle.result()
            except TransferFailed as error:
                reasons.append(str(error))
        return "; ".join(reasons)


class WorkerLoads:
    """The loads of one worker. For the model runner's thread alone."""

    def __init__(
        self,
        linkers: Mapping[int, Linker],
        layers: Mapping[str, tuple[int, int]],
        *,
        by_layer: bool,
    ) -> None:
        """Begin without any.

        Args:
            linkers: by group.
            layers: vLLM's name of a layer to its group and number.
            by_layer: whether a load runs within the step that needs it, layer by layer.
        """
        self._linkers = linkers
        self._layers = layers
        self._by_layer = by_layer
        self._loads: dict[str, _Load] = {}
        self._within_step: list[tuple[int, LayerLoad]] = []
        self._is_idle = False  # whether the step at hand computes nothing

    def begin(self, jobs: StepJobs) -> None:
        """Begin a step's loads, ordered behind what the current stream has been given so far."""
        self._is_idle = jobs.is_idle
        batches: dict[int, list[tuple[_Load, GroupPages]]] = {}
        for job in jobs.loads:
            load = self._loads[job.request_id] = _Load(job, error=job.error)
            for group_id, pages in job.pages.items():
                if not job.error and group_id in self._linkers:  # else none of it is on this stage
                    batches.setdefault(group_id, []).append((load, pages))
        jobs.loads = []  # begun once, however often this is called
        for group_id, batch in batches.items():
            if self._by_layer:
                self._begin_layers(group_id, batch)
            else:
                self._begin_whole(group_id, batch)

    def _begin_whole(self, group_id: int, batch: Sequence[tuple[_Load, GroupPages]]) -> None:
        for load, pages in batch:
            try:
                load.handles.append(self._linkers[group_id].load(pages.keys, pages.block_ids))
            except KVFerryError as error:
                load.error = str(error)

    def _begin_layers(self, group_id: int, batch: Sequence[tuple[_Load, GroupPages]]) -> None:
        requests = [LoadRequest(pages.keys, pages.block_ids) for _, pages in batch]
        try:
            begun = self._linkers[group_id].load_batch(requests).start()
        except KVFerryError as error:
            for load, _ in batch:
                load.error = str(error)
            return
        self._within_step.append((group_id, begun))
        for (load, _), handle in zip(batch, begun.transfers, strict=True):
            load.handles.append(handle)

    def wait_for_layer(self, layer_name: str) -> None:
        """Hold the step until a layer's pages may be read; a failure raises nothing."""
        group_id, layer = self._layers.get(layer_name, (-1, -1))
        for of_group, load in self._within_step:
            if of_group == group_id:
                load.wait_layer(layer)

    def take_ended(self) -> LoadsEnded:
        """Return the loads that have ended, and forget them.

        Loads within this step are waited for: the step must not go on with what failed. In a step
        that computes nothing, those between steps are, for `IDLE_WAIT_S`.
        """
        result = LoadsEnded()
        if self._is_idle and self._loads and not self._by_layer:
            self._wait_idly()
        for name in [name for name, load in self._loads.items() if self._by_layer or load.done()]:
            load = self._loads.pop(name)
            result.ended.add(name)
            reason = load.verdict()
            if reason:
                log.warning("load of %s failed: %s", name, reason)
                result.failed.add(name)
                for pages in load.job.pages.values():
                    result.failed_blocks.update(pages.block_ids)
        self._within_step.clear()
        return result

    def _wait_idly(self) -> None:
        """Wait a little for the oldest load that has not ended, unless another has."""
        if any(load.done() for load in self._loads.values()):
            return
        oldest = next(iter(self._loads.values()))
        until_s = time.monotonic() + IDLE_WAIT_S
        for handle in oldest.handles:
            handle.wait(max(0.0, until_s - time.monotonic()))

    def cancel(self) -> None:
        """Give all of them up; their pages are not touched any more."""
        for load in self._loads.values():
            for handle in load.handles:
                handle.cancel()

    def forget(self) -> LoadsEnded:
        """Forget all of them; return them as failed."""
        names = set(self._loads)
        blocks = {
            block
            for load in self._loads.values()
            for pages in load.job.pages.values()
            for block in pages.block_ids
        }
        self._loads.clear()
        self._within_step.clear()
        return LoadsEnded(names, set(names), blocks)
