"""The faults of a soak: processes killed and frozen, objects removed, replaced and crowded out."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from soak_bare import BareObjects
from soak_cluster import CHAIN_PAGES, CLIENT_TTL_S, NUM_CHAINS, Cluster, Engine
from soak_quiet import Quiet
from soak_tally import Tally
from soak_victims import Victims

from kvferry.errors import StoreError
from kvferry.linker.eviction import evict
from kvferry.linker.store import Outcome
from kvferry.trailer import stored_bytes

PAUSE_S = 0.1
"""Mean time between two faults."""
KINDS = {
    "object removed": 150,
    "object with a flipped bit": 80,
    "object with another's bytes": 80,
    "object cut short": 30,
    "store crowded": 5,
    "owner frozen": 4,
    "master frozen": 2,
    "master restarted": 2,
    "owner restarted": 2,
    "master restarted unnoticed": 4,
    "owner remounted unnoticed": 3,
}
"""How often each kind is chosen, relative to the others."""
SAVES_S = 2.0
"""Within this, saves that were held have sent what they had left, or failed."""
_SCRATCH_BYTES = 1 << 20
_RESTART_S = 30.0


class Faults(threading.Thread):
    """Injects faults, one after the other, until it is told to stop; leaves everything running."""

    def __init__(
        self,
        seed: int,
        cluster: Cluster,
        tally: Tally,
        stopping: threading.Event,
        quiet: Quiet,
        kinds: Sequence[str],
    ) -> None:
        super().__init__(name="soak-faults", daemon=True)
        self._rng = random.Random(f"{seed}-faults")
        self._cluster = cluster
        self._tally = tally
        self._stopping = stopping
        self._quiet = quiet
        self._weights = {kind: KINDS[kind] for kind in kinds}
        self.victims = Victims(cluster.client(), tally, BareObjects(cluster.bare))
        self._store = cluster.client()
        self._scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8)
        self._store.register(self._scratch.data_ptr(), _SCRATCH_BYTES)
        self._kinds: dict[str, Callable[[], bool]] = {
            "object removed": self._remove,
            "object with a flipped bit": self._flip,
            "object with another's bytes": self._exchange,
            "object cut short": self._cut,
            "store crowded": self._crowd,
            "owner frozen": lambda: self._among_victims(self._freeze, self._cluster.owner.pid),
            "master frozen": lambda: self._freeze(self._cluster.master.pid),
            "master restarted": lambda: self._among_victims(self._restart_master),
            "owner restarted": self._restart_owner,
            "master restarted unnoticed": lambda: self._unnoticed(self._restart_master),
            "owner remounted unnoticed": lambda: self._unnoticed(self._remount_owner),
        }

    def run(self) -> None:
        """Inject faults; those that hit nothing are not counted."""
        while not self._stopping.wait(self._rng.expovariate(1 / PAUSE_S)):
            (kind,) = self._rng.choices(list(self._weights), list(self._weights.values()))
            self.inject(kind)

    def inject(self, kind: str) -> None:
        """Inject one fault of a kind."""
        try:
            if self._kinds[kind]():
                self._tally.fault(kind)
        except StoreError:
            pass  # an earlier fault is still felt
        except Exception as error:  # noqa: BLE001 - counted and shown, and the soak fails
            self._tally.unexpected(f"fault {kind!r}", error)

    # ---- processes ----

    def _restart_master(self) -> bool:
        self._cluster.master.kill()
        time.sleep(self._rng.random() * 3)
        self._until_started(self._cluster.master.start)
        return True

    def _restart_owner(self) -> bool:
        self._cluster.owner.kill()
        time.sleep(self._rng.random() * 3)
        self._until_started(self._cluster.owner.start)
        return True

    def _freeze(self, pid: int | None) -> bool:
        if pid is None:
            return False
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self._rng.choice([0.1, 0.5, 1.5, 4.0, 12.0]))
        finally:
            os.kill(pid, signal.SIGCONT)
        return True

    def _until_started(self, start: Callable[[], object]) -> None:
        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                start()
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    # ---- with objects of others ----

    def _among_victims(self, fault: Callable[..., bool], *arguments: Any) -> bool:
        """Let others store objects when a fault is over, beside what goes on in its wake."""
        if not fault(*arguments):
            return False
        self.victims.store_many()
        self._compare_victims(fault)
        return True

    def _unnoticed(self, fault: Callable[[], bool]) -> bool:
        """Let the master lose all objects between two calls, and others store some in their place.

        Saves that were begun before it then go on; none of their bytes may land in those.
        """
        if not self._is_well():  # a save that cannot begin would not be there to go on
            return False
        with self._quiet.begin() as at_rest:
            if not at_rest or not fault() or not self.victims.store_many():
                return False
        self._compare_victims(fault)
        return True

    def _is_well(self) -> bool:
        """Whether the store takes objects and every linker may ask it, after a while at most."""
        end_s = time.monotonic() + _RESTART_S
        while time.monotonic() < end_s and not self._stopping.is_set():
            if all(engine.store.available for engine in self._cluster.engines):
                is_well = self.victims.store_many()
                self.victims.let_go()
                if is_well:
                    return True
            time.sleep(0.1)
        return False

    def _compare_victims(self, fault: Callable[..., bool]) -> None:
        time.sleep(SAVES_S)
        self.victims.compare(fault.__name__.strip("_"))
        self.victims.let_go()

    def _remount_owner(self) -> bool:
        pid = self._cluster.owner.pid
        if pid is None:
            return False
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(CLIENT_TTL_S + 2)  # the master looks every second
        finally:
            os.kill(pid, signal.SIGCONT)
        return True

    # ---- objects ----

    def _remove(self) -> bool:
        results = evict(self._store, [self._aim()[0]])
        return results[0].outcome is Outcome.STORED

    def _flip(self) -> bool:
        key, size = self._aim()
        if not self._fetch(key, size):
            return False
        self._scratch[self._rng.randrange(size)] ^= 1 << self._rng.randrange(8)
        return self._replace(key, size)

    def _exchange(self) -> bool:
        """Put one page's object under another page's key: whole in itself, in the wrong place."""
        key, size = self._aim(space="full")
        other, _ = self._aim(space="full")
        return key != other and self._fetch(other, size) and self._replace(key, size)

    def _cut(self) -> bool:
        key, size = self._aim()
        return self._fetch(key, size) and self._replace(key, self._rng.randrange(1, size))

    def _crowd(self) -> bool:
        """Fill the store with other objects, for a moment."""
        keys = [f"filler-{number}" for number in range(12)]
        address = self._scratch.data_ptr()
        stored = [
            key
            for key in keys
            if self._store.put([key], [address], [_SCRATCH_BYTES])[0].outcome is Outcome.STORED
        ]
        time.sleep(self._rng.random() * 2)
        evict(self._store, keys)
        return bool(stored)

    def _aim(self, space: str | None = None) -> tuple[str, int]:
        """Return an object's key and size: of a page just looked up, or of any."""
        engine: Engine = self._rng.choice(self._cluster.engines)
        layout = engine.linker.layout
        space = space or self._rng.choice(layout.spaces)
        page = f"chain-{self._rng.randrange(NUM_CHAINS)}-{self._rng.randrange(CHAIN_PAGES)}"
        hot = list(engine.hot)
        if hot and self._rng.random() < 0.7:
            page = self._rng.choice(hot)
        (key,) = engine.linker.keys.object_keys([page], space)
        return key, stored_bytes(layout.object_bytes[space], layout.num_layers)

    def _fetch(self, key: str, size: int) -> bool:
        results = self._store.get([key], [self._scratch.data_ptr()], [size])
        return results[0].outcome is Outcome.FETCHED

    def _replace(self, key: str, size: int) -> bool:
        evict(self._store, [key])
        results = self._store.put([key], [self._scratch.data_ptr()], [size])
        return results[0].outcome is Outcome.STORED
