"""The worker's side of vLLM's connector: a linker for each cache group, loads and saves over them.

vLLM's groups lie over each other in memory and have a layout each, so each has a linker: its own
part of the staging memory, its own threads. They share the store.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.vllm_groups import GroupKeys
from kvferry.linker.vllm_jobs import LoadsEnded
from kvferry.linker.vllm_loads import WorkerLoads
from kvferry.linker.vllm_pools import VllmGroup, VllmPools
from kvferry.linker.vllm_saves import WorkerSaves

CLOSE_LIMIT_S = 30.0


class WorkerSide:
    """The transfers of one worker. For the model runner's thread alone.

    Attributes:
        linkers: by group.
        loads: of all of them.
        saves: of all of them.
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
        self.linkers: dict[int, Linker] = {}
        layers = {
            name: (group.group_id, layer)
            for group in pools.groups
            for name, layer in group.layer_ids.items()
        }
        self.loads = WorkerLoads(self.linkers, layers, by_layer=loads_by_layer)
        self.saves = WorkerSaves(self.linkers, layers, by_layer=saves_by_layer)
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

    def renew(self, generation: str) -> None:
        """Go over to another generation of the weights, for what begins from now on."""
        for linker in self.linkers.values():
            linker.renew(generation)

    def group_keys(self) -> dict[int, GroupKeys]:
        """Return what this rank's object keys are made of, for the scheduler."""
        return {
            group_id: GroupKeys.of(
                self.linkers[group_id].keys, group.space, group.layout.window_pages
            )
            for group_id, group in self._groups.items()
        }

    def close(self) -> tuple[Counter[int], Counter[int], LoadsEnded]:
        """End all transfers and threads.

        Returns:
            What the scheduler has yet to hear of: saves, which read no block any more, saves that
            have ended, and loads, all of which count as failed.

        Raises:
            TransferFailed: a thread is still inside a store call. All others have ended; another
                call tries again.
        """
        self.saves.cancel()
        self.loads.cancel()
        with ExitStack() as each:  # all of them, whatever one of them raises
            for linker in self.linkers.values():
                each.callback(linker.close, CLOSE_LIMIT_S)
        return (*self.saves.forget(), self.loads.forget())


def _shares(groups: Sequence[VllmGroup], staging_bytes: int) -> Iterator[tuple[VllmGroup, int]]:
    """Share staging out over the groups, by the size of their pages."""
    sizes = [group.layout.object_bytes[group.space] for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        yield group, staging_bytes * size // sum(sizes)
