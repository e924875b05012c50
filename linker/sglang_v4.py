"""SGLang's DeepSeek-V4 pools: a paged window, compressed pages, index keys, compression states.

Facts are those of SGLang 0.5.23.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import Excluded, qualified_name, required
from kvferry.linker.sglang_reading import Reading, Seat, check_page_size

_MODULE = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
DEEPSEEK_V4 = f"{_MODULE}.DeepSeekV4TokenToKVPool"
_PAGED = (f"{_MODULE}.DeepSeekV4SingleKVPool", f"{_MODULE}.DeepSeekV4UniformFP8KVPool")
_STATE = "sglang.srt.mem_cache.deepseek_v4_compress_state.CompressStatePool"


def read_deepseek_v4(pool: Any, page_size: int, prefix: str, first_layer: int = 0) -> Reading:
    """Read DeepSeek-V4's pools: window, compressed KV, its index keys, and compression states.

    Compressed pages and index keys have the ids of the pages they were made from; the states of
    ratio 4 lie in rings of a few rows, one ring per page of the window.

    Raises:
        LayoutError: a variant that is not described.
    """
    for attribute, wanted in (
        ("_unified_kv", False),
        ("request_window", None),
        ("swa_req_ring_size", None),
    ):
        got = required(pool, attribute)
        if got != wanted:
            raise LayoutError(
                f"DeepSeekV4TokenToKVPool: {attribute} is {got!r}, wanted {wanted}: a window kept "
                f"per request has no pages"
            )
    check_page_size(pool, page_size)
    for attribute, got in (
        ("swa_page_size", required(pool, "swa_page_size")),
        ("swa_kv_pool.page_size", required(required(pool, "swa_kv_pool"), "page_size")),
    ):
        if got != page_size:
            raise LayoutError(
                f"DeepSeekV4TokenToKVPool: {attribute} is {got}, wanted the tree's {page_size}"
            )
    first, end = required(pool, "_stage_start"), required(pool, "_stage_end")
    ratios = list(required(pool, "compression_ratios"))[first:end]
    others = sorted({*ratios} - {0, 4, 128})
    if others:
        raise LayoutError(
            f"DeepSeekV4TokenToKVPool: compression ratios {others}, wanted 0, 4 and 128"
        )
    reading = Reading(window_tokens=required(pool, "sliding_window"))

    def seat(space: str, ratio: int | None = None) -> Seat:
        layers = (i + first_layer for i, of in enumerate(ratios) if ratio in (None, of))
        return Seat(page_size, space, prefix, tuple(layers))

    reading.add(seat("swa"), "swa", "page", _v4_pages(pool.swa_kv_pool), replicated=True)
    reading.hands_out("swa", required(pool, "swa_size") // page_size + 1)
    for ratio in sorted({*ratios} - {0}):
        kept = required(pool, "kv_pools")[ratio]
        pages = _v4_pages(kept, page_size // ratio)
        reading.hands_out("full", required(kept, "size") * ratio // page_size + 1)
        reading.add(seat("full", ratio), f"c{ratio}", "page", pages, replicated=True)
        index = required(pool, "index_pools").get(ratio)
        if index is not None:
            keys = required(index, "index_k_with_scale_buffer")
            if keys is None or index.page_size != page_size // ratio:
                raise LayoutError(
                    f"DeepSeekV4IndexerPool of ratio {ratio}: keys and scales in one row per page "
                    f"of {page_size // ratio} entries are wanted, page_size is {index.page_size}"
                )
            reading.add(seat("full", ratio), f"c{ratio}_index", "page", keys, replicated=True)
    if 128 in ratios and page_size % 128:
        raise LayoutError(
            f"DeepSeekV4TokenToKVPool: page_size is {page_size}, wanted a multiple of 128: else "
            f"compressed entries are pending at a page's end"
        )
    for attribute, name in (
        ("compress_state_pools", "state"),
        ("indexer_compress_state_pools", "index_state"),
    ):
        by_layer = required(pool, attribute)[first:end]
        views = []
        for ratio, state in zip(ratios, by_layer, strict=True):
            if state is None:
                continue
            tensor = required(required(state, "kv_score_buffer"), "kv_score")
            if required(state, "request_scoped"):
                reason = "pending entries of a running request; none are pending at a page's end"
                reading.kept_back.append((tensor, reason))
                continue
            if ratio == 4:
                views.append(_ring_pages(state, tensor, page_size, attribute, reading))
        if views:
            reading.add(seat("swa", 4), f"c4_{name}", "page", views, replicated=True)
    return reading


def _v4_pages(pool: Any, entries: int | None = None) -> Sequence[torch.Tensor]:
    name = qualified_name(pool)
    if name not in _PAGED:
        raise LayoutError(f"a pool of DeepSeek-V4 is a {name}, wanted a plain paged one")
    if entries is not None and required(pool, "page_size") != entries:
        raise LayoutError(
            f"{type(pool).__qualname__}: page_size is {pool.page_size}, wanted {entries} entries"
        )
    buffers: Sequence[torch.Tensor] = required(pool, "kv_buffer")
    return buffers


def _ring_pages(
    state: Any, tensor: torch.Tensor, page_size: int, attribute: str, reading: Reading
) -> torch.Tensor:
    """Return a state's rings as rows: `[num_pages, ring rows, values]`."""
    if (
        qualified_name(state) != _STATE
        or required(state, "online")
        or required(state, "swa_page_size") != page_size
    ):
        raise LayoutError(
            f"DeepSeekV4TokenToKVPool.{attribute}: a {qualified_name(state)} for pages of "
            f"{getattr(state, 'swa_page_size', None)}, wanted rings of raw states for pages of "
            f"{page_size}"
        )
    ring = required(state, "ring_size")
    num_pages = tensor.shape[0] // ring
    row, *inner = tensor.stride()
    reading.covers.append(tensor)
    rest = tensor[num_pages * ring :]
    reading.excluded.append(
        Excluded(
            f"DeepSeekV4TokenToKVPool.{attribute}: rows from {num_pages * ring}",
            "the row of invalid slots, and padding",
            rest.numel() * rest.element_size(),
        )
    )
    return tensor.as_strided(
        (num_pages, ring, *tensor.shape[1:]), (row * ring, row, *inner), tensor.storage_offset()
    )
