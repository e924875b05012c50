"""Configurations whose KV is the same have one digest, all others different ones."""

import copy
import enum
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvferry.digest import config_digest
from kvferry.identity import ModelIdentity
from kvferry.linker.engine_config import (
    LENGTHS,
    WITHOUT_MEANING,
    cpu_kind,
    dtype_of_kv,
    kv_config,
    tell,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 32,
    "attn_logit_softcapping": None,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"rope_theta": 10000.0, "_name_or_path": "/a"},
    "transformers_version": "5.19.0",
    "_name_or_path": "/mnt/a",
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def digest(changes: dict[str, Any] | None = None, **more: Any) -> str:
    return config_digest(kv_config({"text": {**LLAMA, **(changes or {})}}, **more))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000},
        {"_name_or_path": "/home/b", "transformers_version": "5.24.0"},
        {"torch_dtype": torch.bfloat16},
        {"torch_dtype": None, "dtype": "bfloat16"},
        {"max_position_embeddings": 131072},
        {"text_config": {"rope_theta": 1e4, "_name_or_path": "/b"}},
        {"quantization_config": {"weight_block_size": (128, 128), "quant_method": "fp8"}},
        {"_attn_implementation": "sdpa", "use_cache": False, "eos_token_id": [1, 2]},
    ],
)
def test_what_computes_the_same_kv_has_the_same_digest(changes: dict[str, Any]) -> None:
    assert digest(changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6},
        {"rope_scaling": YARN},
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"sliding_window": 4096},
        {"rms_norm_eps": 1e-5},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 256},
        {"layer_types": ["sliding_attention"] + ["full_attention"] * 31},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": None},
        {"text_config": {"rope_theta": 1e6}},
        {"something_that_comes_tomorrow": 1},
        {"architectures": ["MistralForCausalLM"]},
    ],
)
def test_what_computes_other_kv_has_another_digest(changes: dict[str, Any]) -> None:
    assert digest(changes) != digest()


def test_every_value_of_a_scaling_counts() -> None:
    changed = [
        {},
        {"factor": 8.0},
        {"original_max_position_embeddings": 4096},
        {"attention_factor": 1.2},
        {"rope_type": "linear"},
    ]
    found = {digest({"rope_scaling": {**YARN, **each}}) for each in changed}
    assert len(found) == len(changed)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_lengths_count_where_rope_scales_by_them(name: str, kind: str) -> None:
    def of(rope: dict[str, Any], **more: Any) -> list[str]:
        scaled = {name: {kind: rope["rope_type"], "long_factor": [rope["factor"]]}}
        return [
            digest({**scaled, "max_position_embeddings": 8192}, **more),
            digest({**scaled, "max_position_embeddings": 16384}, **more),
        ]

    assert len(set(of(YARN))) == 1
    assert len(set(of(DYNAMIC))) == 2
    assert of(YARN, context_length=1000) == of(YARN, context_length=2000)
    assert of(DYNAMIC, context_length=1000) != of(DYNAMIC, context_length=2000)


def test_what_else_an_engine_knows_counts() -> None:
    ways = [{}, {"quantization": "fp8"}, {"quantization": "awq"}, {"dtype": torch.float16}]
    assert len({config_digest(kv_config({"text": LLAMA}, **more)) for more in ways}) == 4


def test_hugging_faces_classes_and_others() -> None:
    class Config:
        def __init__(self, **values: Any) -> None:
            self.values = values

        def to_dict(self) -> dict[str, Any]:
            return copy.deepcopy(self.values)

    @dataclass
    class Quantization:
        bits: int
        kind: enum.Enum

    kind = enum.Enum("kind", {"A": "a", "B": "b"})
    assert config_digest(kv_config({"text": Config(**LLAMA)})) == digest()
    assert digest({"vision": Config(_name_or_path="x", n=1)}) == digest({"vision": {"n": 1}})
    ways = [Quantization(4, kind.A), Quantization(8, kind.A), Quantization(4, kind.B)]
    assert len({digest({"quantization_config": way}) for way in ways}) == 3
    assert digest({"a": {2, 1}}) == digest({"a": [1, 2]})
    assert digest({"a": float("nan")}) == digest({"a": float("nan")}) != digest({"a": 1.0})
    assert digest({"a": object()}) != digest({"a": object()})  # no text of its own: kept apart


def test_every_name_that_does_not_count_has_its_reason() -> None:
    assert all(reason for reason in WITHOUT_MEANING.values())
    assert not set(LENGTHS) & set(WITHOUT_MEANING)


def test_auto_and_its_type_are_the_same_bytes() -> None:
    for told in ("auto", "bfloat16", "bf16"):
        assert dtype_of_kv(told, torch.bfloat16) == "bfloat16"
    assert dtype_of_kv("fp8_e4m3", "torch.uint8") == "fp8_e4m3:uint8"
    assert dtype_of_kv("auto", torch.float16) == dtype_of_kv("half", torch.float16) == "float16"
    assert dtype_of_kv("nvfp4", torch.uint8) != dtype_of_kv("auto", torch.uint8)


def test_a_line_says_what_is_in_the_keys(caplog: pytest.LogCaptureFixture) -> None:
    identity = ModelIdentity(
        "toy", "r1", "bfloat16", config="c" * 32, generation="v7", tp=(0, 2)
    )  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        tell(logging.getLogger("kvferry"), identity, "ns/toy/v7/", {"rope_theta": 1})
    line, more = caplog.messages
    for part in ("ns/toy/v7/", "'toy'", "'r1'", "'v7'", "c" * 32, "bfloat16", "tp0of2"):
        assert part in line
    assert "rope_theta" in more


def test_cpus_that_keep_keys_in_another_order_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    for machine in ("x86_64", "aarch64"):
        for has_amx in (False, True):
            monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
            monkeypatch.setattr(
                torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx, raising=False
            )
            kinds.add(cpu_kind())
    assert len(kinds) == 4
