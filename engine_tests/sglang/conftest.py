"""Loads the real SGLang on a CPU, before any test imports it."""

import faulthandler
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # some of SGLang's pools are written by Triton kernels
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling how FP4 is read takes longer than all tests
os.environ["HF_HUB_OFFLINE"] = "1"  # there is no model, and nobody is to look for one
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import standins  # noqa: E402
from standins import TINY_MODEL  # noqa: E402

standins.install()
warnings.filterwarnings("ignore", module="sglang")

from hooked import Hooked  # noqa: E402
from kinds import KINDS  # noqa: E402
from sglang.srt.arg_groups import overrides  # noqa: E402
from sglang.srt.mem_cache.cpp_utils import native_hash  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from tree import Engine  # noqa: E402

from kvferry.linker import sglang  # noqa: E402
from kvferry.linker.master import LocalMaster  # noqa: E402
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore  # noqa: E402
from kvferry.linker.owner import LocalOwner  # noqa: E402
from kvferry.linker.sglang_ranks import Ranks  # noqa: E402

native_hash._load_native_hash_module = lambda: standins.PageHash
TEST_LIMIT_S = 300.0
_names = itertools.count()


@pytest.fixture
def configured() -> Callable[..., Any]:
    """SGLang's configuration with other server arguments, for as long as it is entered."""
    return lambda **args: get_context().override_server_args(**{"model_path": TINY_MODEL, **args})


@pytest.fixture(autouse=True)
def _sglang_context(
    monkeypatch: pytest.MonkeyPatch, configured: Callable[..., Any]
) -> Iterator[None]:
    """The configuration that the linker, and some pools, ask for while they are made."""
    monkeypatch.setattr(overrides, "mamba_cache_chunk_size", lambda _: 64)  # a model would say it
    with configured(), get_parallel().override(attn_dcp_size=1):
        yield


@pytest.fixture(scope="session")
def real_stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    """The standard error output that pytest itself writes to."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _limit(real_stderr: int) -> Iterator[None]:
    """Ends the run with the stacks of all threads where a test hangs."""
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def master_address() -> Iterator[str]:
    """A master with one owner's memory, for all tests; they keep apart by namespace."""
    with LocalMaster() as master, LocalOwner(master.address, 256 << 20):
        yield master.address


class SharedClient(Hooked):
    """The session's client, of which each engine has its own calls: connecting takes a while."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Leave the client to the others."""


@pytest.fixture(scope="session")
def client(master_address: str) -> Iterator[MooncakeStore]:
    """A client of the master, for all engines but those that want one of their own."""
    with MooncakeStore(MooncakeConfig(master_address, segment_bytes=0)) as store:
        yield store


@pytest.fixture
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Makes engines by the name of their pools, closed after the test; all in one namespace.

    `master` is the address of another master than the session's; the engine's client is its own
    then, and with `own_client`.
    """
    engines = []
    namespace = f"test-{next(_names)}"

    def make(
        name: str = "mha",
        core: str = "python",
        *,
        master: str | None = None,
        own_client: bool = False,
        ranks: Ranks | None = None,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        address = master or request.getfixturevalue("master_address")
        extra = {"master_server_address": address, "namespace": namespace, **(settings or {})}
        with monkeypatch.context() as patched:
            if name == "hnd":
                patched.setenv("SGLANG_USE_HND_KVCACHE", "1")
            if ranks is not None:
                patched.setattr(sglang, "ranks_of", lambda *_: ranks)
            if master or own_client:
                connect = lambda config: Hooked(MooncakeStore(config))  # noqa: E731
            else:
                client = request.getfixturevalue("client")
                connect = lambda _: SharedClient(client)  # noqa: E731
            patched.setattr(sglang, "MooncakeStore", connect)
            engines.append(Engine(KINDS[name](), core, extra, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
