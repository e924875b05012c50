"""A Mooncake master and owner of one's own, to be killed, frozen and brought back."""

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kvferry.errors import StoreError
from kvferry.linker.eviction import evict
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome

LEASE_TTL_S = 1.0
DISCARD_S = 1
"""After this, another client may take over a key that is open for writing."""
CLIENT_TTL_S = 2
"""After this, the master forgets an owner that is gone."""
LONG = {"put_start_discard_s": 120.0, "client_ttl_s": 120.0}
"""What clients take these two for: tests want them to be late."""
SEGMENT_BYTES = 16 << 20
FILLER_BYTES = 1 << 18


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for a condition; fail if it does not come true in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.02)


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if the body takes longer than its bound."""
    begin_s = time.monotonic()
    yield
    taken_s = time.monotonic() - begin_s
    assert taken_s < limit_s, f"took {taken_s:.1f} s, wanted at most {limit_s:g} s"


class Filler:
    """Fills the pool with leased objects of its own: others are evicted, then there is no room."""

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store
        self._staging = StagingBuffer(FILLER_BYTES, device=torch.device("cpu"))
        self._staging.register(store)
        self._keys: list[str] = []
        self._leased_s = time.monotonic()

    def put(self, num_bytes: int = FILLER_BYTES) -> bool:
        """Store one more object; False if there is no room for it."""
        key = f"filler-{time.monotonic_ns()}"
        (result,) = self._store.put([key], [self._staging.address], [num_bytes])
        if result.outcome is Outcome.STORED:  # and its lookup has leased it
            self._keys.append(key)
        if time.monotonic() - self._leased_s > LEASE_TTL_S / 3:
            self.lease()
        return result.outcome is Outcome.STORED

    def fill(self) -> None:
        """Store objects until there is no room, and for as long as their leases last."""
        for num_bytes in (FILLER_BYTES, FILLER_BYTES >> 5, 1 << 10):  # the gaps too
            while self.put(num_bytes):
                pass
        self.lease()

    def lease(self) -> None:
        """Renew all leases."""
        self._leased_s = time.monotonic()
        self._store.exists(self._keys)

    def close(self) -> None:
        """Remove the objects. Repeating it does nothing."""
        evict(self._store, self._keys)
        self._keys.clear()
        self._staging.unregister()


class Cluster:
    """A master, an owner and clients on loopback; a context manager.

    Attributes:
        master: the master.
        owner: the owner of the only segment.
        store: a client for the beds.
    """

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self.master = LocalMaster(
            lease_ttl_s=LEASE_TTL_S,
            extra_flags=[
                f"--client_ttl={CLIENT_TTL_S}",
                f"--put_start_discard_timeout_sec={DISCARD_S}",
                *flags,
            ],
        ).start()
        self.owner = LocalOwner(self.master.address, SEGMENT_BYTES).start()
        self._clients: list[MooncakeStore] = []
        self.store = self.client()

    def client(self, **settings: Any) -> MooncakeStore:
        """Connect one more client."""
        settings = {"lease_ttl_s": LEASE_TTL_S, "session_max_age_s": 20.0, **LONG, **settings}
        self._clients.append(MooncakeStore(MooncakeConfig(self.master.address, **settings)))
        self._clients[-1]._calls.breaker._longest_pause_s = 0.5  # of 5: tests wait for the probe
        return self._clients[-1]

    @contextlib.contextmanager
    def frozen(self, which: LocalMaster | LocalOwner) -> Iterator[Callable[[], None]]:
        """Stop a process without ending it, until the end of the body or a call of what is given.

        As a host that hangs, or a network that swallows everything.
        """
        pid = which.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())))
        try:
            yield lambda: os.kill(pid, signal.SIGCONT)
        finally:
            os.kill(pid, signal.SIGCONT)

    def ask(self, path: str) -> str:
        """Return what the master's HTTP interface says; empty if it says no."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.master.metrics_url}/{path}", timeout=5) as reply:
                return str(reply.read().decode())
        except OSError:
            return ""

    def heal(self) -> None:
        """Bring back what is gone, and wait until objects can be stored and read again."""
        self.master.start()
        self.owner.start()
        wait_until(lambda: self.store.available)
        wait_until(lambda: len(self.ask("get_all_segments").split()) == 1)  # no dead one
        staging = StagingBuffer(1 << 12, device=torch.device("cpu"))
        staging.register(self.store)
        numbers = iter(range(10**6))

        def works() -> bool:
            key = f"heal-{time.monotonic_ns()}-{next(numbers)}"
            lists = ([key], [staging.address], [1 << 12])
            try:
                return (
                    self.store.put(*lists)[0].outcome is Outcome.STORED
                    and self.store.get(*lists)[0].outcome is Outcome.FETCHED
                )
            except StoreError:
                return False

        wait_until(works)
        staging.unregister()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.close()
        self.owner.stop()
        self.master.stop()


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
