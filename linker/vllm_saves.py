"""A worker's saves for vLLM: begun behind a step or layer by layer, until they are in the store."""

import logging
from collections import Counter
from collections.abc import Mapping

from kvferry.arguments import shown
from kvferry.errors import KVFerryError, TransferFailed
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.linker import Linker
from kvferry.linker.transfer import Transfer
from kvferry.linker.vllm_jobs import SaveJob, StepJobs

log = logging.getLogger(__name__)


class WorkerSaves:
    """The saves of one worker. For the model runner's thread alone."""

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
            by_layer: whether a save begins with the step's first layer.
        """
        self._linkers = linkers
        self._layers = layers
        self._by_layer = by_layer
        self._reading: dict[int, list[Transfer]] = {}  # the pools
        self._on_the_wire: dict[int, list[Transfer]] = {}
        self._within_step: list[tuple[int, LayerSave]] = []
        self._last = 0

    def begin_by_layer(self, jobs: StepJobs) -> None:
        """Begin a step's saves before its first layer, where saves go by layer."""
        if self._by_layer:
            self._begin_new(jobs)

    def layer_written(self, layer_name: str) -> None:
        """Say that the current stream has been given all that writes one of vLLM's caches.

        A layer may have several, index keys beside latents, and only the first of the next layer
        tells that all of its are written. The last layer's are once the step has run.
        """
        group_id, layer = self._layers.get(layer_name, (-1, -1))
        for of_group, save in self._within_step:
            if of_group == group_id and layer > 0:
                save.layer_written(layer - 1)

    def begin(self, jobs: StepJobs) -> None:
        """Begin a step's saves, or their last part; the step's work is in the current stream."""
        self._begin_new(jobs)
        for _, save in self._within_step:
            save.all_written()
        self._within_step.clear()

    def _begin_new(self, jobs: StepJobs) -> None:
        for job in jobs.saves:
            if job.number > self._last:  # else begun already
                self._last = job.number
                self._begin_save(job)

    def _begin_save(self, job: SaveJob) -> None:
        begun = self._reading[job.number] = []
        for group_id, pages in job.pages.items():
            if group_id not in self._linkers:
                continue
            linker = self._linkers[group_id]
            try:
                if self._by_layer:
                    save = linker.save(pages.keys, pages.block_ids, layerwise=True)
                    self._within_step.append((group_id, save))
                    begun.append(save)
                else:
                    begun.append(linker.save(pages.keys, pages.block_ids))
            except KVFerryError as error:
                log.warning("save of %d pages refused: %s", len(pages.keys), error)

    def take_ended(self) -> tuple[Counter[int], Counter[int]]:
        """Return the saves that read no block any more, and those that have ended, by number.

        In between they are on the wire. Failures are written down.
        """
        ended = [
            number
            for number, saves in self._reading.items()
            if all(save.wait_packed(0.0) for save in saves)
        ]
        for number in ended:
            self._on_the_wire[number] = self._reading.pop(number)
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
    def num_in_flight(self) -> int:
        """Saves of groups that are not in the store yet."""
        begun = (*self._on_the_wire.values(), *self._reading.values())
        return sum(not save.done() for saves in begun for save in saves)

    def cancel(self) -> None:
        """Give all of them up; no block is read any more."""
        for saves in (*self._reading.values(), *self._on_the_wire.values()):
            for save in saves:
                save.cancel()

    def forget(self) -> tuple[Counter[int], Counter[int]]:
        """Forget all of them; return, as `take_ended`, what has yet to be told."""
        ended = Counter(list(self._reading))
        stored = Counter([*self._reading, *self._on_the_wire])
        self._reading.clear()
        self._on_the_wire.clear()
        self._within_step.clear()
        return ended, stored


def _report(save: Transfer) -> None:
    """Write down why a save, or objects of it, failed: the next that needs them computes them."""
    try:
        failures = save.result(0.0).failures
    except TransferFailed as error:
        log.warning("save failed: %s", error)
        return
    if failures:
        key, reason = next(iter(failures.items()))
        log.warning(
            "%d objects were not stored, the first %s: %s", len(failures), shown(key), reason
        )
