"""Settings of the whole run, a cluster per file, and a bed per test."""

import faulthandler
import os
from collections.abc import Callable, Iterator
from typing import Any

# Before Mooncake and Triton are loaded: both read these once. A frozen peer costs 2 s, a master 3.
os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = "2"
os.environ["MC_RPC_TIMEOUT_MS"] = "3000"
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from bed import Bed
from cluster import Cluster, Filler
from forms import FORMS, SAVE_FORMS, Form

from kvferry.linker import crew, hung_owners, patience

TEST_LIMIT_S = 120.0
DRAIN_S = 1.0
"""Instead of a minute: how long a span is kept after a call that failed slowly."""

HOLD_S = 1.0
"""Instead of 3: how long nothing is asked of an owner that did not answer."""

LAST_S = 1.0
"""Instead of 5: what `close` gives its threads after it has failed their transfers."""


@pytest.fixture(scope="session")
def real_stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    """The standard error output that pytest itself writes to."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def limit(real_stderr: int) -> Iterator[None]:
    """End the run with the stacks of all threads where a test hangs."""
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "DRAIN_S", DRAIN_S)
    monkeypatch.setattr(hung_owners, "HOLD_S", HOLD_S)
    monkeypatch.setattr(crew, "_LAST_S", LAST_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A master and an owner, with times that a test can outwait; whole again after each test."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """Each way to move pages."""
    chosen: Form = request.param
    return chosen


@pytest.fixture
def make_bed(cluster: Cluster) -> Iterator[Callable[..., Bed]]:
    """Make beds that are closed, and looked at, after the test."""
    beds: list[Bed] = []

    def make(**settings: Any) -> Bed:
        beds.append(Bed(cluster, torch.device("cpu"), **settings))
        return beds[-1]

    yield make
    cluster.heal()  # also where a test has failed
    for bed in beds:
        bed.close()


@pytest.fixture
def filler(cluster: Cluster) -> Iterator[Filler]:
    """Something to fill the pool with, that is removed after the test."""
    filler = Filler(cluster.client())
    yield filler
    filler.close()


@pytest.fixture
def bed(make_bed: Callable[..., Bed]) -> Bed:
    """One with ordinary settings."""
    return make_bed()


@pytest.fixture(params=SAVE_FORMS, ids=lambda form: form.name)
def save_form(request: pytest.FixtureRequest) -> Form:
    """Each way to save."""
    chosen: Form = request.param
    return chosen


@pytest.fixture(params=[form for form in FORMS if form.by_layer], ids=lambda form: form.name)
def layered(request: pytest.FixtureRequest) -> Form:
    """Each way to move layers one group after another."""
    chosen: Form = request.param
    return chosen
