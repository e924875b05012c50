"""A stand-in for a model: each step checks every byte that it reads, and writes telling ones.

What a token's rows and a state hold tells the whole prefix up to them, their layer and their rank,
as in a real model. So a step that reads a row finds out at once whether it was computed, saved,
loaded or taken over rightly, whoever did it.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plan import Plan, bound
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvferry.testing import POISON, telling_bytes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tags_of(tokens: Sequence[int]) -> list[int]:
    """Return a number of each prefix: what its last token's rows are to tell."""
    tags, tag = [], 0
    for token in tokens:
        tag = zlib.crc32(array("q", [token]).tobytes(), tag)
        tags.append(tag)
    return tags


def next_token(tag: int) -> int:
    """Return the token that the model samples behind a prefix."""
    return tag % 499 + 1


def completed(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return a prompt and the tokens that the model puts behind it."""
    tokens, tags = list(prompt), tags_of(prompt)
    while len(tokens) < num_tokens:
        tokens.append(next_token(tags[-1]))
        tags.append(zlib.crc32(array("q", [tokens[-1]]).tobytes(), tags[-1]))
    return tokens


@dataclass
class Span:
    """Tokens that a step computes for a request.

    Attributes:
        tags: of the sequence, up to the last token that the step computes.
        first: tokens that are there before the step.
        tables: block ids, by group.
        spoiled: why the step computes rubbish: the first thing that it read wrong.
    """

    tags: Sequence[int]
    first: int
    tables: Sequence[Sequence[int]]
    spoiled: str = ""


class Layer:
    """One layer's cache: writes it, and tells what is in it.

    Attributes:
        kv_cache: as registered; vLLM's hooks ask for it.
    """

    def __init__(
        self, name: str, group_id: int, spec: KVCacheSpec, cache: torch.Tensor, salt: int
    ) -> None:
        self.name, self.group_id, self.spec, self.kv_cache = name, group_id, spec, cache
        self._salt = salt
        self._is_state = isinstance(spec, MambaSpec)
        self._parts = bound(spec, cache) if self._is_state else [cache]

    def compute(self, spans: Sequence[Span]) -> None:
        """Check what each span reads, then write its tokens: rubbish, once it has read any."""
        for span in spans:
            table = span.tables[self.group_id]
            if not span.spoiled:
                span.spoiled = self._read(table, span)
            tags = [~tag for tag in span.tags] if span.spoiled else span.tags
            if self._is_state:
                self._put_state(table, tags, len(tags))
            else:
                rows = self._rows(table, range(span.first, len(tags)))
                rows.put(self._told(tags[span.first :], rows.num_bytes))

    def _read(self, table: Sequence[int], span: Span) -> str:
        if self._is_state:
            return self._state_fault(table, span.tags, span.first)
        begin = 0
        if isinstance(self.spec, SlidingWindowSpec):
            begin = max(0, span.first - (self.spec.sliding_window - 1))
        return self._rows_fault(table, span.tags, begin, span.first)

    def is_untouched(self, block_id: int) -> bool:
        """Whether nobody has written into a block."""
        page = self.kv_cache[block_id].view(_INTEGERS[self.kv_cache.element_size()])
        return bool((page.contiguous().view(torch.uint8) == POISON).all())

    def block_fault(self, block_id: int, tags: Sequence[int]) -> str:
        """Return what is wrong in a block that ends with the last of `tags`; empty if nothing."""
        size, end = self.spec.block_size, len(tags)
        table = [0] * (end // size - 1) + [block_id]
        if self._is_state:
            return self._state_fault(table, tags, end)
        return self._rows_fault(table, tags, end - size, end)

    def _rows_fault(self, table: Sequence[int], tags: Sequence[int], begin: int, end: int) -> str:
        if begin >= end:
            return ""
        rows = self._rows(table, range(begin, end))
        wrong = (rows.get() != self._told(tags[begin:end], rows.num_bytes)).any(1).nonzero()
        tokens = [begin + int(at) for at in wrong]
        blocks = sorted({table[token // self.spec.block_size] for token in tokens})
        return f"{self.name}: tokens {tokens} of {end} in blocks {blocks}" if tokens else ""

    def _state_fault(self, table: Sequence[int], tags: Sequence[int], end: int) -> str:
        if not end:
            return ""
        block = table[(end - 1) // self.spec.block_size]
        for at, part in enumerate(self._parts):
            page = part[block].contiguous().view(-1).view(torch.uint8)
            if not torch.equal(page, self._told([tags[end - 1] + at], len(page))[0]):
                return f"{self.name}: the state of {end} tokens in block {block}"
        return ""

    def _put_state(self, table: Sequence[int], tags: Sequence[int], end: int) -> None:
        block = table[(end - 1) // self.spec.block_size]
        for at, part in enumerate(self._parts):
            page = part[block]
            told = self._told([tags[end - 1] + at], page.numel() * page.element_size())[0]
            part[block] = told.view(page.dtype).view(page.shape)

    def _told(self, tags: Sequence[int], num_bytes: int) -> torch.Tensor:
        padded = -(-num_bytes // 8) * 8
        return telling_bytes(self._salt, torch.tensor(tags), padded)[:, :num_bytes].contiguous()

    def _rows(self, table: Sequence[int], tokens: Sequence[int]) -> "_Rows":
        size = self.spec.block_size
        return _Rows(
            self.kv_cache.view(_INTEGERS[self.kv_cache.element_size()]),
            torch.tensor([table[token // size] for token in tokens]),
            torch.tensor([token % size for token in tokens]),
        )


@dataclass(frozen=True)
class _Rows:
    """Rows of tokens in a cache `[blocks, heads, tokens, bytes]`, as integers."""

    cache: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        return self.cache.shape[1] * self.cache.shape[3] * self.cache.element_size()

    def get(self) -> torch.Tensor:
        """Return uint8 `[tokens, bytes]`."""
        rows = self.cache[self.blocks, :, self.slots]
        return rows.reshape(len(self.blocks), -1).contiguous().view(torch.uint8)

    def put(self, told: torch.Tensor) -> None:
        """Write uint8 `[tokens, bytes]`."""
        rows = told.view(self.cache.dtype)
        heads, width = self.cache.shape[1], self.cache.shape[3]
        self.cache[self.blocks, :, self.slots] = rows.view(-1, heads, width)


def layers_of(plan: Plan, rank: int) -> list[Layer]:
    """Return a rank's layers in the order of the model, their memory poisoned."""
    storages = {cache.untyped_storage().data_ptr(): cache for cache in plan.caches.values()}
    for cache in storages.values():
        cache.untyped_storage().fill_(POISON)
    layers = []
    for group_id, group in enumerate(plan.config.kv_cache_groups):
        by_name = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = by_name.get(name, group.kv_cache_spec)
            own = 0 if isinstance(spec, MLAAttentionSpec) else rank  # latents are on all ranks
            salt = zlib.crc32(f"{name} of rank {own}".encode()) >> 8
            layers.append(Layer(name, group_id, spec, plan.caches[name], salt))
    return sorted(layers, key=lambda layer: [int(p) for p in layer.name.split(".") if p.isdigit()])
