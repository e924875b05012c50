"""Fixtures that several test files share."""

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

# Before any kernel is imported: without a GPU they run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from linker_bed import Bed
from rank_processes import Ranks, ranks_of
from rank_worker import Worker

from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner

settings.register_profile("core", max_examples=200, deadline=None)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.register_profile("few", max_examples=30, deadline=None)
# A mutant is caught by the first example that fails; a smaller one is of no use.
settings.register_profile(
    "mutants", max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("KVFERRY_HYPOTHESIS", "core"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where pools are: the first GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# ---- Mooncake: a real master and owner on loopback, shared by the whole run ----


class Memory:
    """Registered memory for a test: a numpy array, and the addresses of its parts."""

    def __init__(self, store: MooncakeStore, num_bytes: int) -> None:
        self.store = store
        self.bytes = np.zeros(num_bytes, dtype=np.uint8)
        store.register(self.address(0), num_bytes)

    def address(self, offset: int) -> int:
        return int(self.bytes.ctypes.data) + offset

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(
            0, 256, self.bytes.size, dtype=np.uint8
        )

    def close(self) -> None:
        if not self.store.closed:
            self.store.unregister(self.address(0))


@pytest.fixture(scope="session")
def local_master() -> Iterator[LocalMaster]:
    with LocalMaster() as master:
        yield master


@pytest.fixture(scope="session")
def local_owner(local_master: LocalMaster) -> Iterator[LocalOwner]:
    with LocalOwner(local_master.address, 256 << 20) as owner:
        yield owner


@pytest.fixture(scope="session")
def mooncake_store(local_master: LocalMaster, local_owner: LocalOwner) -> Iterator[MooncakeStore]:
    """A client that nobody closes or breaks; tests that do make their own."""
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        yield store


@pytest.fixture(scope="session")
def rank_pair(local_master: LocalMaster, local_owner: LocalOwner) -> Iterator[Ranks]:
    """Two ranks of an engine, each in a process of its own."""
    with ranks_of(Worker, 2, local_master.address) as ranks:
        yield ranks


@pytest.fixture
def make_memory() -> Iterator[Callable[[MooncakeStore, int], Memory]]:
    """Register memory with a store for the time of one test."""
    made: list[Memory] = []

    def make(store: MooncakeStore, num_bytes: int) -> Memory:
        made.append(Memory(store, num_bytes))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Make keys that no other test uses."""
    return lambda name: f"{request.node.nodeid}/{name}"


@pytest.fixture
def bed(mooncake_store: MooncakeStore, device: torch.device) -> Iterator[Bed]:
    bed = Bed(mooncake_store, device)
    yield bed
    bed.store.before.clear()
    for linker in bed.linkers:
        linker.close(20)
