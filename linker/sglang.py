"""SGLang's external linker: the contract of 0.5.23, for every pool that kvferry can describe.

SGLang loads this by `--unified-cache-external-linker-backend dynamic` and the configuration
`{"linker": "KVFerryLinker", "linker_module_path": "kvferry.linker.sglang"}`. Besides, only
`sglang_identity` imports SGLang. Nothing it does raises into the scheduler's thread once it is
made: what cannot be done is a miss, a load that failed, or an offload that was not stored, and a
line in the log.
"""

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from kvferry.errors import ArgumentError, KVFerryError
from kvferry.linker.endings import Ending
from kvferry.linker.engine_config import tell
from kvferry.linker.home import Home, stays_home
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.pool_tensors import qualified_name
from kvferry.linker.sglang_generations import Generations
from kvferry.linker.sglang_identity import read_identity, version_and_path, weights_told
from kvferry.linker.sglang_loads import LayerDoneCounter, Loads
from kvferry.linker.sglang_offloads import Offloads
from kvferry.linker.sglang_pools import TRANSFERS, read_cache_params
from kvferry.linker.sglang_ranks import agree_on, check_pipeline, ranks_of
from kvferry.linker.sglang_settings import read_settings
from kvferry.linker.sglang_sharing import shared_reads_of
from kvferry.linker.sglang_transfers import Pages, pages_of
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.streams import Fence, fence_of_caller

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 30.0
_MHA = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"


