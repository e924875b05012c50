"""Saves straight from pools whose pages lie in one piece: which those are, and that bytes agree."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from linker_bed import Faulty

from kvferry.errors import StoreError
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.direct import page_rows
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.pools import PoolTensors
from kvferry.testing import check_telling, poison, write_telling

pytestmark = pytest.mark.mooncake
LAYERS, PAGES, ROW = 3, 12, (4, 8)
_names = itertools.count()


def blocks_outermost(
    device: torch.device, *, pad: int = 0, order: Sequence[int] = range(LAYERS)
) -> CacheLayout:
    """Layers side by side in a block, `pad` rows behind them, placed in some order."""
    whole = torch.zeros(PAGES, LAYERS + pad, *ROW, dtype=torch.bfloat16, device=device)
    views = {layer: whole[:, place] for place, layer in enumerate(order)}
    return CacheLayout.from_tensors(
        [PoolTensors("kv", "full", "page", views)], page_size=4, num_layers=LAYERS
    )


def layers_outermost(device: torch.device) -> CacheLayout:
    whole = torch.zeros(LAYERS, PAGES, *ROW, dtype=torch.bfloat16, device=device)
    return CacheLayout.from_tensors(
        [PoolTensors("kv", "full", "page", dict(enumerate(whole)))],
        page_size=4,
        num_layers=LAYERS,
    )


@pytest.fixture
def store(mooncake_store: MooncakeStore) -> Faulty:
    return Faulty(mooncake_store)


class Made:
    """Linkers over layouts, closed at the end."""

    def __init__(self, store: Any, device: torch.device) -> None:
        self.store, self.device = store, device
        self.linkers: list[Linker] = []
        self.namespace = f"test-direct-{next(_names)}"

    def __call__(self, layout: CacheLayout, **settings: Any) -> Linker:
        memory = "cpu" if self.device.type == "cpu" else "pinned"
        staging = StagingBuffer(1 << 16, device=self.device, memory=memory)
        options = {"integrity": False, "min_direct_bytes": 0, "lookup_ttl_s": 0.0, **settings}
        config = LinkerConfig(namespace=self.namespace, **options)
        self.linkers.append(Linker(layout, self.store, staging, config))
        return self.linkers[-1]


@pytest.fixture
def made(store: Faulty, device: torch.device) -> Iterator[Made]:
    made = Made(store, device)
    yield made
    store.before.clear()
    for linker in made.linkers:
        linker.close(20)


def test_which_pages_lie_in_one_piece(device: torch.device) -> None:
    layout = blocks_outermost(device)
    rows = page_rows(layout, "full")
    first = layout.buffers["full"][0].tensor
    assert rows is not None
    assert first is not None
    assert (rows.address, rows.stride_bytes) == (first.data_ptr(), layout.object_bytes["full"])
    assert rows.memory == {(first.untyped_storage().data_ptr(), first.untyped_storage().nbytes())}
    padded = page_rows(blocks_outermost(device, pad=2), "full")
    assert padded is not None
    assert padded.stride_bytes == layout.object_bytes["full"] // LAYERS * (LAYERS + 2)
    assert page_rows(layers_outermost(device), "full") is None
    assert page_rows(blocks_outermost(device, order=[1, 0, 2]), "full") is None


@pytest.mark.parametrize("pad", [0, 2])
def test_direct_saves_come_back_byte_for_byte(made: Made, store: Faulty, pad: int) -> None:
    layout = blocks_outermost(made.device, pad=pad)
    keys, pages, targets = [f"k{n}" for n in range(5)], [7, 1, 4, 2, 9], [0, 3, 5, 6, 8]
    linker = made(layout)
    write_telling(layout, "full", pages, pages)
    saved = linker.save(keys, pages).result()
    assert (saved.num_objects, saved.num_direct, saved.failures) == (5, 5, {})
    assert saved.num_bytes == 5 * layout.object_bytes["full"]
    assert linker.stats.snapshot()["direct"] == {"save": 5, "load": 0}
    again = linker.save([*keys, "new"], [*pages, 10]).result()
    assert (again.num_existing, again.num_direct) == (5, 1)
    other = layers_outermost(made.device)  # equal objects from other memory
    assert other.fingerprint == layout.fingerprint
    loaded = made(other)
    poison(other)
    assert loaded.lookup(keys) == [1, 2, 3, 4, 5]
    assert loaded.load(keys, targets).result().num_direct == 0
    check_telling(other, "full", targets, pages)


@pytest.mark.parametrize(
    "settings", [{"integrity": True}, {"direct": "never"}, {"min_direct_bytes": 1 << 20}]
)
def test_what_is_packed_all_the_same(made: Made, settings: dict[str, Any]) -> None:
    layout = blocks_outermost(made.device)
    write_telling(layout, "full", [3], [3])
    saved = made(layout, **settings).save(["k"], [3]).result()
    assert (saved.num_objects, saved.num_direct) == (1, 0)


def test_pools_that_cannot_be_registered_are_packed(made: Made, store: Faulty) -> None:
    layout = blocks_outermost(made.device)
    tensor = layout.buffers["full"][0].tensor
    assert tensor is not None
    pool = tensor.untyped_storage().data_ptr()
    real, asked = store.store.register, []

    def register(address: int, num_bytes: int) -> None:
        asked.append(address)
        if address == pool:
            raise StoreError("refused")
        real(address, num_bytes)

    store.store = _Registering(store.store, register)
    write_telling(layout, "full", [3], [3])
    linker = made(layout)
    assert pool in asked
    assert linker.save(["k"], [3]).result().num_direct == 0


class _Registering:
    def __init__(self, real: Any, register: Any) -> None:
        self._real, self.register = real, register

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_linkers_share_their_pools_registration(made: Made) -> None:
    layout = blocks_outermost(made.device)
    write_telling(layout, "full", [3, 4], [3, 4])
    first, second = made(layout), made(layout)
    assert first.save(["k"], [3]).result().num_direct == 1
    first.close()
    assert second.save(["l"], [4]).result().num_direct == 1
    second.close()
    assert made(layout).save(["m"], [4]).result().num_direct == 1


def test_who_cancels_waits_for_the_stores_call(made: Made, store: Faulty) -> None:
    layout = blocks_outermost(made.device)
    write_telling(layout, "full", [3], [3])
    begun, go_on, left = threading.Event(), threading.Event(), []

    def put(*_: Any) -> None:
        begun.set()
        go_on.wait(10)
        left.append(True)

    store.before["put"] = put
    save = made(layout).save(["k"], [3])
    assert begun.wait(10)
    threading.Timer(0.2, go_on.set).start()
    save.cancel()  # too late where the save came to its end first
    assert left == [True]  # the store read its pages until then, and does not any more
    assert save.done()
