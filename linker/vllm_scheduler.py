"""The scheduler's side of vLLM's connector: what could be loaded, what is loaded, what is saved.

It holds no tensors and moves no bytes.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import KVFerryError
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.store import Store
from kvferry.linker.vllm_generation import Generation
from kvferry.linker.vllm_groups import Prefixes, RankKeys
from kvferry.linker.vllm_held import Chosen, HeldBlocks
from kvferry.linker.vllm_jobs import GroupPages, LoadJob, SaveJob, StepJobs
from kvferry.linker.vllm_load_plan import load_job
from kvferry.linker.vllm_pools import NULL_BLOCK_ID

log = logging.getLogger(__name__)

LOOK_BACK_BLOCKS = 64
"""Blocks that had no hash yet are looked at again for so long: vLLM hashes some a step or two late,
and others, that it will not keep, never."""

UNDECIDED_S = 2.0
"""For so long behind a reset requests wait for the workers to look at their weights."""


@dataclass
class _Known:
    """A request that vLLM has not finished.

    Attributes:
        request: vLLM's own; its hashes grow.
        num_seen: by group, leading blocks that need no further look.
    """

    request: Any
    num_seen: Counter[int] = field(default_factory=Counter)


class SchedulerSide:
    """One engine's plan of transfers. For the scheduler's thread alone.

    Attributes:
        prefixes: which prefixes can be restored.
        held: blocks that saves read, and how far the saves have come.
        generation: of the weights that the engine serves.
        num_postponed: times that a block was not saved in a step, since saves in flight held too
            many already; it is looked at again in the request's next step.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        store: Store,
        *,
        num_workers: int,
        by_boundary: Collection[int],
        loads_by_layer: bool,
        lookup_ttl_s: float,
        miss_ttl_s: float,
        min_load_tokens: int,
        max_held_share: float,
        generation: str,
        hash_of: Callable[[Any], bytes | None],
    ) -> None:
        """Begin without any request.

        Args:
            prefixes: which prefixes can be restored.
            store: asked whether objects exist.
            num_workers: that must have ended a save before its blocks are free.
            by_boundary: groups whose blocks vLLM hands over one by one, as their place in a
                request's block table says nothing.
            loads_by_layer: whether loads run within the step that needs them. What such a step
                computes is saved once all its loads are known to be good.
            lookup_ttl_s: how long an answer of the store is remembered.
            miss_ttl_s: how long what failed to load counts as missing.
            min_load_tokens: shorter hits are computed instead.
            max_held_share: of all blocks, what saves in flight may hold.
            generation: of the weights, set by hand; empty if it was not.
            hash_of: the hash that one of vLLM's blocks is kept under; None if under none.
        """
        self.num_postponed = 0
        self.prefixes = prefixes
        self.generation = Generation(generation)
        self._num_workers = num_workers
        self._ranks: list[RankKeys] = []  # that have told of this generation
        self._undecided_until_s = 0.0
        self.held = HeldBlocks(num_workers, max_held_share)
        self._store = store
        self._by_boundary = frozenset(by_boundary)
        self._ttls = (lookup_ttl_s, miss_ttl_s)
        self._existence = ExistenceCache(*self._ttls)
        self._min_load_tokens = min_load_tokens
        self._hash_of = hash_of
        self._known: dict[str, _Known] = {}
        self._computed: dict[str, int] = {}  # what a lookup was told to be there already
        self._loads_by_layer = loads_by_layer
        self._loads: list[LoadJob] = []
        self._in_flight: dict[str, LoadJob] = {}
        self._delayed: list[SaveJob] = []
        self._pool: Any = None
        self._table_of: Callable[[str], Sequence[Sequence[int]]] | None = None

    def bind(self, pool: Any, table_of: Callable[[str], Sequence[Sequence[int]]]) -> None:
        """Take vLLM's block pool, and what returns a request's block table by group."""
        self._pool, self._table_of = pool, table_of
        self.held.bind(pool)

    # ---- loads ----

    def matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens behind `num_computed` could be loaded now; None: ask again.

        May be asked again and again; that changes nothing.
        """
        self._computed[request.request_id] = num_computed
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if not self.prefixes.is_ready:
            return None if time.monotonic() < self._undecided_until_s else 0
        if num_computed % self.prefixes.align_tokens:
            return 0  # a load begins and ends with whole blocks of every group
        # The last token is computed in any case: its logits are wanted.
        asked = self.prefixes.questions(request.block_hashes, num_computed, request.num_tokens - 1)
        if not asked.keys:
            return 0
        try:
            exists = self._existence.ask(self._store, asked.keys)
        except KVFerryError as error:
            log.debug("lookup of %s: %s", request.request_id, error)
            return 0
        found = asked.longest(exists) - num_computed
        return found if found >= max(1, self._min_load_tokens) else 0

    def allocated(self, request: Any, table: Sequence[Sequence[int]], num_external: int) -> None:
        """Note a request; plan its load if there are external tokens.

        Args:
            request: vLLM's.
            table: its block table, by group.
            num_external: tokens to be loaded, behind those that a lookup was told to be there.
        """
        known = self._known.setdefault(request.request_id, _Known(request))
        known.request = request
        first = self._computed.pop(request.request_id, 0)
        if not num_external:
            return
        end = first + num_external
        for group in self.prefixes.groups:
            known.num_seen[group.group_id] = end // group.block_tokens
        load = load_job(self.prefixes, request, table, first, end)
        if load.error:
            log.error("load of %s: %s", request.request_id, load.error)
        self._in_flight[request.request_id] = load
        self._loads.append(load)

    # ---- steps ----

    def step(
        self,
        num_scheduled: Mapping[str, int],
        preempted: Iterable[str],
        boundaries: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> StepJobs:
        """Return what this step's workers are to load and save.

        Args:
            num_scheduled: request id to the tokens that this step computes.
            preempted: requests that have lost their blocks.
            boundaries: request id to `(group, block, tokens)`: blocks that hold the state behind so
                many tokens.
        """
        gone = set(preempted)
        for request_id in gone & self._known.keys():
            self._known[request_id].num_seen.clear()
        loads, self._loads = self._loads, []
        chosen = Chosen(self.held.room)
        if self._pool is not None and self._table_of is not None:
            for request_id, num_tokens in num_scheduled.items():
                known = self._known.get(request_id)
                if known is not None and request_id not in gone:
                    self._choose(known, self._table_of(request_id), num_tokens, chosen)
            for request_id, offers in boundaries.items():
                known = self._known.get(request_id)
                if known is not None and request_id not in gone:
                    self._choose_states(known.request, offers, chosen)
        save = self._save_of(chosen)
        saves = [save] if save else []
        if self._loads_by_layer:
            saves = self._delay(saves)
        return StepJobs(loads, saves, is_idle=not num_scheduled, generation=self.generation.current)

    def _delay(self, saves: list[SaveJob]) -> list[SaveJob]:
        """Return the saves that may begin: none while a load within a step may have failed.

        What is computed behind a failed load is rubbish until vLLM has computed it again, and other
        ranks that have loaded well do not know. Nobody may find it under a good key.
        """
        self._delayed += saves
        if self._in_flight:
            return []
        saves, self._delayed = self._delayed, []
        return saves

    def _choose(
        self,
        known: _Known,
        table: Sequence[Sequence[int]],
        num_tokens: int,
        chosen: Chosen,
    ) -> None:
        """Choose the blocks of a request that will be whole once this step has run."""
        request = known.request
        num_ready = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        hash_tokens = self.prefixes.hash_tokens
        for group in self.prefixes.groups:
            if group.group_id in self._by_boundary:
                continue
            ids, per_block = table[group.group_id], group.block_tokens // hash_tokens
            end = min(len(ids), num_ready // group.block_tokens)
            end = min(end, len(request.block_hashes) // per_block)
            for at in range(known.num_seen[group.group_id], end):
                block = self._pool.blocks[ids[at]]
                wanted = request.block_hashes[(at + 1) * per_block - 1]
                # Blocks out of the window are the null block; some hashes are of parts of a block.
                if ids[at] == NULL_BLOCK_ID or self._hash_of(block) != wanted:
                    continue
                if not chosen.add(group.group_id, wanted.hex(), block):
                    self.num_postponed += end - at
                    return  # the rest of the prefix is of no use without this block
                known.num_seen[group.group_id] = at + 1
            known.num_seen[group.group_id] = max(
                known.num_seen[group.group_id], end - LOOK_BACK_BLOCKS
            )

    def _choose_states(
        self,
        request: Any,
        offers: Sequence[tuple[int, int, int]],
        chosen: Chosen,
    ) -> None:
        sizes = {group.group_id: group.block_tokens for group in self.prefixes.groups}
        for group_id, block_id, num_tokens in offers:
            at = num_tokens // self.prefixes.hash_tokens - 1
            if num_tokens % sizes.get(group_id, num_tokens + 1) or at >= len(request.block_hashes):
                continue  # inside a block: no page of its own
            block, wanted = self._pool.blocks[block_id], request.block_hashes[at]
            if block_id == NULL_BLOCK_ID or self._hash_of(block) != wanted:
                continue
            if not chosen.add(group_id, wanted.hex(), block):
                log.debug("state of %d tokens not saved: too many blocks are held", num_tokens)

    def _save_of(self, chosen: Chosen) -> SaveJob | None:
        """Make a save of blocks, and hold them; None if there are none."""
        blocks = [block for group in chosen.groups.values() for block in group.values()]
        if not blocks:
            return None
        pages = {
            group_id: GroupPages(list(group), [block.block_id for block in group.values()])
            for group_id, group in chosen.groups.items()
            if group
        }
        return SaveJob(self.held.hold(blocks), pages)

    # ---- what came of it ----

    def loads_ended(self, ended: Iterable[str], failed: Collection[str]) -> None:
        """Note loads that have ended; what failed counts as missing for a while."""
        for request_id in {*ended, *failed}:
            # vLLM may have finished the request already: what failed is remembered all the same.
            load = self._in_flight.pop(request_id, None)
            if load is None or request_id not in failed:
                continue
            if request_id in self._known:
                self._known[request_id].num_seen.clear()
            for group in self.prefixes.groups:
                if group.group_id in load.pages:
                    pages = load.pages[group.group_id].keys
                    for keys in self.prefixes.object_keys(group, pages):
                        self._existence.mark_failed(keys)
            if self._loads_by_layer:
                self._drop_delayed()

    def _drop_delayed(self) -> None:
        """Save nothing of steps whose loads failed; look at all blocks again."""
        for save in self._delayed:
            self.held.drop(save.number)
        self._delayed.clear()
        for known in self._known.values():
            known.num_seen.clear()

    def finished(self, request_id: str) -> None:
        """Forget a request; its blocks stay held where a save reads them."""
        self._known.pop(request_id, None)
        self._computed.pop(request_id, None)

    # ---- generations ----

    def learn(self, ranks: Sequence[RankKeys]) -> None:
        """Take the keys of all ranks, at the start and whenever they wake up.

        Ranks that slept while a generation ended tell of the old one: they are told with the next
        step, and tell anew.
        """
        self._ranks = []
        self.learn_more(ranks)

    def learn_more(self, ranks: Iterable[RankKeys]) -> None:
        """Take the keys of some ranks; once those of all are known, prefixes can be found."""
        self._ranks += [keys for keys in ranks if keys.generation == self.generation.current]
        if len(self._ranks) < self._num_workers:
            return
        if self.generation.decide([keys.weights for keys in self._ranks]):
            self.prefixes.learn([keys.groups for keys in self._ranks])
        else:  # with the next step the ranks hear of it, and tell anew
            self._ranks = []

    def reset(self) -> None:
        """Find nothing until the workers have looked at their weights; see `Generation`.

        Nothing is deleted: others may use it. Saves in flight end under the keys that they have.
        """
        self._existence = ExistenceCache(*self._ttls)
        if not self.generation.renew():
            return
        self._ranks = []
        self._undecided_until_s = time.monotonic() + UNDECIDED_S
        self.prefixes.learn([])
        self._drop_delayed()
        # Requests that run on stand on what the old weights computed. What vLLM begins anew, it
        # allocates anew.
        self._known.clear()
