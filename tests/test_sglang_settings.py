"""Settings from SGLang's launch line: where each is found, of which kind, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.linker.sglang_settings import CONFIG_FILE, SETTINGS, read_settings

EXTRA = {"master_server_address": "extra:1", "protocol": "tcp"}
TCP = {"MOONCAKE_PROTOCOL": "tcp"}


def test_defaults() -> None:
    read = read_settings(EXTRA, environment={})
    assert read.mooncake.master_address == "extra:1"
    assert read.mooncake.local_hostname == "localhost"
    assert read.mooncake.metadata == "P2PHANDSHAKE"
    assert read.mooncake.segment_bytes == 4 << 30
    assert read.mooncake.device_name == ""
    assert read.adapter.staging_bytes == 512 << 20
    assert read.linker.namespace == "kvferry"
    assert read.linker.groups is None


def test_rdma_is_asked_for_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "kvferry.linker.mooncake_config.MooncakeConfig._check_rdma",
        lambda config: asked.append(config.protocol),
    )
    read_settings({"master_server_address": "m:1"}, environment={})
    assert asked == ["rdma"]


@pytest.mark.parametrize(
    ("extra", "in_file", "environment", "master"),
    [
        (EXTRA, {"master_server_address": "file:1"}, {"MOONCAKE_MASTER": "env:1"}, "extra:1"),
        ({}, {"master_server_address": "file:1"}, {"MOONCAKE_MASTER": "env:1"}, "file:1"),
        ({}, None, {"MOONCAKE_MASTER": "env:1"}, "env:1"),
        ({}, {"protocol": "tcp"}, {"MOONCAKE_MASTER": "env:1"}, "env:1"),
    ],
)
def test_the_first_source_with_a_master(
    extra: dict[str, Any],
    in_file: dict[str, Any] | None,
    environment: dict[str, str],
    master: str,
    tmp_path: Path,
) -> None:
    environment = {**TCP, **environment}
    if in_file is not None:
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps(in_file))
        environment[CONFIG_FILE] = str(path)
    assert read_settings(extra, environment=environment).mooncake.master_address == master


def test_a_file_is_read_for_mooncakes_names_alone(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "master_server_address": "file:1",
                "global_segment_size": "2gb",
                "protocol": "tcp",
                "namespace": "of the file",
                "prefetch_threshold": 256,
            }
        )
    )
    read = read_settings(
        {"staging_bytes": "64mb", "global_segment_size": "1gb"},
        environment={CONFIG_FILE: str(path)},
    )
    assert read.mooncake.segment_bytes == 2 << 30
    assert (read.adapter.staging_bytes, read.linker.namespace) == (64 << 20, "kvferry")


def test_what_a_source_leaves_out_is_taken_from_the_environment() -> None:
    read = read_settings(
        {"master_server_address": "extra:1"},
        environment={**TCP, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "8gb", "MOONCAKE_DEVICE": "mlx5_1"},
    )
    assert read.mooncake.protocol == "tcp"
    assert read.mooncake.segment_bytes == 8 << 30
    assert read.mooncake.device_name == "mlx5_1"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"MOONCAKE_LOCAL_HOSTNAME": "a", "LOCAL_HOSTNAME": "b"}, "a"),
        ({"LOCAL_HOSTNAME": "b"}, "b"),
        ({}, "c"),
    ],
)
def test_a_hosts_own_name_comes_before_what_all_are_told(
    environment: dict[str, str], name: str
) -> None:
    read = read_settings({**EXTRA, "local_hostname": "c"}, environment=environment)
    assert read.mooncake.local_hostname == name


@given(st.integers(0, 1 << 40), st.sampled_from(["", "kb", "mb", "gb"]), st.sampled_from(["", " "]))
def test_sizes(number: int, unit: str, space: str) -> None:
    factor = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}[unit]
    assume(number * factor < 2**63)  # a segment's bytes are 64 bits
    for text in (f"{number}{space}{unit}", f" {number}{space}{unit.upper()} "):
        read = read_settings({**EXTRA, "global_segment_size": text}, environment={})
        assert read.mooncake.segment_bytes == number * factor
    read = read_settings({**EXTRA, "staging_bytes": number}, environment={})
    assert read.adapter.staging_bytes == number


def test_ranks_share_the_segment_and_have_their_devices() -> None:
    extra = {**EXTRA, "global_segment_size": "4gb", "device_name": '{"0": "mlx5_0", "1": "mlx5_3"}'}
    read = read_settings(extra, tp_rank=1, num_ranks=4, environment={})
    assert read.mooncake.segment_bytes == 1 << 30
    assert read.mooncake.device_name == "mlx5_3"
    with pytest.raises(ArgumentError, match="wanted an entry for rank 2"):
        read_settings(extra, tp_rank=2, environment={})
    with pytest.raises(ArgumentError, match="is no JSON"):
        read_settings({**EXTRA, "device_name": "{mlx5_0}"}, environment={})
    read = read_settings({**EXTRA, "device_name": "mlx5_0,mlx5_1"}, tp_rank=7, environment={})
    assert read.mooncake.device_name == "mlx5_0,mlx5_1"


@pytest.mark.parametrize(
    ("extra", "namespace"),
    [
        ({}, "kvferry"),
        ({"namespace": "prod"}, "prod"),
        ({"tenant_id": "default"}, "kvferry"),
        ({"tenant_id": " "}, "kvferry"),
        ({"tenant_id": "blue"}, "kvferry.blue"),
        ({"namespace": "prod", "tenant_id": "blue", "extra_backend_tag": "v2"}, "prod.blue.v2"),
    ],
)
def test_who_shares_a_store_is_kept_apart(extra: dict[str, str], namespace: str) -> None:
    assert read_settings({**EXTRA, **extra}, environment={}).linker.namespace == namespace


def test_our_settings_reach_their_place() -> None:
    read = read_settings(
        {
            **EXTRA,
            "part_bytes": "32mb",
            "lookup_ttl_s": 0,
            "groups": [[0, 2], [2, 5]],
            "compute_us_per_layer": 500,
            "integrity": False,
            "lease_ttl_s": 5.0,
            "model": "name",
            "check_slots": True,
            "check_server": True,  # SGLang's, of no meaning here
        },
        environment={},
    )
    assert read.linker.part_bytes == 32 << 20
    assert read.linker.lookup_ttl_s == 0
    assert read.linker.groups == ((0, 2), (2, 5))
    assert read.linker.compute_us_per_layer == 500
    assert not read.linker.integrity
    assert read.mooncake.lease_ttl_s == 5.0
    assert (read.adapter.model, read.adapter.check_slots) == ("name", True)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"stagin_bytes": 1}, r"linker_extra_config has \['stagin_bytes'\], wanted names among"),
        ({"replicated": ["full"]}, "replicated"),
        ({"staging_bytes": "1tb"}, "staging_bytes is '1tb', wanted bytes"),
        ({"staging_bytes": -1}, "staging_bytes is -1"),
        ({"staging_bytes": True}, "staging_bytes is True"),
        ({"part_bytes": 1.5}, "part_bytes is 1.5"),
        ({"wire_threads": "2"}, "wire_threads is '2', wanted a value like 2"),
        ({"wire_threads": True}, "wire_threads is True"),
        ({"wire_threads": 0}, "wire_threads is 0, wanted 1 "),
        ({"integrity": 1}, "integrity is 1, wanted a value like True"),
        ({"lookup_ttl_s": "1"}, "lookup_ttl_s is '1'"),
        ({"namespace": 7}, "namespace is 7"),
        ({"groups": [[0, 1, 2]]}, "groups is .*, wanted a list of"),
        ({"groups": [[0, "1"]]}, "groups is .*, wanted a list of"),
        ({"groups": "0-1"}, "groups is '0-1'"),
        ({"wait": "never"}, "wait is 'never'"),
        ({"global_segment_size": "lots"}, "global_segment_size is 'lots'"),
        ({"standalone_storage": True}, "wanted a client in this process"),
        ({"standalone_storage": "yes"}, "wanted a client in this process"),
        ({"client_server_address": "h:1"}, "wanted a client in this process"),
        ({"master_server_address": "nowhere"}, "host:port"),
        ({"lease_ttl_s": 0}, "lease_ttl_s is 0, wanted a number, above 0"),
    ],
)
def test_refused(extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        read_settings({**EXTRA, **extra}, environment={})


@pytest.mark.parametrize("text", ["", "{", "[1]", "7"])
def test_a_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=CONFIG_FILE):
        read_settings({}, environment={**TCP, CONFIG_FILE: str(path)})


def test_no_file_and_no_master(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_settings({}, environment={CONFIG_FILE: str(tmp_path / "none.json")})
    with pytest.raises(ArgumentError, match="names no master_server_address"):
        read_settings(None, environment=TCP)


def test_every_setting_is_named_once() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS)
