"""What of an engine's model configuration decides what a token's KV is.

All of it, but for a list of names that surely do not. So a setting that nobody here has heard of
keeps two engines apart; at worst they compute what they could have shared.
"""

import logging
import math
import platform
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from kvferry.identity import ModelIdentity

WITHOUT_MEANING = {
    "_name_or_path": "where this host found the model",
    "name_or_path": "the same",
    "_commit_hash": "the revision, told as such",
    "auto_map": "where the model's Python code lies, which a copy on disk spells otherwise",
    "transformers_version": "which program wrote the file",
    "dtype": "has several spellings; the type that the engine computes in is told by itself",
    "torch_dtype": "the same",
    "_attn_implementation": "which kernel computes attention",
    "_attn_implementation_autoset": "the same",
    "_attn_implementation_internal": "the same",
    "_experts_implementation": "which kernel computes experts",
    "_experts_implementation_internal": "the same",
    "use_cache": "asks transformers for a cache, which engines do not use",
    "output_attentions": "asks transformers for more results",
    "output_hidden_states": "the same",
    "return_dict": "the form of transformers' results",
    "bos_token_id": "a token that requests bring; the page's key has it",
    "eos_token_id": "where an answer ends",
    "id2label": "names of classes",
    "label2id": "the same",
}
"""Names that do not count, wherever they stand, and why not."""

LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "max_seq_length",
           "model_max_length", "seq_length", "seq_len", "n_positions", "n_ctx",
           "context_len")  # fmt: skip
"""Names of the longest context; SGLang writes its own, `context_len`, into the model's. They count
where the position encoding may scale by them."""

NOT_BY_LENGTH = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope"})
"""Kinds of rope whose angles do not depend on the longest context: not so `dynamic`, `longrope`."""


def kv_config(
    configs: Mapping[str, Any], *, context_length: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return what decides an engine's KV, for `config_digest`.

    Args:
        configs: the engine's effective configurations, after all overrides, by any name: of Hugging
            Face's classes, or mappings.
        context_length: the longest context that the engine was told.
        more: what else decides it: quantization, the type that is computed in.
    """
    plain = {name: _plain(config) for name, config in {**configs, **more}.items()}
    by_length = any(kind not in NOT_BY_LENGTH for kind in _rope_kinds(plain))
    ignored = set(WITHOUT_MEANING) | (set() if by_length else set(LENGTHS))
    kept: dict[str, Any] = {name: _without(config, ignored) for name, config in plain.items()}
    if by_length:
        kept["context_length"] = context_length
    return kept


def dtype_of_kv(told: str, dtype: Any) -> str:
    """Return one name for what an engine was told of its cache's type and what that came to.

    Args:
        told: the setting; `auto` and the name of the type that it comes to mean the same bytes.
        dtype: of the pools or, before there are any, of the model.
    """
    name = str(dtype).removeprefix("torch.")
    same = {"auto", name, {"bfloat16": "bf16", "float16": "half", "float32": "float"}.get(name)}
    return name if told in same else f"{told}:{name}"


def cpu_kind() -> str:
    """Return what vLLM's attention on a CPU goes by when it orders the keys within a block.

    With AMX, and on some architectures, they lie in an order of their own, in tensors of one shape.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return f"{platform.machine()}{':amx' if has_amx else ''}"


def tell(log: logging.Logger, identity: ModelIdentity, stem: str, config: Any) -> None:
    """Write down what an engine's keys are made of, so that two operators can compare."""
    log.info(
        "kvferry's keys begin with %s: model %r, revision %r, generation %r, config %s, KV %s, "
        "draft %r, share %s",
        stem, identity.model, identity.revision, identity.generation, identity.config,
        identity.kv_dtype, identity.draft, identity.share,
    )  # fmt: skip
    log.debug("config %s is that of %s", identity.config, config)


def _plain(value: Any) -> Any:
    """Return a value in types that have a digest; what has none of them by its text.

    A text that is another in each process keeps engines apart, which is all it may do.
    """
    if value is None or isinstance(value, bool | str | int | torch.dtype):
        return value
    if isinstance(value, float):
        return str(value) if math.isnan(value) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {_plain_name(name): _plain(each) for name, each in value.items()}
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return _plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Set):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(each) for each in value]
    return f"{type(value).__qualname__} {value!r}"


def _plain_name(name: Any) -> str:
    return str(name.value if isinstance(name, Enum) else name)


def _without(value: Any, ignored: Set[str]) -> Any:
    """Return plain data without some names, wherever they stand."""
    if isinstance(value, dict):
        return {name: _without(v, ignored) for name, v in value.items() if name not in ignored}
    return [_without(each, ignored) for each in value] if isinstance(value, list) else value


def _rope_kinds(value: Any, *, in_rope: bool = False) -> Iterator[str]:
    """Yield the kinds of rope that plain data names, wherever they stand."""
    if isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, str) and (name == "rope_type" or (in_rope and name == "type")):
                yield each
            yield from _rope_kinds(each, in_rope=in_rope or name.startswith("rope"))
    elif isinstance(value, list):
        for each in value:
            yield from _rope_kinds(each, in_rope=in_rope)
