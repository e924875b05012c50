"""vLLM's KV connector: the contract of 0.32 and 0.33, for every cache that kvferry can describe.

vLLM loads this by `{"kv_connector": "KVFerryConnector", "kv_connector_module_path":
"kvferry.linker.vllm", "kv_role": "kv_both"}`. Besides, `vllm_setup` and `vllm_messages` import it.
One instance plans, in the scheduler; one in each worker moves bytes; what they say to each other is
plain data. It is a cache: what fails is computed again, and nothing is ever owed to anybody.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.errors import KVFerryError
from kvferry.linker.home import Home, stays_home
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.mooncake_config import MooncakeConfig
from kvferry.linker.vllm_groups import RankKeys, read_groups
from kvferry.linker.vllm_jobs import LoadsEnded, StepJobs
from kvferry.linker.vllm_messages import (
    KVFerryHandshake,
    KVFerryMetadata,
    KVFerryPromMetrics,
    KVFerryStats,
    KVFerryWorkerMetadata,
)
from kvferry.linker.vllm_scheduler import SchedulerSide
from kvferry.linker.vllm_settings import read_connector_config, read_settings
from kvferry.linker.vllm_setup import check_config, log_as_vllm, scheduler_side, worker_side
from kvferry.linker.vllm_stats import since, totals
from kvferry.linker.vllm_weights import Weights
from kvferry.linker.vllm_worker import CLOSE_LIMIT_S, WorkerSide

log = logging.getLogger(__name__)


@stays_home
class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's prefix cache in Mooncake Store, as packed pages."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any, **others: Any
    ) -> None:
        """Connect to Mooncake; on a worker the rest waits for `register_kv_caches`.

        Raises:
            ArgumentError: a setting is wrong, or prefix caching is off.
            LayoutError: a kind of cache that is not described.
            StoreError: Mooncake cannot be reached.
        """
        self._home = Home("the connector")
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm(logging.getLogger("kvferry"), logging.getLogger("vllm"))
        if others:
            log.warning("arguments %s are unknown here and not used", sorted(others))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = read_settings(extra)
        self._config = kv_cache_config
        groups = read_groups(
            kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size
        )
        self._by_layer = self._settings.connector.loads == "layerwise"
        check_config(vllm_config, kv_cache_config, by_layer=self._by_layer)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._caches: dict[str, torch.Tensor] = {}
        self._counted: dict[str, float] = {}
        self._ended = LoadsEnded()  # within this step
        self._untold = LoadsEnded()  # within steps that the scheduler has yet to hear of
        self._left_loads = LoadsEnded()  # of a worker's side that went to sleep
        self._left_saves: Counter[int] = Counter()
        self._left_stored: Counter[int] = Counter()
        self._generation = self._settings.connector.generation  # of a worker's keys
        self._untold_keys: list[RankKeys] = []
        self._weights = Weights()
        self._is_closed = False
        self._store = MooncakeStore(self._store_config(role))
        if role == KVConnectorRole.SCHEDULER:
            try:
                self._scheduler = scheduler_side(
                    vllm_config, kv_cache_config, groups, self._settings, self._store
                )
            except BaseException:
                self._store.close(CLOSE_LIMIT_S)
                raise

    # ---- what vLLM asks of the class ----

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only where transfers go layer by layer, by calls that a full graph leaves out."""
        return read_connector_config(extra_config).by_layer

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Return counters from their plain form."""
        return KVFerryStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        """Return the counters for Prometheus."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- the scheduler ----

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVFerryHandshake]
    ) -> None:
        """Take what the object keys of all workers are made of; only then is anything found."""
        self._plan.learn([metadata[rank].keys for rank in sorted(metadata)])

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVFerryHandshake]) -> None:
        """As above, where there are no pipeline stages."""
        self._plan.learn([metadata[rank].keys for rank in sorted(metadata)])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block tables and its pool of blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._plan.bind(kv_cache_manager.block_pool, kv_cache_manager.get_block_ids)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens could be loaded, and whether between steps."""
        found = self._plan.matched_tokens(request, num_computed_tokens)
        return found, bool(found) and not self._by_layer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a request's load."""
        self._plan.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFerryMetadata:
        """Return the step's loads and saves."""
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        return KVFerryMetadata(
            self._plan.step(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.preempted_req_ids or (),
                {} if state is None else state.boundary_state_offloads,
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers say has ended."""
        self._plan.loads_ended(
            connector_output.finished_recving or (), connector_output.failed_recving or set()
        )
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KVFerryWorkerMetadata):
            self._plan.held.saves_ended(told.saves)
            self._plan.held.saves_stored(told.stored)
            self._plan.loads_ended(told.loads.ended, told.loads.failed)
            self._plan.learn_more(told.keys)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; vLLM may free its blocks."""
        self._plan.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; vLLM may free its blocks."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Whether steps must go on for saves to come to their end."""
        return self._plan.held.num_unstored > 0

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free so soon that no request need be preempted for them."""
        return self._plan.held.come_free_soon

    def reset_cache(self) -> bool | None:
        """Find nothing more until the weights have been looked at; see `Generation`."""
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    # ---- the workers ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the caches, allocate staging, register it, start the threads."""
        self._caches = dict(kv_caches)
        self._weights.find()
        self.restore_kv_caches()

    def unregister_kv_caches(self) -> None:
        """End all transfers and threads, before the caches go to sleep. Idempotent."""
        if self._worker is not None:
            saves, stored, loads = self._worker.close()
            self._left_saves += saves
            self._left_stored += stored
            self._left_loads = self._left_loads.and_also(loads)
            self._worker = None

    def restore_kv_caches(self) -> None:
        """Describe the caches again, once they are awake. Idempotent."""
        if self._worker is not None:
            return
        self._worker = worker_side(
            self._vllm_config,
            self._config,
            self._caches,
            self._settings,
            self._store,
            self._generation,
        )
        self._counted = {}

    def get_handshake_metadata(self) -> KVFerryHandshake | None:
        """Return what the scheduler needs to know of this worker's keys."""
        keys = self._rank_keys()
        return None if keys is None else KVFerryHandshake(keys)

    def _rank_keys(self) -> RankKeys | None:
        if self._worker is None:
            return None
        return RankKeys(self._generation, self._worker.group_keys(), self._weights.digest)

    def _go_over_to(self, generation: str) -> None:
        """Make keys for another generation from now on, and tell the scheduler's side of them."""
        if generation == self._generation:
            return
        self._generation = generation
        self._weights.look()
        if self._worker is not None:
            self._worker.renew(generation)
        keys = self._rank_keys()
        self._untold_keys = [] if keys is None else [keys]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's jobs, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._go_over_to(self._jobs.generation)
        if self._worker is not None:
            self._worker.saves.begin_by_layer(self._jobs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads, behind what the current stream has been given."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.loads.begin(self._jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Hold the step until a layer's pages may be read."""
        if self._worker is not None:
            self._worker.loads.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Say that a layer's pages are written, for saves that go by layer."""
        if self._worker is not None:
            self._worker.saves.layer_written(layer_name)

    def wait_for_save(self) -> None:
        """Begin the step's save behind its forward pass; called more than once, it begins once."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.saves.begin(self._jobs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads between steps that have ended, and those of them that failed."""
        ended, self._left_loads = self._left_loads, LoadsEnded()
        if self._worker is not None:
            ended = ended.and_also(self._worker.loads.take_ended())
        if self._by_layer:  # within a step: vLLM does not wait for their names
            self._ended = ended
            self._untold = self._untold.and_also(ended)
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(finished_recving=ended.ended, failed_recving=ended.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load within this step could not fill."""
        return self._ended.failed_blocks

    def build_connector_worker_meta(self) -> KVFerryWorkerMetadata | None:
        """Return what has ended, for the scheduler's side."""
        loads, self._untold = self._untold, LoadsEnded()
        saves, self._left_saves = self._left_saves, Counter()
        stored, self._left_stored = self._left_stored, Counter()
        if self._worker is not None:
            more_saves, more_stored = self._worker.saves.take_ended()
            saves, stored = saves + more_saves, stored + more_stored
        keys, self._untold_keys = self._untold_keys, []
        if not saves and not stored and not loads.ended and not keys:
            return None
        return KVFerryWorkerMetadata(saves, stored, LoadsEnded(loads.ended, loads.failed), keys)

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Return the counters since the last call."""
        if self._worker is None:
            return None
        now = totals(linker.stats for linker in self._worker.linkers.values())
        changed, self._counted = since(now, self._counted), now
        return KVFerryStats(data=changed) if changed else None

    def shutdown(self) -> None:
        """End all transfers and threads, and leave Mooncake. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.unregister_kv_caches()
            self._store.close(CLOSE_LIMIT_S)
        except KVFerryError as error:
            log.error("shutdown: %s", error)

    @property
    def _plan(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on a worker, wanted the scheduler's connector"
        return self._scheduler

    @property
    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFerryMetadata)
        return metadata.jobs

    def _store_config(self, role: KVConnectorRole) -> MooncakeConfig:
        """Return the client's settings; the scheduler's client asks and lends no memory."""
        if role == KVConnectorRole.SCHEDULER:
            return replace(self._settings.mooncake, segment_bytes=0)
        return self._settings.mooncake
