"""An SGLang engine's cache side: pools, allocators, prefix tree and kvferry's linker, no model.

Everything but the model is SGLang's own, made by its own factory, and the calls are those of its
scheduler, in its order. Pages hold telling bytes of the tokens that they stand for, so that any
engine can tell whether it was given the right ones.
"""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hooked import Hooked
from kind import Kind
from prompts import LIMIT_S, Request, tags_of, wait_for
from prove import Memory, memory_of
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvferry.linker.sglang import KVFerryLinker
from kvferry.testing import check_telling, write_telling

POISON = 0xA5
SERVER_ARGS = {
    "model_path": "toy/model",
    "revision": None,
    "kv_cache_dtype": "auto",
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
}


class Engine:
    """One rank of an engine, as its scheduler drives it.

    Attributes:
        kind: its pools.
        cache: SGLang's prefix tree.
        linker: kvferry's.
        store: its Mooncake client, whose calls a test can hold or break.
        layout: of its pools.
        memory: all of the pools' bytes.
    """

    def __init__(
        self,
        kind: Kind,
        core: str,
        settings: dict[str, Any],
        *,
        server_args: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        components: set[Any] | None = None,
    ) -> None:
        """Make an engine.

        Args:
            kind: fresh pools.
            core: `python` or `rust`: SGLang's tree core.
            settings: more `linker_extra_config`.
            server_args: other values than `SERVER_ARGS`.
            params: other values of `CacheInitParams`.
            components: what the linker is told of the tree; the truth by default.
        """
        self.kind = kind
        tree = [ComponentType.FULL]
        tree += [ComponentType.SWA] if kind.window else []
        tree += [ComponentType.MAMBA] if kind.has_states else []
        self.params = CacheInitParams(
            **{
                "disable": False,
                "req_to_token_pool": kind.requests,
                "token_to_kv_pool_allocator": kind.allocator,
                "page_size": kind.page_size,
                "tree_components": tuple(tree),
                "tree_core_backend": core,
                "sliding_window_size": kind.window,
                "enable_mamba_extra_buffer": kind.has_states and kind.page_size > 1,
                "mtp_draft_device_pools": tuple(kind.packed),
                "sidecar_draft_device_pools": tuple(kind.sidecar),
                **(params or {}),
            }
        )
        self.cache = UnifiedRadixCache(self.params)
        extra = {
            "protocol": "tcp",
            "global_segment_size": 0,
            "staging_bytes": "8mb",
            "lookup_ttl_s": 0.0,
            "check_slots": True,
            # Every layer travels apart, so that one that came says nothing of the next.
            "groups": [[layer, layer + 1] for layer in range(kind.num_layers)],
            **settings,
        }
        self.linker: KVFerryLinker = create_unified_cache_linker(
            SimpleNamespace(**{**SERVER_ARGS, **(server_args or {})}),
            self.params,
            backend="dynamic",
            config={
                "linker": "KVFerryLinker",
                "linker_module_path": "kvferry.linker.sglang",
                "linker_extra_config": extra,
            },
            components=set(self.cache.components) if components is None else components,
            forward_stream=None,
        )
        self.cache.init_cache_linker(self.linker)
        # As SGLang's registry does.
        kind.kvcache.register_layer_transfer_counter(self.cache.linker.layer_done_counter)
        self.store: Hooked = self.linker._store
        self.layout = self.linker.linker.layout
        self.memory: Memory = memory_of(self.layout)
        self.memory.fill(POISON)
        self._rids = 0

    # ---- what a forward pass leaves in the tree ----

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Allocate slots for new tokens, in all index spaces, from SGLang's allocators."""
        allocator, page_size = self.kind.allocator, self.kind.page_size
        if not self.kind.window or page_size == 1:
            slots = allocator.alloc(num_tokens)
        else:
            slots = allocator.full_attn_allocator.alloc(num_tokens)
            swa = allocator.swa_attn_allocator.alloc(num_tokens)
            assert swa is not None
            allocator.set_full_to_swa_mapping(slots, swa)
        assert slots is not None
        return slots.to(torch.int64)

    def compute(self, prompt: Sequence[int], slots: torch.Tensor, first: int = 0) -> Any:
        """Write what a forward pass would: pages `first ..` of a prompt, and the state at its end.

        Returns:
            The state's slot, where there are states.
        """
        tags = tags_of(prompt, self.kind.page_size)[first:]
        self.write("full", self.pages("full", slots), tags)
        if self.kind.window:
            swa = self.kind.allocator.translate_loc_from_full_to_swa(slots)
            pages = self.pages("swa", swa)
            live = [index for index, page in enumerate(pages) if page]
            self.write("swa", [pages[index] for index in live], [tags[index] for index in live])
        if not self.kind.has_states:
            return None
        state = self.kind.requests.mamba_allocator.alloc(1)
        assert state is not None
        self.write("state", state.tolist(), tags[-1:])
        return state

    def insert(
        self,
        prompt: Sequence[int],
        value: torch.Tensor,
        *,
        state: Any = None,
        evicted: int = 0,
        prefix: int = 0,
    ) -> Any:
        """Insert a prompt into the tree, which offloads what is new."""
        by_component = {ComponentType.SWA: evicted} if self.kind.window else {}
        return self.cache.insert(
            InsertParams(
                key=RadixKey(array("q", prompt)),
                value=value,
                mamba_value=state,
                prev_prefix_len=prefix,
                component_evicted_seqlens=by_component,
            )
        )

    def prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Compute a whole prompt, part after part of it that is new, and insert it."""
        request = self.match(prompt, "prefill")
        hit = request.hit
        new = self.allocate(len(prompt) - hit)
        state = self.compute(prompt, new, hit // self.kind.page_size)
        value = torch.cat([self.on_device(request), new])
        self.insert(prompt, value, state=state, prefix=hit)
        return new

    def settle(self, limit_s: float = LIMIT_S) -> None:
        """Poll as the scheduler does, until every offload has its verdict."""

        def done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        wait_for(done, limit_s)

    def flush(self) -> None:
        """Forget the whole tree as `flush_cache` does, and what the pools hold."""
        self.cache.reset()
        self.kind.allocator.clear()
        if self.kind.has_states:
            self.kind.requests.mamba_allocator.clear()
        self.memory.fill(POISON)

    # ---- what the scheduler does for a request ----

    def match(self, prompt: Sequence[int], rid: str = "") -> Request:
        """Match a new request."""
        self._rids += 1
        request = Request(rid or f"request-{self._rids}", prompt)
        self.match_again(request)
        return request

    def match_again(self, request: Request) -> MatchResult:
        """Match a request, as every scheduling pass does while it waits."""
        key = RadixKey(array("q", request.prompt))
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.match, request.last_node = found, found.last_device_node
        request.hit = found.device_prefix_len
        return found

    def on_device(self, request: Request) -> torch.Tensor:
        """Return the slots of a request's prefix that the tree has."""
        root = self.cache.root_node_handle()
        return self.cache.tree_core.collect_full_device_indices(request.last_node, root).to(
            torch.int64
        )

    def load_back(self, request: Request) -> int:
        """Admit a request; return how many of its tokens a load was queued for."""
        found = request.match
        assert found is not None
        num_tokens, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        if num_tokens:
            request.tail = self.cache.linker.private_load_indices[request.rid]
        return int(num_tokens)

    def start(self) -> int:
        """Begin the batch's loads, and tell the counter as the worker does."""
        index = int(self.cache.ready_to_load_host_cache())
        self.kind.kvcache.layer_transfer_counter.set_consumer(index)
        return index

    def finish(self, *requests: Request) -> list[str]:
        """Wait for the batch's loads; return the ids of the requests that SGLang aborts."""
        failed = self.cache.finish_external_linker_loads(list(requests))
        return [request.rid for request in failed]

    # ---- bytes ----

    def pages(self, space: str, slots: torch.Tensor) -> list[int]:
        """Return page ids of slots, by SGLang's own rule."""
        if space == "state":
            return [int(slot) for slot in slots]
        page_size = self.kind.page_size
        return [int(slot) // page_size for slot in slots[::page_size]]

    def write(self, space: str, page_ids: Sequence[int], tags: Sequence[int]) -> None:
        """Write telling pages."""
        write_telling(self.layout, space, page_ids, tags)

    def wanted(self, request: Request) -> dict[str, tuple[list[int], list[int]]]:
        """Return what a load must bring, by SGLang's own records: page ids and tags, by space."""
        page_size = self.kind.page_size
        first = request.hit // page_size
        end = first + len(request.slots) // page_size
        tags = tags_of(request.prompt, page_size)[first:end]
        wanted = {"full": (self.pages("full", request.slots), tags)}
        if self.kind.window:
            slots = self.kind.allocator.translate_loc_from_full_to_swa(request.slots)
            pages = self.pages("swa", slots)
            window = -(-self.kind.window // page_size)
            assert all(pages[-window:]), "the window has pages"
            assert not any(pages[:-window]), "what lies before the window has none"
            wanted["swa"] = (pages[-window:], tags[-window:])
            prefix = request.hit + len(request.slots)
            gone = request.kv.get_evicted_seqlen(ComponentType.SWA)
            assert gone == max(0, prefix - window * page_size)
        if self.kind.has_states:
            wanted["state"] = ([int(request.kv.mamba_pool_idx)], tags[-1:])
        return wanted

    def forward(self, *requests: Request) -> None:
        """Read every layer as a forward pass does: what it is given then must be right."""
        for layer in range(self.kind.num_layers):
            self.kind.read_layer(layer)
            for request in requests:
                for space, (pages, tags) in self.wanted(request).items():
                    check_telling(self.layout, space, pages, tags, layers=[layer])

    def check_all(self, before: Sequence[torch.Tensor], *requests: Request) -> None:
        """Check every byte of the pools: what was loaded, and all others as they were before."""
        after = self.memory.copy()
        self.memory.restore(before)
        for request in requests:
            for space, (pages, tags) in self.wanted(request).items():
                self.write(space, pages, tags)
        for got, wanted in zip(after, self.memory.copy(), strict=True):
            assert torch.equal(got, wanted), f"{int((got != wanted).sum())} bytes differ"

    def load(self, *requests: Request) -> None:
        """Load matched requests in one batch, read them layer by layer, and check every byte."""
        for request in requests:
            assert self.load_back(request)
        before = self.memory.copy()
        assert self.start() >= 0
        self.forward(*requests)
        assert self.finish(*requests) == []
        self.check_all(before, *requests)

    def adopt(self, request: Request) -> None:
        """Insert a request whose load succeeded, with what it has loaded, as computed KV."""
        end = request.hit + len(request.slots)
        self.insert(
            request.prompt[:end],
            torch.cat([self.on_device(request), request.slots]),
            state=request.kv.mamba_pool_idx.unsqueeze(0) if self.kind.has_states else None,
            evicted=request.kv.get_evicted_seqlen(ComponentType.SWA),
            prefix=request.hit,
        )

    def evict(self, num_tokens: int = 0, swa: int = 0, states: int = 0) -> None:
        """Evict from the device."""
        self.cache.evict(EvictParams(num_tokens=num_tokens, swa_num_tokens=swa, mamba_num=states))

    def close(self) -> None:
        """End the engine."""
        self.cache.release_host_resources()
