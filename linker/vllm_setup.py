"""What vLLM's config means for the connector: refusals, ranks, whose bytes they are, the plan."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tp_group,
    model_parallel_is_initialized,
)
from vllm.v1.core.kv_cache_utils import get_block_hash, resolve_kv_cache_block_sizes

from kvferry.digest import config_digest
from kvferry.errors import ArgumentError
from kvferry.identity import ModelIdentity
from kvferry.linker.engine_config import cpu_kind, dtype_of_kv, kv_config, tell
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Store
from kvferry.linker.vllm_groups import Group, Prefixes
from kvferry.linker.vllm_pools import read_vllm_pools
from kvferry.linker.vllm_scheduler import SchedulerSide
from kvferry.linker.vllm_settings import ConnectorConfig, VllmSettings
from kvferry.linker.vllm_worker import WorkerSide

log = logging.getLogger(__name__)


def log_as_vllm(ours: logging.Logger, theirs: logging.Logger) -> None:
    """Let our lines go where vLLM's go, unless somebody has said where ours go."""
    if not ours.hasHandlers():
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def check_config(vllm_config: Any, kv_cache_config: Any, *, by_layer: bool) -> None:
    """Refuse what would be wrong: loads by layer that vLLM cannot take back, pages without hashes.

    Raises:
        ArgumentError: says which setting, and what was wanted.
    """
    if by_layer and len(kv_cache_config.kv_cache_groups) > 1:
        raise ArgumentError(
            "loads is 'layerwise', but the model has "
            f"{len(kv_cache_config.kv_cache_groups)} cache groups, for which vLLM cannot take "
            "back a step whose load failed; wanted 'async'"
        )
    if by_layer and vllm_config.max_concurrent_batches > 1:
        raise ArgumentError(
            "loads is 'layerwise', but vLLM runs "
            f"{vllm_config.max_concurrent_batches} steps at a time and cannot take back the "
            "one behind a failed load; wanted 'async', or --no-async-scheduling and no "
            "pipeline stages"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ArgumentError(
            "enable_prefix_caching is False, wanted True: pages are kept under its hashes"
        )
    context_ranks = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if context_ranks > 1:
        raise ArgumentError(
            f"prefill_context_parallel_size is {context_ranks}, wanted 1: which rank keeps "
            "which tokens is not described"
        )


def scheduler_side(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[Group],
    settings: VllmSettings,
    store: Store,
) -> SchedulerSide:
    """Return the plan of one engine's transfers."""
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    speculative = vllm_config.speculative_config
    drop_last = getattr(speculative, "use_eagle_block_drop", lambda: False)()
    if getattr(vllm_config, "num_hash_lookahead_tokens", 0):
        drop_last = False  # hashes tell the token behind the block, which drafts depend on
    specs = [kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec for group in groups]
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        log.warning(
            "prefix_caching_hash_algo is %s without PYTHONHASHSEED: no other engine, nor this "
            "one after its next start, will find what it stores; wanted sha256, or one seed",
            algorithm,
        )
    return SchedulerSide(
        Prefixes(groups, hash_tokens, drop_last=drop_last),
        store,
        num_workers=vllm_config.parallel_config.world_size,
        by_boundary=[
            group.group_id
            for group, spec in zip(groups, specs, strict=True)
            if getattr(spec, "mamba_cache_mode", "") == "align"
        ],
        loads_by_layer=settings.connector.loads == "layerwise",
        lookup_ttl_s=settings.linker.lookup_ttl_s,
        miss_ttl_s=settings.linker.miss_ttl_s,
        min_load_tokens=settings.connector.min_load_tokens,
        max_held_share=settings.connector.max_held_share,
        generation=settings.connector.generation,
        hash_of=lambda block: (
            None if block.block_hash is None else get_block_hash(block.block_hash)
        ),
    )


def worker_side(
    vllm_config: Any,
    kv_cache_config: Any,
    caches: Mapping[str, torch.Tensor],
    settings: VllmSettings,
    store: Store,
    generation: str,
) -> WorkerSide:
    """Describe a rank's caches, allocate its staging, and start its threads.

    Raises:
        LayoutError: a cache that is not described.
        ArgumentError, StoreError: as `Linker`.
    """
    connector = settings.connector
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_layers_start_end_indices(parallel)
    identity, config = identity_of(vllm_config, connector, ranks_of(parallel), layers, generation)
    pools = read_vllm_pools(kv_cache_config, caches, first_layer=layers[0], identity=identity)
    worker = WorkerSide(
        pools,
        store,
        settings.linker,
        lambda num_bytes, device: StagingBuffer(
            num_bytes, device=device, memory=connector.staging_memory
        ),
        connector.staging_bytes,
        loads_by_layer=connector.loads == "layerwise",
        saves_by_layer=connector.saves == "layerwise",
    )
    for group in pools.groups:
        log.info(
            "kvferry serves cache group %d: %s, %d layers, %d tokens and %d bytes a page",
            group.group_id, group.space, len(group.layer_ids), group.layout.page_size,
            group.layout.object_bytes[group.space],
        )  # fmt: skip
    tell(log, identity, next(iter(worker.linkers.values())).keys.stem, config)
    return worker


def ranks_of(parallel: Any) -> dict[str, tuple[int, int]]:
    """Return (rank, size) of each kind of parallelism that splits a model's cache."""
    tp = pp = (0, 1)
    if model_parallel_is_initialized():
        tp, pp = (
            (group.rank_in_group, group.world_size) for group in (get_tp_group(), get_pp_group())
        )
    dcp_size = parallel.decode_context_parallel_size
    return {"tp": tp, "pp": pp, "dcp": (tp[0] % dcp_size, dcp_size)}


def identity_of(
    vllm_config: Any,
    connector: ConnectorConfig,
    ranks: Mapping[str, tuple[int, int]],
    layers: tuple[int, int],
    generation: str,
) -> tuple[ModelIdentity, Mapping[str, Any]]:
    """Return who writes these bytes, as vLLM was told, and the config that it is a digest of.

    Args:
        vllm_config: the engine's.
        connector: settings, some of which stand for what vLLM tells.
        ranks: as `ranks_of`.
        layers: the stage's first layer, and the one behind its last.
        generation: of the weights.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    configs = {"model": model.hf_config, "text": model.hf_text_config}
    draft = ""
    if speculative is not None:
        draft = f"{speculative.method}:{speculative.model}"
        of_draft = getattr(speculative, "draft_model_config", None)
        if of_draft is not None:
            draft += f":{of_draft.revision or ''}:{of_draft.quantization or ''}"
            configs["draft"] = of_draft.hf_config
    config = kv_config(
        configs,
        context_length=model.max_model_len,
        dtype=model.dtype,
        quantization=model.quantization,
        quantization_config=getattr(model, "quantization_config", None),
        is_dummy=str(vllm_config.load_config.load_format) == "dummy",
        cpu=cpu_kind() if vllm_config.device_config.device_type == "cpu" else None,
    )
    identity = ModelIdentity(
        model=connector.model or str(model.model),
        revision=connector.revision or str(model.revision or ""),
        kv_dtype=dtype_of_kv(str(vllm_config.cache_config.cache_dtype), model.dtype),
        draft=draft,
        config=config_digest(config),
        generation=generation,
        layers=layers if ranks["pp"][1] > 1 else None,
        tp=ranks["tp"],
        pp=ranks["pp"],
        dcp=ranks["dcp"],
    )
    return identity, config
