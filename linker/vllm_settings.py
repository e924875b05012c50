"""`kv_connector_extra_config` of vLLM's launch line: Mooncake's settings and ours, checked by name.

Mooncake's are found in `kv_connector_extra_config` if that names a master, else in the JSON file of
MOONCAKE_CONFIG_PATH, as for vLLM's own Mooncake connectors and with their names, else in the
variables that kvferry reads everywhere.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry.errors import ArgumentError
from kvferry.linker.config import LinkerConfig
from kvferry.linker.mooncake_config import LIMITS, MooncakeConfig
from kvferry.linker.settings import bytes_of, file_values, values_of

CONFIG_FILE = "MOONCAKE_CONFIG_PATH"

_STORE: dict[str, tuple[str, Any]] = {
    "master_server_address": ("MOONCAKE_MASTER", None),
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1"),
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
    "protocol": ("MOONCAKE_PROTOCOL", "rdma"),
    "device_name": ("MOONCAKE_DEVICE", ""),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", 0),
    "tenant_id": ("MOONCAKE_TENANT_ID", "default"),
}
"""vLLM's name of a setting: the variable that may hold it, and its default."""

_UNUSED = ("mode", "local_buffer_size", "enable_offload")
"""Settings of vLLM's own clients that mean nothing to kvferry's: allowed, and not read."""

LOADS = ("async", "layerwise")
SAVES = ("whole", "layerwise")

_LINKER = {field.name: field for field in fields(LinkerConfig) if field.name != "replicated"}
_LIMITS = {field.name: field for field in fields(MooncakeConfig) if field.name in LIMITS}


@dataclass(frozen=True)
class ConnectorConfig:
    """Settings of the connector alone.

    Attributes:
        staging_bytes: of each worker, on its GPU by default; its cache groups share it out.
        staging_memory: `device`, `pinned`, `cpu` or `auto`; see `StagingBuffer`.
        model: the model's id in keys; vLLM's if empty.
        revision: of the weights; vLLM's if empty.
        generation: of the weights, set by hand, and kept. See `Generation`.
        loads: `async`: between steps; or `layerwise`: within the step that needs them, for models
            of one cache group.
        saves: `whole`: once a step has run; or `layerwise`: as it runs.
        min_load_tokens: shorter hits are computed instead.
        max_held_share: of all blocks, what saves in flight may hold; what is beyond is not saved.
    """

    staging_bytes: int = 512 << 20
    staging_memory: str = "auto"
    model: str = ""
    revision: str = ""
    generation: str = ""
    loads: str = "async"
    saves: str = "whole"
    min_load_tokens: int = 0
    max_held_share: float = 0.25

    def __post_init__(self) -> None:
        for name, wanted in (("loads", LOADS), ("saves", SAVES)):
            if getattr(self, name) not in wanted:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}, wanted one of {wanted}")
        if not 0 < self.max_held_share <= 1:
            raise ArgumentError(f"max_held_share is {self.max_held_share}, wanted 0 < share <= 1")

    @property
    def by_layer(self) -> bool:
        """Whether vLLM must call the connector for every layer."""
        return "layerwise" in (self.loads, self.saves)


_CONNECTOR = {field.name: field for field in fields(ConnectorConfig)}
SETTINGS = (*_STORE, *_UNUSED, *_LINKER, *_LIMITS, *_CONNECTOR)
"""All names that `kv_connector_extra_config` may hold."""


@dataclass(frozen=True)
class VllmSettings:
    """What `kv_connector_extra_config` and the environment come to.

    Attributes:
        connector: the connector's own settings.
        linker: the linkers', the namespace made of namespace and tenant.
        mooncake: the client's.
    """

    connector: ConnectorConfig
    linker: LinkerConfig
    mooncake: MooncakeConfig


def read_connector_config(extra_config: Mapping[str, Any] | None) -> ConnectorConfig:
    """Return the connector's own settings.

    Raises:
        ArgumentError: an unknown name, or a value of a wrong kind.
    """
    extra = dict(extra_config or {})
    unknown = sorted(set(extra) - set(SETTINGS))
    if unknown:
        raise ArgumentError(
            f"kv_connector_extra_config has {unknown}, wanted names among {sorted(SETTINGS)}"
        )
    return ConnectorConfig(**values_of(extra, _CONNECTOR))


def read_settings(
    extra_config: Mapping[str, Any] | None, *, environment: Mapping[str, str] | None = None
) -> VllmSettings:
    """Check and merge all settings.

    Args:
        extra_config: `kv_connector_extra_config`, or nothing.
        environment: instead of `os.environ`.

    Raises:
        ArgumentError: an unknown name, a value of a wrong kind, or no master.
    """
    connector = read_connector_config(extra_config)
    extra = dict(extra_config or {})
    store = _store_values(extra, os.environ if environment is None else environment)
    namespace = str(extra.get("namespace", LinkerConfig.namespace))
    tenant = str(store["tenant_id"] or "default").strip() or "default"
    linker = {
        **values_of(extra, _LINKER),
        "namespace": namespace if tenant == "default" else f"{namespace}.{tenant}",
    }
    if linker.get("groups") is not None:
        linker["groups"] = tuple((int(first), int(end)) for first, end in linker["groups"])
    mooncake = MooncakeConfig(
        master_address=str(store["master_server_address"]),
        local_hostname=str(store["local_hostname"]),
        metadata=str(store["metadata_server"]) or "P2PHANDSHAKE",
        protocol=str(store["protocol"]),
        device_name=str(store["device_name"] or ""),
        segment_bytes=bytes_of("global_segment_size", store["global_segment_size"]),
        **values_of(extra, _LIMITS),
    )
    return VllmSettings(connector, LinkerConfig(**linker), mooncake)


def _store_values(extra: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    source, where = dict(extra), "kv_connector_extra_config"
    path = environment.get(CONFIG_FILE)
    if not source.get("master_server_address") and path:
        source, where = (
            {**file_values(CONFIG_FILE, Path(path), _STORE), **extra},
            f"{CONFIG_FILE}={path}",
        )
    values = {
        name: source[name] if source.get(name) is not None else environment.get(variable) or default
        for name, (variable, default) in _STORE.items()
    }
    if not values["master_server_address"]:
        raise ArgumentError(
            f"{where} names no master_server_address and MOONCAKE_MASTER is not set, wanted the "
            "master's host:port"
        )
    return values
