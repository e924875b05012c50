"""SGLang's pools with its own allocators, as an engine makes them: what a prefix tree needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attention import P
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

NUM_PAGES, NUM_SWA_PAGES, NUM_STATES = 16, 10, 12


@dataclass
class Kind:
    """Pools of one kind, of a whole engine.

    Attributes:
        kvcache: SGLang's pool.
        requests: SGLang's request pool.
        allocator: SGLang's allocator of the pool.
        num_layers: of the pipeline stage, up to the last one that owns anything.
        read_layer: reads a stage-local layer as a forward pass does, by the engine's accessors.
        page_size: of the prefix tree.
        window: sliding window in tokens.
        packed: draft pools that SGLang packs with the target's.
        sidecar: draft pools that SGLang keeps apart.
    """

    kvcache: Any
    requests: Any
    allocator: Any
    num_layers: int
    read_layer: Callable[[int], object]
    page_size: int = P
    window: int | None = None
    packed: Sequence[Any] = ()
    sidecar: Sequence[Any] = ()

    @property
    def has_states(self) -> bool:
        """Whether there are Mamba states."""
        return isinstance(self.requests, pools.HybridReqToTokenPool)


def plain_requests() -> Any:
    """Make a request pool without states."""
    return pools.ReqToTokenPool(8, 1024, "cpu", False)


def full_allocator(pool: Any, num_pages: int = NUM_PAGES, page_size: int = P) -> Any:
    """Make the allocator of a pool with one index space."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, torch.bfloat16, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(
        num_pages * page_size, page_size, torch.bfloat16, "cpu", pool, False
    )


def full(pool: Any, read_layer: Any, page_size: int = P, **more: Any) -> Kind:
    """A pool whose pages all have one index space."""
    allocator = full_allocator(pool, NUM_PAGES, page_size)
    return Kind(
        pool, plain_requests(), allocator, pool.layer_num, read_layer, page_size=page_size, **more
    )


def windowed(pool: Any, read_layer: Any, num_layers: int, window: int, **more: Any) -> Kind:
    """Pools with a sliding window."""
    page_size = pool.page_size
    allocator = SWATokenToKVPoolAllocator(
        NUM_PAGES * page_size,
        NUM_SWA_PAGES * page_size,
        page_size,
        torch.bfloat16,
        "cpu",
        pool,
        False,
    )
    arguments = {"requests": plain_requests(), "page_size": page_size, **more}
    return Kind(
        pool,
        allocator=allocator,
        num_layers=num_layers,
        read_layer=read_layer,
        window=window,
        **arguments,
    )
