"""LocalMaster: a Mooncake master of one's own on loopback, for tests, trials and benchmarks."""

import contextlib
import importlib.util
import os
import random
import socket
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kvferry.arguments import seconds, sequence, string
from kvferry.errors import StoreError
from kvferry.linker.local_process import LocalProcess

_HOST = "127.0.0.1"
# Below the kernel's ephemeral ports, so that no outgoing connection takes the port between a kill
# and a restart; above the 12300 to 17000 where Mooncake's clients pick theirs.
_PORTS = range(20000, 32000)
_NUM_TRIES = 5
_POLL_S = 0.02


def master_program() -> Path:
    """Return the path of the wheel's `mooncake_master`; StoreError if there is none."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return program
    raise StoreError(
        "no mooncake_master here: install one of kvferry's extras, kvferry[cpu], kvferry[cu12] "
        "or kvferry[cu13]"
    )


class LocalMaster(LocalProcess):
    """Runs a Mooncake master on free ports of 127.0.0.1; ends with this process at the latest.

    A context manager, or `start()` and `stop()`. After `kill()`, `start()` brings an empty master
    back at the same address.

    Attributes:
        log_path: the master's log; see `LocalProcess`.
        lease_ttl_s: how long a lookup or read protects an object from eviction.
    """

    def __init__(
        self,
        *,
        lease_ttl_s: float = 10.0,
        extra_flags: Sequence[str] = (),
        start_timeout_s: float = 15.0,
    ) -> None:
        """Describe a master; nothing runs yet.

        Args:
            lease_ttl_s: the master's `--default_kv_lease_ttl`.
            extra_flags: more flags of `mooncake_master`, for example `--client_ttl=5`.
            start_timeout_s: how long a start may take, all tries together.
        """
        super().__init__("master")
        self.lease_ttl_s = seconds("lease_ttl_s", lease_ttl_s, above=True)
        self._extra_flags = [
            string("extra_flags", each) for each in sequence("extra_flags", extra_flags, "flags")
        ]
        self._start_timeout_s = seconds("start_timeout_s", start_timeout_s, above=True)
        self._ports: tuple[int, int] | None = None  # RPC, metrics; fixed by the first good start

    @property
    def address(self) -> str:
        """`127.0.0.1:port`, what a client's `master_address` wants."""
        return f"{_HOST}:{self._started_ports()[0]}"

    @property
    def metrics_url(self) -> str:
        """The master's HTTP root, with /metrics and /health."""
        return f"http://{_HOST}:{self._started_ports()[1]}"

    def _start(self) -> None:
        program = master_program()
        deadline_s = time.monotonic() + self._start_timeout_s
        for _ in range(_NUM_TRIES):
            ports = self._ports or _free_ports()
            if self._start_on(program, ports, deadline_s):
                self._ports = ports
                return
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.2)  # a port of a master that was just killed takes a moment
        raise StoreError(
            f"mooncake_master did not serve on {_HOST}:{ports[0]} within "
            f"{self._start_timeout_s} s; {self._log_end}"
        )

    def _started_ports(self) -> tuple[int, int]:
        if self._ports is None:
            raise StoreError("the master was not started yet, so it has no address")
        return self._ports

    def _start_on(self, program: Path, ports: tuple[int, int], deadline_s: float) -> bool:
        """Start one process on these ports; False, with the process ended, if it doesn't serve."""
        command = [
            str(program),
            f"--rpc_address={_HOST}",
            f"--rpc_port={ports[0]}",
            f"--metrics_host={_HOST}",
            f"--metrics_port={ports[1]}",
            f"--default_kv_lease_ttl={round(self.lease_ttl_s * 1000)}",
            "--logtostderr=1",
            *self._extra_flags,
        ]
        child = self._child_of(command)
        while child.poll() is None and time.monotonic() < deadline_s:
            # Where a port was taken, somebody else answers, and ours lives on for a moment.
            if _listens(child.pid, ports[0]) and _healthy(ports[1]):
                self._adopt(child)
                return True
            time.sleep(_POLL_S)
        child.stop()
        return False


def _free_ports() -> tuple[int, int]:
    """Return two ports that nobody listens on; another program may still take them first."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((_HOST, port))
            found.append(port)
        if len(found) == 2:
            return found[0], found[1]
    raise StoreError(f"no two free ports on {_HOST} in {_PORTS.start} .. {_PORTS.stop - 1}")


def _listens(pid: int | None, port: int) -> bool:
    """Whether this very process listens on a port of 127.0.0.1."""
    local = f"0100007F:{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1] == local and line[3] == "0A"}
    if pid is None or not sockets:
        return False
    try:
        return any(os.readlink(link) in sockets for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended, or closed a file meanwhile
        return False


def _healthy(port: int) -> bool:
    # No proxy: an environment's http_proxy does not reach this loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{_HOST}:{port}/health", timeout=1.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
