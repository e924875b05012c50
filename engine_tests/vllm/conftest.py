"""Loads the real vLLM on a CPU, before any test imports it."""

import copy
import faulthandler
import itertools
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # all copies are small: threads would only wait for each other
os.environ["HF_HUB_OFFLINE"] = "1"  # there is no model, and nobody is to look for one
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
warnings.filterwarnings("ignore", module="vllm")

import plan  # noqa: E402
from engine import Engine  # noqa: E402
from hooked import Hooked  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from kvferry.linker import vllm as connector  # noqa: E402
from kvferry.linker.master import LocalMaster  # noqa: E402
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore  # noqa: E402
from kvferry.linker.owner import LocalOwner  # noqa: E402

TEST_LIMIT_S = 120.0
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
_names = itertools.count()


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    """Ends the run with the stacks of all threads where a test hangs."""
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def master_address() -> Iterator[str]:
    """A master with one owner's memory, for all tests; they keep apart by namespace."""
    with LocalMaster() as master, LocalOwner(master.address, 256 << 20):
        yield master.address


class SharedClient(Hooked):
    """The session's client, of which each engine has its own calls: connecting takes a while."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Leave the client to the others."""


@pytest.fixture(scope="session")
def client(master_address: str) -> Iterator[MooncakeStore]:
    """A client of the master, for all engines."""
    with MooncakeStore(MooncakeConfig(master_address, segment_bytes=0)) as store:
        yield store


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    """VLLM's configuration of a tiny model, for the CPU, each time in a folder of its own."""

    def make_config(**of_model: Any) -> VllmConfig:
        folder = tmp_path_factory.mktemp("tiny-llama")
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
        return VllmConfig(
            model_config=ModelConfig(
                **{
                    "model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16",
                    "seed": 0, "max_model_len": 1024, **of_model,
                },
            ),
            cache_config=CacheConfig(block_size=plan.BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024,
                enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(device="cpu"),
        )  # fmt: skip

    return make_config


@pytest.fixture(scope="session")
def base_config(make_config: Callable[..., VllmConfig]) -> VllmConfig:
    """The configuration of most tests."""
    return make_config()


Make = Callable[..., Engine]


@pytest.fixture
def make(
    base_config: VllmConfig,
    master_address: str,
    client: MooncakeStore,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Make]:
    """Makes engines by the name of their model, closed after the test; all in one namespace.

    `stages` are the layers of each pipeline stage, if there are several.
    """
    engines: list[Engine] = []
    namespace = f"test-{next(_names)}"
    before = set(threading.enumerate())

    def make(
        name: str = "llama",
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        *,
        num_blocks: int = 128,
        num_ranks: int = 1,
        stages: Sequence[dict[str, Any]] = (),
        settings: dict[str, Any] | None = None,
        policy: str = "recompute",
        scheduler: dict[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        config = copy.deepcopy(base_config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.linker.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "master_server_address": master_address,
                "protocol": "tcp",
                "namespace": namespace,
                "staging_bytes": 4 << 20,
                "lookup_ttl_s": 0.0,
                **(settings or {}),
            },
        )
        for field, value in (scheduler or {}).items():
            setattr(config.scheduler_config, field, value)
        config.parallel_config.tensor_parallel_size = num_ranks
        config.parallel_config.pipeline_parallel_size = len(stages) or 1
        config.parallel_config.world_size = num_ranks * (len(stages) or 1)
        specs = plan.MODELS[name]()
        if name == "qwen3_next":
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.block_size = 3 * plan.BLOCK
        elif name == "deepseek_v32":
            config.cache_config.block_size = 64
        shares = stages or [specs] * num_ranks
        plans = [plan.make(share, layout, num_blocks=num_blocks) for share in shares]
        with monkeypatch.context() as patched:
            patched.setattr(connector, "MooncakeStore", lambda _: SharedClient(client))
            engines.append(Engine(config, plans, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    for thread in set(threading.enumerate()) - before:
        if "kvferry" in thread.name:
            thread.join(10.0)
            assert not thread.is_alive(), f"{thread.name} goes on"
