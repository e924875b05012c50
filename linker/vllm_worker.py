"""The worker's side of vLLM's connector: a linker for each cache group, transfers in flight.

vLLM's groups lie over each other in memory and have a layout each, so each has a linker: its own
part of the staging memory, its own threads. They share the store.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from kvferry.errors import KVFerryError, TransferFailed
from kvferry.linker.config import LinkerConfig
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.linker import Linker
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.transfer import Transfer
from kvferry.linker.vllm_groups import GroupKeys
from kvferry.linker.vllm_jobs import GroupPages, LoadJob, LoadsEnded, SaveJob, StepJobs
from kvferry.linker.vllm_pools import VllmGroup, VllmPools

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 30.0

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


class WorkerSide:
    """The transfers of one worker. For the model runner's thread alone.

    Attributes:
        linkers: by group.
    """

    def __init__(
        self,
        pools: VllmPools,
        store: Store,
        config: LinkerConfig,
        staging_of: Callable[[int, torch.device], StagingBuffer],
        staging_bytes: int,
        *,
        loads_by_layer: bool,
        saves_by_layer: bool,
    ) -> None:
        """Make a linker for each group and start their threads.

        Args:
            pools: vLLM's groups.
            store: connected; the caller closes it after this.
            config: of all linkers; which spaces are replicated comes from the groups.
            staging_of: makes a staging buffer of so many bytes.
            staging_bytes: for all groups, which share it out by the size of their pages.
            loads_by_layer: whether a load runs within the step that needs it, layer by layer; for
                models of one group.
            saves_by_layer: whether a save begins with the step's first layer.

        Raises:
            ArgumentError, StoreError: as `Linker`.
        """
        self._groups: dict[int, VllmGroup] = {group.group_id: group for group in pools.groups}
        self._loads_by_layer = loads_by_layer
        self._saves_by_layer = saves_by_layer
        self._loads: dict[str, _Load] = {}
        self._saves: dict[int, list[Transfer]] = {}
        self._on_the_wire: dict[int, list[Transfer]] = {}
        self._layer_loads: list[tuple[VllmGroup, LayerLoad]] = []
        self._layer_saves: list[tuple[VllmGroup, LayerSave]] = []
        self._last_save = 0
        self._is_idle = False  # whether the step at hand computes nothing
        self._layers = {
            name: (group.group_id, layer)
            for group in pools.groups
            for name, layer in group.layer_ids.items()
        }
        self.linkers: dict[int, Linker] = {}
        with ExitStack() as undo:
            for group, num_bytes in _shares(pools.groups, staging_bytes):
                assert group.layout.device is not None
                spaces = frozenset({group.space} if group.replicated else ())
                linker = Linker(
                    group.layout,
                    store,
                    staging_of(num_bytes, group.layout.device),
                    replace(config, replicated=spaces),
                )
                undo.callback(linker.close, 0.0)
                self.linkers[group.group_id] = linker
            undo.pop_all()

    def group_keys(self) -> dict[int, GroupKeys]:
        """Return what this rank's object keys are made of, for the scheduler."""
        return {
            group_id: GroupKeys.of(
                self.linkers[group_id].keys, group.space, group.layout.window_pages
            )
            for group_id, group in self._groups.items()
        }

    # ---- loads ----

    def begin_loads(self, jobs: StepJobs) -> None:
        """Begin a step's loads, ordered behind what the current stream has been given so far."""
        self._is_idle = jobs.is_idle
        batches: dict[int, list[tuple[_Load, GroupPages]]] = {}
        for job in jobs.loads:
            load = self._loads[job.request_id] = _Load(job, error=job.error)
            for group_id, pages in job.pages.items():
                if (
                    not job.error and group_id in self._groups
                ):  # else none of its layers is on this stage
                    batches.setdefault(group_id, []).append((load, pages))
        jobs.loads = []  # begun once, however often this is called
        for group_id, batch in batches.items():
            if self._loads_by_layer:
                self._begin_layers(group_id, batch)
            else:
                self._begin_whole(group_id, batch)

    def _begin_whole(self, group_id: int, batch: Sequence[tuple[_Load, GroupPages]]) -> None:
        for load, pages in batch:
            try:
                load.handles.append(self.linkers[group_id].load(pages.keys, pages.block_ids))
            except KVFerryError as error:
                load.error = str(error)

    def _begin_layers(self, group_id: int, batch: Sequence[tuple[_Load, GroupPages]]) -> None:
        requests = [LoadRequest(pages.keys, pages.block_ids) for _, pages in batch]
        try:
            begun = self.linkers[group_id].load_batch(requests).start()
        except KVFerryError as error:
            for load, _ in batch:
                load.error = str(error)
            return
        self._layer_loads.append((self._groups[group_id], begun))
        for (load, _), handle in zip(batch, begun.transfers, strict=True):
            load.handles.append(handle)

    def wait_for_layer(self, layer_name: str) -> None:
        """Hold the step until a layer's pages may be read; a failure raises nothing."""
        group_id, layer = self._layers.get(layer_name, (-1, -1))
        for group, load in self._layer_loads:
            if group.group_id == group_id:
                load.wait_layer(layer)

    def take_ended_loads(self) -> LoadsEnded:
        """Return the loads that have ended, and forget them.

        Loads within this step are waited for: the step must not go on with what failed. In a step
        that computes nothing, those between steps are, for `IDLE_WAIT_S`.
        """
        result = LoadsEnded()
        if self._is_idle and self._loads and not self._loads_by_layer:
            self._wait_idly()
        for name in [
            name for name, load in self._loads.items() if self._loads_by_layer or load.done()
        ]:
            load = self._loads.pop(name)
            result.ended.add(name)
            reason = load.verdict()
            if reason:
                log.warning("load of %s failed: %s", name, reason)
                result.failed.add(name)
                for pages in load.job.pages.values():
                    result.failed_blocks.update(pages.block_ids)
        self._layer_loads.clear()
        return result

    def _wait_idly(self) -> None:
        """Wait a little for the oldest load that has not ended, unless another has."""
        if any(load.done() for load in self._loads.values()):
            return
        oldest = next(iter(self._loads.values()))
        until_s = time.monotonic() + IDLE_WAIT_S
        for handle in oldest.handles:
            handle.wait(max(0.0, until_s - time.monotonic()))

    # ---- saves ----

    def begin_layer_saves(self, jobs: StepJobs) -> None:
        """Begin a step's saves before its first layer, where saves go by layer."""
        if self._saves_by_layer:
            self._begin_saves(jobs)

    def layer_written(self, layer_name: str) -> None:
        """Say that the current stream has been given all that writes one of vLLM's caches.

        A layer may have several, index keys beside latents, and only the first of the next layer
        tells that all of its are written. The last layer's are once the step has run.
        """
        group_id, layer = self._layers.get(layer_name, (-1, -1))
        for group, save in self._layer_saves:
            if group.group_id == group_id and layer > 0:
                save.layer_written(layer - 1)

    def begin_saves(self, jobs: StepJobs) -> None:
        """Begin a step's saves, or their last part; the step's work is in the current stream."""
        self._begin_saves(jobs)
        for _, save in self._layer_saves:
            save.all_written()
        self._layer_saves.clear()

    def _begin_saves(self, jobs: StepJobs) -> None:
        for job in jobs.saves:
            if job.number > self._last_save:  # else begun already
                self._last_save = job.number
                self._begin_save(job)

    def _begin_save(self, job: SaveJob) -> None:
        begun = self._saves[job.number] = []
        for group_id, pages in job.pages.items():
            if group_id not in self._groups:
                continue
            linker = self.linkers[group_id]
            try:
                if self._saves_by_layer:
                    save = linker.save(pages.keys, pages.block_ids, layerwise=True)
                    self._layer_saves.append((self._groups[group_id], save))
                    begun.append(save)
                else:
                    begun.append(linker.save(pages.keys, pages.block_ids))
            except KVFerryError as error:
                log.warning("save of %d pages refused: %s", len(pages.keys), error)

    def take_ended_saves(self) -> tuple[Counter[int], Counter[int]]:
        """Return the saves that read no block any more, and those that have ended, by number.

        In between they are on the wire. Failures are written down.
        """
        ended = [
            number
            for number, saves in self._saves.items()
            if all(save.wait_packed(0.0) for save in saves)
        ]
        for number in ended:
            self._on_the_wire[number] = self._saves.pop(number)
        stored = [
            number
            for number, saves in self._on_the_wire.items()
            if all(save.done() for save in saves)
        ]
        for number in stored:
            for save in self._on_the_wire.pop(number):
                _report(save)
        return Counter(ended), Counter(stored)

    @property
    def num_saves_in_flight(self) -> int:
        """Saves of groups that are not in the store yet."""
        begun = (*self._on_the_wire.values(), *self._saves.values())
        return sum(not save.done() for saves in begun for save in saves)

    # ---- the end ----

    def close(self) -> tuple[Counter[int], Counter[int], LoadsEnded]:
        """End all transfers and threads.

        Returns:
            What the scheduler has yet to hear of: saves, which read no block any more, saves that
            have ended, and loads, all of which count as failed.

        Raises:
            TransferFailed: a thread is still inside a store call.
        """
        for saves in (*self._saves.values(), *self._on_the_wire.values()):
            for save in saves:
                save.cancel()
        for load in self._loads.values():
            for handle in load.handles:
                handle.cancel()
        with ExitStack() as each:
            for linker in self.linkers.values():
                each.callback(linker.close, CLOSE_LIMIT_S)
        names = set(self._loads)
        blocks = {
            block
            for load in self._loads.values()
            for pages in load.job.pages.values()
            for block in pages.block_ids
        }
        ended = Counter(list(self._saves))
        stored = Counter([*self._saves, *self._on_the_wire])
        self._loads.clear()
        self._saves.clear()
        self._on_the_wire.clear()
        return ended, stored, LoadsEnded(names, set(names), blocks)


def _report(save: Transfer) -> None:
    """Write down why a save, or objects of it, failed: the next that needs them computes them."""
    try:
        failures = save.result(0.0).failures
    except TransferFailed as error:
        log.warning("save failed: %s", error)
        return
    if failures:
        key, reason = next(iter(failures.items()))
        log.warning("%d objects were not stored, the first %s: %s", len(failures), key, reason)


def _shares(groups: Sequence[VllmGroup], staging_bytes: int) -> Iterator[tuple[VllmGroup, int]]:
    """Share staging out over the groups, by the size of their pages."""
    sizes = [group.layout.object_bytes[group.space] for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        yield group, staging_bytes * size // sum(sizes)
