"""What kvferry's linker refuses when SGLang makes it, and what it leaves behind then."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import KINDS
from kinds_attention import plain_mha
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from tree import Engine

from kvferry.errors import ArgumentError, LayoutError, StoreError
from kvferry.linker.sglang import KVFerryLinker
from kvferry.linker.sglang_ranks import Ranks

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
Make = Callable[..., Engine]


def ours() -> list[str]:
    """Names of kvferry's threads."""
    return [each.name for each in threading.enumerate() if "kvferry" in each.name]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """A linker that was refused leaves no thread."""
    yield
    end_s = time.monotonic() + 5.0
    while ours() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert ours() == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mha", {FULL, SWA}),
        ("mha", {FULL, MAMBA}),
        ("swa", {FULL}),
        ("gdn", {FULL}),
        ("gdn", {FULL, SWA, MAMBA}),
        ("swa_states", {FULL, SWA}),
        ("deepseek_v4", {FULL, MAMBA}),
    ],
)
def test_components_that_are_not_those_of_the_pools(
    name: str, told: set[ComponentType], make: Make
) -> None:
    with pytest.raises(ArgumentError, match="prefix tree has components"):
        make(name, components=told)


def test_a_tensor_that_nobody_described(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    init = pools.MHATokenToKVPool.__init__

    def with_more(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.index_buffer = [torch.zeros(8, 4)]

    monkeypatch.setattr(pools.MHATokenToKVPool, "__init__", with_more)
    with pytest.raises(LayoutError, match="index_buffer"):
        make("mha")


def test_a_pool_that_nobody_knows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    subclass = type("QSATokenToKVPool", (pools.MHATokenToKVPool,), {})
    monkeypatch.setitem(KINDS, "subclass", lambda: plain_mha(cls=subclass))
    with pytest.raises(LayoutError, match="QSATokenToKVPool"):
        make("subclass")


def test_draft_pools_with_states(make: Make) -> None:
    with pytest.raises(LayoutError, match="mtp_draft_mamba_pools"):
        make("mha", params={"mtp_draft_mamba_pools": (object(),)})


def test_settings_that_are_wrong(make: Make) -> None:
    for settings, match in (
        ({"stagin_bytes": "1mb"}, "stagin_bytes"),
        ({"staging_bytes": "1tb"}, "staging_bytes is '1tb'"),
        ({"staging_bytes": 1024}, "staging"),
        ({"groups": [[0, 1]]}, "groups"),
        ({"wait": "never"}, "wait is 'never'"),
        ({"client_server_address": "h:1"}, "client in this"),
    ):
        with pytest.raises(ArgumentError, match=match):
            make("mha", own_client=True, settings=settings)


def test_pipeline_stages(make: Make) -> None:
    with pytest.raises(ArgumentError, match="allow_pipeline"):
        make("mha", ranks=Ranks(pp=(0, 2)))
    make("mha", ranks=Ranks(pp=(0, 2)), settings={"allow_pipeline": True}).close()


def test_a_master_that_does_not_answer(make: Make) -> None:
    begin_s = time.monotonic()
    with pytest.raises(StoreError):
        make("mha", master="127.0.0.1:1")
    assert time.monotonic() - begin_s < 20.0


def test_what_the_factory_finds(make: Make) -> None:
    engine = make("gdn")
    assert type(engine.linker) is KVFerryLinker
    assert sorted(name.value for name in engine.linker.pools) == ["kv", "mamba"]
    assert not engine.cache.linker._skip_swa
    assert engine.linker.forward_stream is None
    engine.close()
    engine = make("swa_states")
    assert sorted(name.value for name in engine.linker.pools) == ["kv", "mamba", "swa"]
    assert not engine.cache.linker._skip_swa  # pages of the window travel too
    engine.close()
    with pytest.raises(ValueError, match="UnifiedCacheLinker subclass"):
        create_unified_cache_linker(
            engine.params,
            engine.params,
            backend="dynamic",
            config={"linker": "Linker", "linker_module_path": "kvferry.linker.linker"},
            components={FULL},
        )


def test_arguments_of_a_later_contract(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("mha")
    engine.close()
    with pytest.raises(ArgumentError, match="components"):
        KVFerryLinker(
            None,
            engine.params,
            components={FULL, SWA},
            extra_config={"master_server_address": "h:1", "protocol": "tcp"},
            something_new=1,
        )
    assert "['something_new'] are unknown here" in caplog.text
