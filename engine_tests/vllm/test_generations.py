"""What is in the keys, and which generation: through vLLM's own resets, with real Mooncake."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import Engine, prompt
from hooked import Pause
from test_failures import check
from test_ranks import make_pair
from vllm.config import VllmConfig
from vllm.v1.attention.backends import cpu_attn

from kvferry.linker.vllm_settings import ConnectorConfig
from kvferry.linker.vllm_setup import identity_of

__all__ = ["make_pair"]
Make = Callable[..., Engine]
ALONE = {"tp": (0, 1), "pp": (0, 1), "dcp": (0, 1)}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def reset(engine: Engine) -> bool:
    """As `/reset_prefix_cache?reset_external=true`, a pause and sleep do."""
    return bool(engine.scheduler.reset_prefix_cache(reset_connector=True))


def found(engine: Engine) -> int:
    answer = engine.ask(prompt(200))
    assert answer.is_right
    engine.flush()
    return answer.num_external


def update(engine: Engine, value: float) -> None:
    """Change the weights, of which vLLM tells nobody."""
    for worker in engine.workers:
        torch.nn.init.constant_(worker.model.weight, value)


def generations_of(engine: Engine) -> set[str]:
    """What the keys of all workers have, and the scheduler's."""
    ours = {
        linker.keys.generation
        for worker in engine.workers
        for linker in worker.connector._worker.linkers.values()
    }
    return ours | {engine.connector._plan.generation.current}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_reset_without_new_weights_keeps_the_generation(runner: str, make: Make) -> None:
    first, second = make(runner=runner), make(runner=runner)
    assert found(first) == 0
    for _ in range(2):
        assert reset(first)
        assert reset(first)  # twice, and nobody has told yet
        assert found(first) == 192
        assert found(second) == 192
    assert generations_of(first) == {""}
    check(first, second)


def test_new_weights_are_a_new_generation(make: Make) -> None:
    first, second, third = make(), make(), make()
    assert found(first) == 0
    update(first, 7.0)
    assert reset(first)
    assert found(first) == 0
    assert found(first) == 192
    assert found(second) == 192  # nothing is deleted: others go on with the old weights
    update(second, 7.0)
    assert reset(second)
    assert found(second) == 192  # engines with the same weights meet
    assert generations_of(first) == generations_of(second)
    update(third, 8.0)
    assert reset(third)
    assert found(third) == 0
    update(third, 1.0)  # and back to those that it started with
    assert reset(third)
    assert found(third) == 192
    assert generations_of(third) == {""}
    check(first, second, third)


