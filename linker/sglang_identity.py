"""What SGLang tells of the model and its weights, for keys."""

from collections.abc import Mapping
from typing import Any

from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_context, get_model, get_serving, process_model_config

from kvferry.digest import config_digest
from kvferry.errors import ArgumentError
from kvferry.identity import ModelIdentity
from kvferry.linker.engine_config import dtype_of_kv, kv_config
from kvferry.linker.sglang_generations import Weights
from kvferry.linker.sglang_ranks import Ranks
from kvferry.linker.sglang_settings import AdapterConfig

READ_AGAIN = "model_runner.update_model_fields"
"""Who writes into SGLang's record of overrides, whenever weights were read from disk again."""


def version_and_path() -> tuple[str, str]:
    """Return the version of the weights and where they came from; cheap."""
    return str(get_serving().weight_version), str(get_model().model_path)


def weights_told() -> Weights:
    """Return all that SGLang tells of the weights that this process serves now."""
    return Weights(
        *version_and_path(),
        sum(source == READ_AGAIN for source, _ in get_context().overrides_log()),
    )


def read_identity(
    server_args: Any, params: Any, ranks: Ranks, adapter: AdapterConfig, generation: str
) -> tuple[ModelIdentity, Mapping[str, Any]]:
    """Return who writes these bytes, as SGLang was told, and the config that it is a digest of.

    Raises:
        ArgumentError: pipeline stages are cut in another way than SGLang says.
    """

    def told(name: str) -> str:
        value = getattr(server_args, name, None)
        return "" if value is None else str(value)

    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    model = process_model_config()
    drafts = (
        *getattr(params, "mtp_draft_device_pools", ()),
        *getattr(params, "sidecar_draft_device_pools", ()),
    )
    draft = ":".join(
        part
        for part in (
            told("speculative_algorithm"),
            told("speculative_draft_model_path"),
            told("speculative_draft_model_revision"),
            told("speculative_draft_model_quantization"),
        )
        if part
    )
    config = kv_config(
        {"model": model.hf_config, "text": model.hf_text_config},
        context_length=model.context_len,
        dtype=model.dtype,
        quantization=model.quantization,
        modelopt_quant=getattr(server_args, "modelopt_quant", None),
        kv_scales=getattr(server_args, "quantization_param_path", None),
        is_dummy=told("load_format") == "dummy",
    )
    identity = ranks.identity(
        model=adapter.model or told("model_path"),
        revision=adapter.revision or told("revision"),
        kv_dtype=dtype_of_kv(told("kv_cache_dtype"), getattr(kvcache, "dtype", "")),
        draft=draft if drafts else "",
        config=config_digest(config),
        generation=generation,
        layers=_layers_of_stage(kvcache, ranks.pp, model.num_hidden_layers),
    )
    return identity, config


def _layers_of_stage(kvcache: Any, pp: tuple[int, int], num_layers: int) -> tuple[int, int] | None:
    """Return the first layer of a pipeline stage, and the one behind its last."""
    if pp[1] == 1:
        return None
    first, end = get_pp_indices(num_layers, *pp)
    start = getattr(kvcache, "start_layer", first)
    if start != first:
        raise ArgumentError(
            f"the pools of pipeline stage {pp[0]} of {pp[1]} begin with layer {start}, wanted "
            f"{first}, as SGLang cuts {num_layers} layers"
        )
    return first, end
