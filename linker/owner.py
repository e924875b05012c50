"""LocalOwner: a process that lends memory to a Mooncake store, so that objects outlive clients.

As a program: `python -m kvferry.linker.owner --master HOST:PORT --segment-bytes N`. It prints one
line of JSON once its memory is in the store, and ends on SIGTERM or SIGINT, or when its standard
input is a pipe that ends.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import kvferry.errors
from kvferry.arguments import flag, seconds, whole_number
from kvferry.errors import StoreError
from kvferry.linker.local_process import LocalProcess
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.mooncake_config import MAX_BYTES
from kvferry.linker.process import Child

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_CLOSE_TIMEOUT_S = 4  # less than the supervisor's 5 s


class LocalOwner(LocalProcess):
    """Runs an owner of a segment in a process of its own; it ends with this process at the latest.

    A context manager, or `start()` and `stop()`. After `kill()`, `start()` brings an empty segment
    back; the master forgets the killed one only after its `client_ttl` (10 s).

    Attributes:
        log_path: what the owner and Mooncake wrote; see `LocalProcess`.
        warm_bytes: how much of the segment's memory was touched beforehand; 0 before the start.
    """

    def __init__(
        self,
        master_address: str,
        segment_bytes: int,
        *,
        warm: bool = True,
        protocol: str = "tcp",
        device_name: str = "",
        local_hostname: str = "127.0.0.1",
        start_timeout_s: float = 60.0,
    ) -> None:
        """Describe an owner; nothing runs yet.

        Args:
            master_address: `host:port` of the master.
            segment_bytes: memory to lend, 1 MiB or more.
            warm: touch all of it before the store gets to know it, see `warm_segment`.
            protocol: as in `MooncakeConfig`.
            device_name: as in `MooncakeConfig`.
            local_hostname: as in `MooncakeConfig`.
            start_timeout_s: how long a start may take; warming takes about 0.4 s per GiB.
        """
        super().__init__("owner")
        segment_bytes = whole_number("segment_bytes", segment_bytes, 1 << 20, MAX_BYTES)
        MooncakeConfig(master_address, local_hostname, protocol=protocol, device_name=device_name)
        flag("warm", warm)
        start_timeout_s = seconds("start_timeout_s", start_timeout_s, above=True)
        self._arguments = [
            f"--master={master_address}",
            f"--segment-bytes={segment_bytes}",
            f"--protocol={protocol}",
            f"--device-name={device_name}",
            f"--local-hostname={local_hostname}",
            *([] if warm else ["--cold"]),
        ]
        self._start_timeout_s = start_timeout_s
        self.warm_bytes = 0

    def _start(self) -> None:
        # The child must find this very package, also where only sys.path leads to it.
        source = str(Path(kvferry.errors.__file__).parents[1])
        paths = [source, os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        command = [sys.executable, "-m", "kvferry.linker.owner", *self._arguments]
        child = self._child_of(command, stdout=PIPE, env=env)
        line = _first_line(child, time.monotonic() + self._start_timeout_s)
        if not line:
            status = child.stop()
            raise StoreError(
                f"the owner was not ready within {self._start_timeout_s} s (exit status {status}); "
                f"{self._log_end}"
            )
        self._adopt(child)
        self.warm_bytes = json.loads(line)["warm_bytes"]


def private_mappings() -> set[tuple[int, int]]:
    """Return this process's private anonymous writable mappings, as (address, end)."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if fields[1] == "rw-p" and fields[4] == "0" and len(fields) == 5:
            address, end = (int(part, 16) for part in fields[0].split("-"))
            found.add((address, end))
    return found


def warm_segment(before: set[tuple[int, int]], segment_bytes: int) -> int:
    """Fault in the memory of the segment that was mapped since `before`, contents unchanged.

    A segment's pages otherwise fault on their first write, under the first put that lands there:
    256 MiB into a cold segment took 370 to 395 ms, into a warm one 160 to 215 ms (TCP loopback);
    warming took 0.2 s for 512 MiB.

    Returns:
        The bytes that are resident now; 0 where the kernel is older than Linux 5.14.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = 0
    for address, end in private_mappings() - before:
        if end - address >= segment_bytes and (
            madvise(address, end - address, _MADV_POPULATE_WRITE) == 0
        ):
            num_bytes += end - address
    return min(num_bytes, segment_bytes)


def _first_line(child: Child, deadline_s: float) -> str:
    """Return the program's first line of output; empty if it ends or is late."""
    output = child.stdout
    assert output is not None
    received = b""
    while not received.endswith(b"\n"):
        ready, _, _ = select.select([output], [], [], max(0.0, deadline_s - time.monotonic()))
        part = os.read(output.fileno(), 4096) if ready else b""
        if not part:
            return ""
        received += part
    return received.decode()


def _wait_for_end(received: list[int], wake_out: int) -> None:
    watched = [wake_out]
    if stat.S_ISFIFO(os.fstat(0).st_mode):  # /dev/null or a closed terminal says nothing
        watched.append(0)
    while not received:
        ready, _, _ = select.select(watched, [], [], 5.0)
        if 0 in ready and not os.read(0, 4096):
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Lend memory until told to end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvferry.linker.owner", description=__doc__)
    parser.add_argument("--master", required=True, help="host:port of the master")
    parser.add_argument("--segment-bytes", required=True, type=int, help="memory to lend")
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--device-name", default="")
    parser.add_argument("--local-hostname", default="127.0.0.1")
    parser.add_argument("--cold", action="store_true", help="do not touch the memory beforehand")
    parsed = parser.parse_args(arguments)

    before = private_mappings()
    store = MooncakeStore(
        MooncakeConfig(
            master_address=parsed.master,
            segment_bytes=parsed.segment_bytes,
            protocol=parsed.protocol,
            device_name=parsed.device_name,
            local_hostname=parsed.local_hostname,
        )
    )
    warm_bytes = 0 if parsed.cold else warm_segment(before, parsed.segment_bytes)

    # After the setup: Mooncake installs handlers of its own.
    received: list[int] = []
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: received.append(got))

    ready = {"segment_bytes": parsed.segment_bytes, "warm_bytes": warm_bytes}
    print(json.dumps(ready), flush=True)  # noqa: T201
    _wait_for_end(received, wake_out)
    # Closing holds the GIL, 13 s if the master is down: only the kernel can bound it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CLOSE_TIMEOUT_S)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