def test_weights_that_cannot_be_seen(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make(), make()
    for worker in first.workers:
        worker.model = None
    assert found(first) == 0
    assert reset(first)
    assert found(first) == 0
    (generation,) = generations_of(first)
    assert generation.startswith("drawn-")
    assert "whether weights changed cannot be seen" in caplog.text
    assert found(first) == 192
    assert found(second) == 192
    check(first, second)


def test_a_generation_set_by_hand_outlives_resets(make: Make) -> None:
    first, second = (make(settings={"generation": "fleet-7"}) for _ in range(2))
    found(first)
    for _ in range(2):
        assert reset(first)
        assert reset(second)
        assert found(first) == found(second) == 192
    assert found(make()) == 0
    check(first, second)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_go_over_together(rank: int, make_pair: Make) -> None:
    """Also where the weights of one alone are seen to change."""
    first, second = make_pair("deepseek_v32"), make_pair("deepseek_v32")
    assert found(first) == 0
    assert found(second) == 192
    torch.nn.init.constant_(second.workers[rank].model.weight, 7.0)
    assert reset(second)
    assert found(second) == 0
    assert found(second) == 192
    assert len(generations_of(second)) == 1
    assert reset(second)
    assert found(second) == 192
    check(first, second)


def test_running_requests_over_new_weights(make: Make) -> None:
    """Of what they computed before nothing is found under the new generation."""
    engine = make()
    asked = [engine.add(prompt(100, branch=branch), 30) for branch in range(3)]
    engine.until(lambda: all(len(answer.tokens) > 3 for answer in asked))
    update(engine, 7.0)
    old = engine.stores[0].count("put")
    assert engine.connector.reset_cache()  # and vLLM's own cache is not reset
    engine.run()
    engine.settle()
    assert engine.stores[0].count("put") == old
    engine.flush()
    assert found(engine) == 0
    check(engine)


@pytest.mark.parametrize("saves", ["whole", "layerwise"])
def test_a_save_in_flight_does_not_hold_up_a_reset(saves: str, make: Make) -> None:
    """It ends under the keys of the generation that it was begun with."""
    first = make(settings={"saves": saves})
    pause = first.stores[0].before["put"] = Pause()
    answer = first.add(prompt(200), 1)
    first.until(lambda: bool(answer.reason))
    pause.wait()
    update(first, 7.0)
    assert first.connector.reset_cache()
    pause.release()
    first.run()
    first.settle()
    first.flush()
    assert found(first) == 0
    assert found(make()) == 192
    check(first)


def test_ranks_that_sleep_while_a_generation_ends(make: Make) -> None:
    engine = make()
    found(engine)
    worker = engine.workers[0].connector
    update(engine, 7.0)
    assert reset(engine)
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    engine.shake_hands()  # as the engine's core does when it wakes up
    assert found(engine) == 0
    assert found(engine) == 192
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    engine.shake_hands()
    assert found(engine) == 192  # its workers' sleep alone changes nothing
    check(engine)


def test_what_is_in_the_keys_is_told_at_the_start(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = make(settings={"generation": "fleet-7", "model": "toy", "revision": "r9"})
    linker = engine.workers[0].connector._worker.linkers[0]
    (line,) = (text for text in caplog.messages if "kvferry's keys begin with" in text)
    for part in (linker.keys.stem, "toy", "r9", "fleet-7", linker.layout.identity.config):
        assert part in line


def config_of(base: VllmConfig, **changes: Any) -> str:
    """Digest of a configuration of which something is changed."""
    config = copy.deepcopy(base)
    for name, value in changes.items():
        where = config.model_config
        if name in ("load_format",):
            where = config.load_config
        elif name not in ("quantization", "max_model_len", "dtype"):
            where = config.model_config.hf_text_config
        setattr(where, name, value)
    identity, _ = identity_of(config, ConnectorConfig(), ALONE, (0, 8), "")
    return identity.config


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10000.0, "factor": 8.0}},
        {"sliding_window": 64},
        {"rms_norm_eps": 1e-5},
        {"head_dim": 8},
        {"quantization": "fp8"},
        {"quantization": "awq"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"load_format": "dummy"},
        {"dtype": "float16"},
        {"something_new": 1},
    ],
)
def test_what_changes_kv_changes_the_config(change: dict[str, Any], base_config: Any) -> None:
    assert config_of(base_config, **change) != config_of(base_config)


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 512},
        {"max_position_embeddings": 4096},
        {"_name_or_path": "/elsewhere"},
        {"transformers_version": "6.0"},
        {"rms_norm_eps": 0.000001},
    ],
)
def test_what_does_not_change_kv_keeps_it(change: dict[str, Any], base_config: Any) -> None:
    assert config_of(base_config, **change) == config_of(base_config)


def test_overrides_reach_the_config(make_config: Callable[..., VllmConfig]) -> None:
    """Through vLLM's own reading of a model's folder and of `--hf-overrides`."""
    folders = make_config(), make_config()  # two hosts
    assert config_of(folders[0]) == config_of(folders[1])
    others = [
        config_of(make_config(hf_overrides={"rope_theta": 1e6})),
        config_of(make_config(hf_overrides={"rope_parameters": YARN})),
        config_of(make_config(hf_overrides={"num_key_value_heads": 4})),
    ]
    assert len({config_of(folders[0]), *others}) == 4
    assert config_of(make_config(max_model_len=512)) == config_of(folders[0])


@pytest.mark.parametrize(
    ("told", "same"), [("auto", True), ("bfloat16", True), ("fp8", False), ("fp8_e5m2", False)]
)
def test_auto_and_its_dtype_share_keys(told: str, same: bool, base_config: Any) -> None:
    def kv_dtype(told: str) -> str:
        config = copy.deepcopy(base_config)
        config.cache_config.cache_dtype = told
        return identity_of(config, ConnectorConfig(), ALONE, (0, 8), "")[0].kv_dtype

    assert (kv_dtype(told) == kv_dtype("auto")) == same


def test_cpus_that_keep_keys_in_another_order_share_none(
    base_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's own rule, on this CPU: another order of bytes in a block, another config."""
    assert base_config.device_config.device_type == "cpu"
    digests, orders = [], []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_amx: has)
        digests.append(config_of(base_config))
        orders.append(cpu_attn._get_attn_isa(torch.bfloat16, 32, 64))
    assert orders[0] == "amx" != orders[1]
    assert digests[0] != digests[1]


def test_stages_have_their_layers_in_the_keys(base_config: Any) -> None:
    told = {**ALONE, "pp": (1, 2)}
    shares = [
        identity_of(base_config, ConnectorConfig(), told, layers, "")[0].share
        for layers in ((3, 8), (4, 8))
    ]
    assert shares[0] != shares[1]
