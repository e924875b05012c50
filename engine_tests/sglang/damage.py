"""Harm done to what an engine has stored, and what its loads may do then."""

from collections.abc import Sequence
from typing import Any

import torch
from prompts import Request, tokens
from sglang.srt.mem_cache.utils import get_storage_hash_str
from tree import POISON, Engine

from kvferry.linker.eviction import evict
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome
from kvferry.testing import pages_of
from kvferry.trailer import stored_bytes


def page_keys(engine: Engine, prompt: Sequence[int]) -> list[str]:
    """SGLang's keys of a prompt's pages."""
    return list(get_storage_hash_str(prompt, page_size=engine.kind.page_size))


def object_key(engine: Engine, prompt: Sequence[int], page: int, space: str) -> str:
    """The key of one page's object."""
    return engine.linker.linker.keys.object_keys(page_keys(engine, prompt), space)[page]


def remove(engine: Engine, prompt: Sequence[int], page: int, space: str) -> None:
    """Take an object out of the store, as its eviction does."""
    (result,) = evict(engine.store, [object_key(engine, prompt, page, space)])
    assert result.outcome is Outcome.STORED


def corrupt(engine: Engine, prompt: Sequence[int], page: int, space: str) -> None:
    """Change one bit of an object."""
    key = object_key(engine, prompt, page, space)
    size = stored_bytes(engine.layout.object_bytes[space], engine.layout.num_layers)
    staging = StagingBuffer(size, device=torch.device("cpu"))
    store = engine.store.store
    staging.register(store)
    try:
        (got,) = store.get([key], [staging.address], [size])
        assert got.outcome is Outcome.FETCHED
        staging.tensor[engine.layout.object_bytes[space] // 2] ^= 0x10
        evict(store, [key])
        (put,) = store.put([key], [staging.address], [size])
        assert put.outcome is Outcome.STORED
    finally:
        staging.unregister()


def filled(engine: Engine, num_pages: int = 5) -> Any:
    """Store a prompt, forget it on the device, and return it."""
    prompt = tokens(num_pages * engine.kind.page_size)
    engine.prefill(prompt)
    engine.settle()
    engine.flush()
    return prompt


def all_but(engine: Engine, requests: Sequence[Request]) -> list[torch.Tensor]:
    """The pools' bytes, with those of the requests' destinations poisoned."""
    before = engine.memory.copy()
    for request in requests:
        for space, (pages, _) in engine.wanted(request).items():
            for buffer in engine.layout.buffers[space]:
                for page in pages:
                    poison_page(buffer, page)
    poisoned = engine.memory.copy()
    engine.memory.restore(before)
    return poisoned


def poison_page(buffer: Any, page: int) -> None:
    """Fill one page of a buffer."""
    rows = pages_of(buffer.pool, buffer.tensor)
    byte = torch.full((rows.element_size(),), POISON, dtype=torch.uint8)
    rows[page] = byte.view(rows.dtype).item()


def fail_load(engine: Engine, *requests: Request) -> None:
    """Start the requests' loads, read all layers, and see that SGLang aborts all of them."""
    before = all_but(engine, requests)
    assert engine.start() >= 0
    for layer in range(engine.kind.num_layers):
        engine.kind.read_layer(layer)  # a forward pass that has begun goes on
    assert engine.finish(*requests) == [request.rid for request in requests]
    assert all(request.skip_radix_cache_insert for request in requests)
    for got, wanted in zip(all_but(engine, requests), before, strict=True):
        assert torch.equal(got, wanted), "a failed load wrote elsewhere"
