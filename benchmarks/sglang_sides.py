"""kvferry's linker and SGLang's own, made alike, over the same pools and the same Mooncake."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker import MooncakeDirectLinker
from sglang_models import Model

from kvferry.linker.sglang import KVFerryLinker

UPSTREAM, KVFERRY, PLAIN = "SGLang", "kvferry", "kvferry, no checksums"

WAIT_S = 60.0
POLL_S = 0.0005
"""Between two questions whether an offload is done."""


class Side:
    """One of the linkers, driven as SGLang's scheduler drives it.

    Attributes:
        name: for tables.
        linker: a `UnifiedCacheLinker`.
        caller_ms: processor time of the calling thread in the linker's methods, so far.
    """

    def __init__(self, name: str, linker: Any) -> None:
        self.name = name
        self.linker = linker
        self.caller_ms = 0.0
        self._num_loads = 0

    def offload(self, transfers: Sequence[Any]) -> float:
        """Store pages, and wait for the verdict; return the milliseconds."""
        begin_s = time.perf_counter()
        assert self._call(self.linker.offload, transfers), f"{self.name} refused an offload"
        while not self.linker.num_completed_offloads():
            assert time.perf_counter() - begin_s < WAIT_S, f"{self.name}: an offload hangs"
            time.sleep(POLL_S)
        taken_ms = (time.perf_counter() - begin_s) * 1e3
        assert self._call(self.linker.pop_completed_offload), f"{self.name}: an offload failed"
        return taken_ms

    def load(self, transfers: Sequence[Any]) -> tuple[float, float]:
        """Load pages layer by layer, for a model whose layers take no time.

        Returns:
            Milliseconds from `load` on: until layer 0 could be read, and until every layer could.
        """
        rid = f"request-{self._num_loads}"
        self._num_loads += 1
        counter = self.linker.layer_done_counter
        begin_s = time.perf_counter()
        assert self._call(self.linker.load, rid, transfers), f"{self.name} refused a load"
        index = self._call(self.linker.start_layer_wise_loading)
        counter.set_consumer(index)
        self._call(counter.wait_until, 0)
        first_s = time.perf_counter()
        self._call(self._wait_rest, counter)
        last_s = time.perf_counter()
        landed = self._call(self.linker.finish_layer_wise_loading, index)
        assert landed, f"{self.name}: a load failed"
        counter.set_consumer(-1)
        return (first_s - begin_s) * 1e3, (last_s - begin_s) * 1e3

    @staticmethod
    def _wait_rest(counter: Any) -> None:
        for layer_id in range(1, counter.num_layers):
            counter.wait_until(layer_id)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        begin_s = time.thread_time()
        result = method(*arguments)
        self.caller_ms += (time.thread_time() - begin_s) * 1e3
        return result

    def close(self) -> None:
        """End its threads."""
        self.linker.close()


def upstream(model: Model, master_address: str) -> Side:
    """Make SGLang's linker.

    Raises:
        ValueError: it does not support the model.
    """
    linker = MooncakeDirectLinker(
        SimpleNamespace(enable_linker_mla_dedup=False),
        model.params(),
        components=model.components,
        extra_config=_store_config(master_address),
    )
    return Side(UPSTREAM, linker)


def kvferry(model: Model, master_address: str, *, integrity: bool = True, **settings: Any) -> Side:
    """Make kvferry's linker; `settings` are those of `linker_extra_config`."""
    linker = KVFerryLinker(
        SimpleNamespace(
            model_path="bench/model", revision=None, weight_version=None, kv_cache_dtype="auto"
        ),
        model.params(),
        components=model.components,
        extra_config={
            **_store_config(master_address),
            "integrity": integrity,
            "namespace": "sealed" if integrity else "plain",
            **settings,
        },
    )
    return Side(KVFERRY if integrity else PLAIN, linker)


def _store_config(master_address: str) -> dict[str, Any]:
    return {
        "master_server_address": master_address,
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": "0",
        "check_server": False,
    }


Makers = Mapping[str, Callable[[Model, str], Side]]
"""By name: from a model and a master's address to a linker."""

MAKERS: Makers = {
    UPSTREAM: upstream,
    KVFERRY: kvferry,
    PLAIN: partial(kvferry, integrity=False),
}
"""All of them, SGLang's first: the others are set beside it."""

OURS: Makers = {name: make for name, make in MAKERS.items() if name != UPSTREAM}
"""For models that SGLang's does not take."""
