"""What a Mooncake client is to be: addresses, transport, memory, limits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.arguments import mapping, number, seconds, settle, shown, string, whole_number
from kvferry.errors import ArgumentError

MAX_BYTES = 2**63 - 1
"""More than anybody has; it fits 64 bits."""

MAX_RPC_TIMEOUT_S = 1e6
"""Mooncake keeps its milliseconds in 32 bits."""

_RDMA_DEVICES = Path("/sys/class/infiniband")

_ENVIRONMENT = {
    "MOONCAKE_MASTER": "master_address",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata",
}

LIMITS = (
    "lease_ttl_s", "max_call_bytes", "max_call_objects", "put_start_discard_s",
    "put_start_release_s", "client_ttl_s", "session_max_age_s", "rpc_timeout_s",
)  # fmt: skip
"""Settings that are positive numbers."""


@dataclass(frozen=True)
class MooncakeConfig:
    """How to reach Mooncake, and the limits that keep every call inside its lease.

    Attributes:
        master_address: `host:port` of the master, or the address of an HA backend.
        local_hostname: a name of this host that the other hosts can reach.
        metadata: `P2PHANDSHAKE`, or the metadata server's address; the same on all clients.
        protocol: `tcp`, `rdma`, or another transport that the installed wheel knows.
        device_name: RDMA devices, comma separated; empty lets Mooncake choose.
        segment_bytes: memory that this process lends to the store. Its objects go when the process
            goes, so prefer owners in processes of their own.
        local_buffer_bytes: Mooncake's own copy buffer; kvferry makes only calls without copies,
            which need none.
        lease_ttl_s: the master's `default_kv_lease_ttl`, or less; never more than the master's.
        max_call_bytes: a longer list of objects is split into several calls.
        max_call_objects: likewise, by their number.
        put_start_discard_s, put_start_release_s, client_ttl_s: the master's own settings
            `put_start_discard_timeout_sec`, `put_start_release_timeout_sec` and `client_ttl`, or
            less: when it lets another writer have a key that is being written, gives such a key's
            memory away, and forgets an owner that it does not hear of.
        session_max_age_s: how long a put session may be written and ended; 0.8 times the shortest
            of these three by default, and never longer than it.
        rpc_timeout_s: how long one request to a master that is frozen may block. Applies to the
            whole process, and only where MC_RPC_TIMEOUT_MS is not set yet.
    """

    master_address: str
    local_hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    segment_bytes: int = 0
    local_buffer_bytes: int = 0
    lease_ttl_s: float = 10.0
    max_call_bytes: int = 256 << 20
    max_call_objects: int = 1000
    put_start_discard_s: float = 30.0
    put_start_release_s: float = 600.0
    client_ttl_s: float = 10.0
    session_max_age_s: float | None = None
    rpc_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        settle(self, "master_address local_hostname metadata protocol", string)
        settle(self, "device_name", string, least=0)
        for name in ("master_address", "local_hostname", "metadata", "protocol"):
            if not getattr(self, name).strip():
                raise ArgumentError(f"{name} is {getattr(self, name)!r}, wanted more than blanks")
        if "://" not in self.master_address:
            self.master_endpoint()
        settle(self, "segment_bytes local_buffer_bytes", whole_number, 0, MAX_BYTES)
        settle(self, "max_call_bytes max_call_objects", whole_number, 1, MAX_BYTES)
        settle(
            self,
            "lease_ttl_s put_start_discard_s put_start_release_s client_ttl_s",
            seconds,
            above=True,
        )
        if self.session_max_age_s is not None:
            settle(self, "session_max_age_s", seconds, above=True)
        settle(self, "rpc_timeout_s", number, above=True, most=MAX_RPC_TIMEOUT_S)
        if self.session_age_s > self._shortest_s:
            raise ArgumentError(
                f"session_max_age_s is {self.session_max_age_s:g}, wanted at most "
                f"{self._shortest_s:g}: the shortest of put_start_discard_s, put_start_release_s "
                "and client_ttl_s"
            )
        if self.protocol == "rdma":
            self._check_rdma()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "MooncakeConfig":
        """Read MOONCAKE_MASTER, _PROTOCOL, _DEVICE, _LOCAL_HOSTNAME and _TE_META_DATA_SERVER.

        Args:
            environment: instead of `os.environ`. Only MOONCAKE_MASTER is required; an empty
                variable counts as unset.
        """
        source = os.environ if environment is None else environment
        mapping("environment", source, "a mapping of names to strings")
        values = {
            field: source[variable]
            for variable, field in _ENVIRONMENT.items()
            if source.get(variable)
        }
        if "master_address" not in values:
            raise ArgumentError("MOONCAKE_MASTER is not set, wanted the master's host:port")
        for variable, field in _ENVIRONMENT.items():
            if field in values:
                string(variable, values[field])
        return cls(**values)  # type: ignore[arg-type]

    @property
    def session_age_s(self) -> float:
        """How long a put session may be written and ended, in seconds."""
        given_s = self.session_max_age_s
        return 0.8 * self._shortest_s if given_s is None else given_s

    @property
    def _shortest_s(self) -> float:
        return min(self.put_start_discard_s, self.put_start_release_s, self.client_ttl_s)

    def master_endpoint(self) -> tuple[str, int] | None:
        """Return the master's host and port; None when an HA backend's address is configured."""
        if "://" in self.master_address:
            return None
        host, colon, port = self.master_address.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ArgumentError(f"master_address is {shown(self.master_address)}, wanted host:port")
        return host.strip("[]"), int(port)

    def _check_rdma(self) -> None:
        # Mooncake falls back to TCP without a word, and everything is slow for no visible reason.
        present = sorted(d.name for d in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []
        if not present:
            raise ArgumentError(
                f"protocol is 'rdma', and {_RDMA_DEVICES} shows no RDMA device here; load the "
                "driver, or ask for protocol 'tcp'"
            )
        absent = [name for name in self.device_name.split(",") if name and name not in present]
        if absent:
            raise ArgumentError(f"device_name {absent} not among the RDMA devices here: {present}")
