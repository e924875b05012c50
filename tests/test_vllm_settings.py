"""`kv_connector_extra_config`: where Mooncake's settings come from, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ArgumentError
from kvferry.linker.vllm_settings import SETTINGS, read_connector_config, read_settings

MASTER = {"master_server_address": "m:1", "protocol": "tcp"}


def read(extra: dict[str, Any] | None = None, **environment: str) -> Any:
    return read_settings(extra, environment=environment)


def test_the_launch_line_comes_before_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps(
            {
                "master_server_address": "file:1",
                "protocol": "tcp",
                "mode": "embedded",
                "local_hostname": "10.0.0.1",
            }
        )
    )
    environment = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_MASTER": "env:1"}
    assert read({}, **environment).mooncake.master_address == "file:1"
    assert read(MASTER, **environment).mooncake.master_address == "m:1"
    plain = read({}, MOONCAKE_MASTER="env:1", MOONCAKE_PROTOCOL="tcp", MOONCAKE_DEVICE="mlx5_0")
    assert (plain.mooncake.master_address, plain.mooncake.device_name) == ("env:1", "mlx5_0")
    mixed = read({"device_name": "mlx5_1"}, **environment, MOONCAKE_LOCAL_HOSTNAME="10.0.0.2")
    assert (mixed.mooncake.local_hostname, mixed.mooncake.device_name) == ("10.0.0.1", "mlx5_1")


@pytest.mark.parametrize("content", ["no JSON", "[1]", None])
def test_files_that_cannot_be_used(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ArgumentError, match=r"MOONCAKE_CONFIG_PATH is .*mooncake\.json"):
        read({}, MOONCAKE_CONFIG_PATH=str(file))


def test_a_master_is_needed() -> None:
    with pytest.raises(ArgumentError, match="names no master_server_address and MOONCAKE_MASTER"):
        read({})


def test_each_setting_reaches_its_place() -> None:
    extra = {
        **MASTER, "staging_bytes": "64mb", "part_bytes": "1mb", "global_segment_size": "2gb",
        "groups": [[0, 4], [4, 8]], "loads": "layerwise", "lease_ttl_s": 5, "integrity": False,
        "min_load_tokens": 256,
    }  # fmt: skip
    got = read(extra)
    assert (got.connector.staging_bytes, got.linker.part_bytes) == (64 << 20, 1 << 20)
    assert (got.mooncake.segment_bytes, got.mooncake.lease_ttl_s) == (2 << 30, 5)
    assert got.linker.groups == ((0, 4), (4, 8))
    assert (got.linker.integrity, got.connector.min_load_tokens) == (False, 256)
    assert got.connector.by_layer
    assert not read(MASTER).connector.by_layer
    assert read({**MASTER, "saves": "layerwise"}).connector.by_layer


def test_tenants_have_namespaces_of_their_own() -> None:
    assert read(MASTER).linker.namespace == "kvferry"
    assert read({**MASTER, "tenant_id": "blue"}).linker.namespace == "kvferry.blue"
    named = read({**MASTER, "namespace": "prod"}, MOONCAKE_TENANT_ID="green")
    assert named.linker.namespace == "prod.green"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"stagin_bytes": 1}, r"kv_connector_extra_config has \['stagin_bytes'\], wanted names"),
        ({"loads": "sometimes"}, "loads is 'sometimes', wanted one of"),
        ({"saves": "async"}, "saves is 'async', wanted one of"),
        ({"max_held_share": 0.0}, "max_held_share is 0.0, wanted 0 < share <= 1"),
        ({"max_held_share": 1.5}, "max_held_share is 1.5, wanted 0 < share <= 1"),
        ({"staging_bytes": "much"}, "staging_bytes is 'much'"),
        ({"replicated": []}, r"has \['replicated'\]"),
    ],
)
def test_what_is_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        read({**MASTER, **extra})


def test_the_connector_alone_needs_no_master() -> None:
    assert read_connector_config(None).loads == "async"
    assert read_connector_config({"loads": "layerwise"}).by_layer
    assert len(set(SETTINGS)) == len(SETTINGS)