@stays_home
class KVFerryLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Moves the pages of SGLang's prefix tree to and from Mooncake Store.

    One per rank, made once its pools exist. All methods are for the scheduler's thread.

    Attributes:
        pools: SGLang's pool names whose pages travel; SGLang asks which there are.
        layer_done_counter: what its pools wait on, layer by layer.
        forward_stream: the stream of the forward pass; None on a CPU.
        linker: what carries the transfers out; its `stats` count them.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any = None,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: "torch.cuda.Stream | None" = None,
        store: Store | None = None,
        **others: Any,
    ) -> None:
        """Describe the pools, allocate staging, connect to Mooncake, register.

        Args:
            server_args: SGLang's, for model, revision and KV-cache dtype.
            params: SGLang's `CacheInitParams`.
            components: the prefix tree's component types.
            extra_config: `linker_extra_config`; see `sglang_settings`.
            forward_stream: that the forward pass runs on.
            store: instead of a Mooncake client of its own; closed with the linker all the same.
            others: what later versions of SGLang pass; named in the log.

        Raises:
            ArgumentError: a setting is wrong.
            LayoutError: a pool, or a tensor of one, that is not described.
            StoreError: Mooncake cannot be reached, or refuses the staging buffer.
            PeersLost: `share_reads` is set, and the other ranks do not come.
        """
        self._home = Home("the linker for SGLang")
        if others:
            log.warning("arguments %s are unknown here and not used", sorted(others))
        self.forward_stream = forward_stream
        dcp_size = get_parallel().attn_dcp_size
        dcp_rank = get_parallel().attn_dcp_rank if dcp_size > 1 else 0
        ranks = ranks_of(params, (dcp_rank, dcp_size))
        settings = read_settings(extra_config, tp_rank=ranks.tp[0], num_ranks=ranks.num_ranks)
        check_pipeline(ranks, settings.adapter.allow_pipeline)
        self._generations = Generations(
            weights_told(),
            named=settings.adapter.generation,
            seed=agree_on(secrets.token_hex(8), params),
        )
        identity, kv_config = read_identity(
            server_args, params, ranks, settings.adapter, self._generations.current
        )
        self._pools = read_cache_params(params, identity=identity, dcp_size=ranks.dcp[1])
        layout = self._pools.layout
        _check_components(components, layout.spaces)
        config = replace(settings.linker, replicated=self._pools.replicated)
        self._check_slots = settings.adapter.check_slots
        self._stats_interval_s = settings.adapter.stats_interval_s
        self._reported_s = time.monotonic()
        assert layout.device is not None
        staging = StagingBuffer(
            settings.adapter.staging_bytes,
            device=layout.device,
            memory=settings.adapter.staging_memory,
        )
        self._store: Store = MooncakeStore(settings.mooncake) if store is None else store
        try:
            sharing = None
            if settings.adapter.share_reads:
                sharing = shared_reads_of(
                    params, ranks, staging, config.replicated, config.transfer_timeout_s
                )
            self.linker = Linker(layout, self._store, staging, config, sharing=sharing)
        except BaseException:
            self._store.close()
            raise
        self._loads = Loads(self.linker)
        self._offloads = Offloads(self.linker, ranks, self._pools.replicated)
        for each in (self._loads, self._offloads):
            Ending(self, dropped=each.leave)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.layer_done_counter = LayerDoneCounter(
            layout.num_layers, self._loads, config.wait_timeout_s, by_layer=_asks_by_layer(kvcache)
        )
        self.pools = {PoolName(TRANSFERS[space]): kvcache for space in layout.spaces}
        if "state" in layout.spaces:  # SGLang registers it with the other pools alone
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        log.info(
            "kvferry serves %s: %d layers, %s bytes a page, %s of staging in %s memory, rank %s",
            type(kvcache).__name__, layout.num_layers, dict(layout.object_bytes),
            staging.num_bytes, staging.memory, layout.identity.share,
        )  # fmt: skip
        tell(log, layout.identity, self.linker.keys.stem, kv_config)

    # ---- prefixes in the store ----

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return every prefix length, in pages of the uncached tail, that could be loaded now."""
        full = next((each for each in transfers if each.name == PoolName.KV), None)
        if full is None or not full.keys or not self._generations.are_current(*version_and_path()):
            return []
        try:
            return self.linker.lookup(full.keys)
        except KVFerryError as error:
            log.warning("lookup of %d pages for %s: %s", len(full.keys), rid, error)
            return []

    # ---- loads ----

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue a load into slots that the request owns; False if it cannot be one.

        The answer depends on the transfers alone, so that all ranks give the same.
        """
        pages = self._pages("load", transfers)
        if pages is None or not pages.keys:
            return False
        try:
            self._loads.queue(rid, pages)
        except ArgumentError as error:
            log.error("load refused: %s", error)
            return False
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads; return the index for the layer counter, -1 if there are none."""
        return self._loads.start(self._fences)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch writes no page any more; whether all of it came, and was right."""
        error = self._loads.finish(counter_index)
        self._report()
        if error is None:
            return True
        log.error("load of batch %d failed: %s", counter_index, error)
        return False

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun; whether there was one."""
        return self._loads.cancel(rid)

    # ---- offloads ----

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Queue pages for the store; False if there is nothing to queue."""
        pages = self._pages("offload", transfers)
        if pages is None or not pages.keys:
            return False
        if not self._generations.are_current(*version_and_path()):  # alike on all ranks
            return False
        self._offloads.put(pages, self._fences())
        return True

    def num_completed_offloads(self) -> int:
        """Return how many of the oldest offloads have a verdict."""
        return self._offloads.num_completed

    def pop_completed_offload(self) -> bool:
        """Take the oldest offload's verdict: whether all of it is in the store."""
        stored = self._offloads.pop()
        self._report()
        return stored

    # ---- the end ----

    def reset(self) -> None:
        """End all transfers and forget them; what is stored stays.

        SGLang flushes behind each update of weights that does not ask it not to, and has left word
        of it by then: what is computed from now on is of the generation that it tells of.
        """
        self.layer_done_counter.reset()
        self._loads.reset("the cache was flushed")
        self._offloads.reset("the cache was flushed")
        if self._generations.look(weights_told()):
            self.linker.renew(self._generations.current)

    def close(self) -> None:
        """End all transfers and threads, and leave Mooncake. Idempotent."""
        try:
            self._loads.close(CLOSE_LIMIT_S)
            self._offloads.close(CLOSE_LIMIT_S)
            self.linker.close(CLOSE_LIMIT_S)
            self._store.close(CLOSE_LIMIT_S)
        except KVFerryError as error:
            log.error("close: %s", error)

    def _pages(self, kind: str, transfers: Sequence[Any]) -> Pages | None:
        try:
            return pages_of(self._pools, transfers, check_slots=self._check_slots)
        except KVFerryError as error:
            log.error("%s refused: %s", kind, error)
            return None

    def _fences(self) -> list[Fence]:
        """Return the points behind which pages may be read or written now.

        The current stream has computed which pages; the forward pass that runs may still read and
        write them.
        """
        device = self._pools.layout.device
        assert device is not None
        fences = [fence_of_caller(device)]
        if self.forward_stream is not None and device.type == "cuda":
            with torch.cuda.stream(self.forward_stream):
                fences.append(fence_of_caller(device))
        return fences

    def _report(self) -> None:
        """Write a line about traffic to the log, now and then."""
        now_s = time.monotonic()
        if not self._stats_interval_s or now_s - self._reported_s < self._stats_interval_s:
            return
        self._reported_s = now_s
        counts = self.linker.stats.snapshot()
        log.info(
            "kvferry: loads %s, %d bytes; offloads %s, %d bytes; failures %s",
            counts["transfers"]["load"], counts["bytes"]["load"],
            counts["transfers"]["save"], counts["bytes"]["save"], counts["failures"],
        )  # fmt: skip
        if self.linker.sharing is not None:
            log.info("kvferry: shared reads %s", vars(self.linker.sharing.counts))


def _asks_by_layer(kvcache: Any) -> bool:
    """Whether all that read a pool in a forward pass ask for the layer first.

    They do not where attention reads NVFP4: `MHATokenToKVPool.get_raw_kv_buffer` and what fills its
    workspace wait for nothing, since no linker of SGLang's own serves such pools. Inside a
    `HybridLinearKVPool` they wait.
    """
    return not (qualified_name(kvcache) == _MHA and kvcache.is_quantized_kv_cache)


def _check_components(components: Any, spaces: Sequence[str]) -> None:
    """Refuse a tree whose components and our index spaces are not the same."""
    if components is None:
        return
    names = {"FULL": "full", "SWA": "swa", "MAMBA": "state"}
    wanted = {names.get(component.name, component.name) for component in components}
    if wanted != set(spaces):
        raise ArgumentError(
            f"the prefix tree has components {sorted(c.name for c in components)}, but the pools "
            f"have index spaces {list(spaces)}"
        )
