"""`linker_extra_config` of SGLang's launch line: Mooncake's settings and ours, checked by name.

Mooncake's are found where SGLang's own linker finds them, in its order: in `linker_extra_config`
if that names a master, else in the JSON file of SGLANG_HICACHE_MOONCAKE_CONFIG_PATH, else in the
environment; with SGLang's names and defaults. Ours stand in `linker_extra_config` alone.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.errors import ArgumentError
from kvferry.linker.config import LinkerConfig
from kvferry.linker.mooncake_config import LIMITS, MooncakeConfig
from kvferry.linker.settings import bytes_of, file_values, values_of

CONFIG_FILE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"

_VARIABLES = {
    "master_server_address": ("MOONCAKE_MASTER", None),
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb"),
    "protocol": ("MOONCAKE_PROTOCOL", "rdma"),
    "device_name": ("MOONCAKE_DEVICE", ""),
    "tenant_id": ("MOONCAKE_TENANT_ID", "default"),
    "standalone_storage": ("MOONCAKE_STANDALONE_STORAGE", False),
    "client_server_address": ("MOONCAKE_CLIENT", None),
}
"""SGLang's name of a setting: the variable that may hold it, and its default."""

_UNUSED = ("master_metrics_port", "check_server", "enable_ssd_offload", "ssd_offload_path")
"""Settings of SGLang's own client that mean nothing to kvferry's: allowed, and not read."""

_LINKER = {field.name: field for field in fields(LinkerConfig) if field.name != "replicated"}
_LIMITS = {field.name: field for field in fields(MooncakeConfig) if field.name in LIMITS}


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of the adapter alone.

    Attributes:
        staging_bytes: size of the staging buffer of each rank, on its GPU by default.
        staging_memory: `device`, `pinned`, `cpu` or `auto`; see `StagingBuffer`.
        model: the model's id in keys; SGLang's `model_path` if empty. Set it where engines find the
            same model under different paths.
        revision: of the weights; SGLang's `revision` if empty.
        generation: of the weights that the engine starts with; `weight_version` if empty.
        extra_backend_tag: as SGLang's own linker has it: keeps apart who shares a store.
        stats_interval_s: least time between two lines about traffic in the log; 0 for none.
        share_reads: where tensor-parallel ranks have the same objects, each reads a part of them
            and sends it to the others; see `shared_reads`.
        allow_pipeline: serve pipeline-parallel models all the same; see `check_pipeline`.
        check_slots: check every transfer's slots one by one. For tests: on a GPU it waits for it.
    """

    staging_bytes: int = 512 << 20
    staging_memory: str = "auto"
    model: str = ""
    revision: str = ""
    generation: str = ""
    extra_backend_tag: str = ""
    stats_interval_s: float = 60.0
    check_slots: bool = False
    share_reads: bool = False
    allow_pipeline: bool = False


_ADAPTER = {field.name: field for field in fields(AdapterConfig)}
SETTINGS = (*_VARIABLES, *_UNUSED, *_LINKER, *_LIMITS, *_ADAPTER)
"""All names that `linker_extra_config` may hold."""


@dataclass(frozen=True)
class SGLangSettings:
    """What `linker_extra_config` and the environment come to, for one rank.

    Attributes:
        adapter: the adapter's own settings.
        linker: the linker's, its namespace made of namespace, tenant and tag.
        mooncake: the client's.
    """

    adapter: AdapterConfig
    linker: LinkerConfig
    mooncake: MooncakeConfig


def read_settings(
    extra_config: Mapping[str, Any] | None,
    *,
    tp_rank: int = 0,
    num_ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> SGLangSettings:
    """Check and merge all settings.

    Args:
        extra_config: `linker_extra_config`, or nothing.
        tp_rank: picks this rank's entry where `device_name` is a JSON object of ranks.
        num_ranks: that share `global_segment_size`.
        environment: instead of `os.environ`.

    Raises:
        ArgumentError: an unknown name, a value of a wrong kind, no master, or a mode of SGLang's
            client that kvferry's has not.
    """
    extra = dict(extra_config or {})
    unknown = sorted(set(extra) - set(SETTINGS))
    if unknown:
        raise ArgumentError(
            f"linker_extra_config has {unknown}, wanted names among {sorted(SETTINGS)}"
        )
    adapter = AdapterConfig(**values_of(extra, _ADAPTER))
    store = _store_values(extra, os.environ if environment is None else environment)
    namespace = extra.get("namespace", LinkerConfig.namespace)
    tenant = str(store["tenant_id"] or "default").strip() or "default"
    parts = [namespace, *([] if tenant == "default" else [tenant]), adapter.extra_backend_tag]
    linker = {
        **values_of(extra, _LINKER),
        "namespace": ".".join(str(part) for part in parts if part),
    }
    if linker.get("groups") is not None:
        linker["groups"] = tuple((int(first), int(end)) for first, end in linker["groups"])
    mooncake = MooncakeConfig(
        master_address=str(store["master_server_address"]),
        local_hostname=str(store["local_hostname"]),
        metadata=str(store["metadata_server"]),
        protocol=str(store["protocol"]),
        device_name=_device_name(str(store["device_name"] or ""), tp_rank),
        segment_bytes=bytes_of("global_segment_size", store["global_segment_size"]) // num_ranks,
        **values_of(extra, _LIMITS),
    )
    return SGLangSettings(adapter, LinkerConfig(**linker), mooncake)


def _store_values(extra: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Mooncake's settings by SGLang's names, from the first source that has a master."""
    source: dict[str, Any] = dict(extra)
    where = "linker_extra_config"
    path = environment.get(CONFIG_FILE)
    named = any(source.get(key) for key in ("master_server_address", "client_server_address"))
    if not named and path:
        source, where = (
            {**extra, **file_values(CONFIG_FILE, Path(path), _VARIABLES)},
            f"{CONFIG_FILE}={path}",
        )
    values = {}
    # A host's own name is its own, whatever a launch line says that many hosts share.
    own_name = environment.get("MOONCAKE_LOCAL_HOSTNAME") or environment.get("LOCAL_HOSTNAME")
    for name, (variable, default) in _VARIABLES.items():
        value = source.get(name)
        if name == "local_hostname":
            value = own_name or value
        # No source has to repeat what is set here.
        elif environment.get(variable) and value is None:
            value = environment[variable]
        values[name] = default if value is None else value
    if values["client_server_address"] or _is_true(values["standalone_storage"]):
        raise ArgumentError(
            "standalone_storage and client_server_address ask for a Mooncake client in another "
            "process, which can only reach memory that it mapped itself; wanted a client in this "
            "process, that is master_server_address alone"
        )
    if not values["master_server_address"]:
        raise ArgumentError(
            f"{where} names no master_server_address and MOONCAKE_MASTER is not set, wanted the "
            "master's host:port"
        )
    return values


def _device_name(value: str, tp_rank: int) -> str:
    """Return this rank's RDMA devices; `{"0": "mlx5_0", "1": "mlx5_1"}` gives each its own."""
    if not value.strip().startswith("{"):
        return value
    try:
        by_rank = json.loads(value)
    except ValueError as error:
        raise ArgumentError(f"device_name is {value!r}, which is no JSON: {error}") from error
    if str(tp_rank) not in by_rank:
        raise ArgumentError(f"device_name is {value!r}, wanted an entry for rank {tp_rank} too")
    return str(by_rank[str(tp_rank)])


def _is_true(value: Any) -> bool:
    return str(value).strip().lower() in ("1", "true", "yes", "y", "on")
