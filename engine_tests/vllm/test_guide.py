"""The guide's launch line, by vLLM's own configuration and factory and kvferry's own settings."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvferry.linker.vllm import KVFerryConnector
from kvferry.linker.vllm_settings import SETTINGS, read_settings
from kvferry.linker.vllm_stats import COUNTERS

TEXT = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")


def launch_config() -> KVTransferConfig:
    """What the guide's launch line says of the connector."""
    (block,) = re.findall(r"```\n(vllm serve .*?)```", TEXT, re.DOTALL)
    words = shlex.split(block.replace("\\\n", " "))
    return KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))


def test_the_launch_line() -> None:
    config = launch_config()
    assert KVConnectorFactory.get_connector_class(config) is KVFerryConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert config.kv_load_failure_policy == "recompute"
    read = read_settings(
        config.kv_connector_extra_config,
        environment={"MOONCAKE_MASTER": "m:1", "MOONCAKE_PROTOCOL": "tcp"},
    )
    assert (read.linker.namespace, read.connector.staging_bytes) == ("prod", 512 << 20)
    assert read.mooncake.segment_bytes == 4 << 30


def test_everything_is_in_the_guide() -> None:
    told = set(re.findall(r"`([a-z_:]+)`", TEXT))
    assert not set(SETTINGS) - told
    names = {metric.replace("load_", "save_") for metric, _ in COUNTERS.values()}
    assert not names - told


def test_what_vllm_asks_of_the_class() -> None:
    assert not KVFerryConnector.requires_kv_delivery.fget(SimpleNamespace())
    stats = KVFerryConnector.build_kv_connector_stats({"load_bytes": 3})
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
