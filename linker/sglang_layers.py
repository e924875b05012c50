"""SGLang's pools of one kind: MHA, MLA and DSA pools with their scales, and Mamba states.

Classes are recognised by their exact names, and nothing of SGLang is imported. A subclass is
another class: it may hold more than its parent. Facts are those of SGLang 0.5.23.
"""

from collections.abc import Callable
from typing import Any

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import qualified_name, required
from kvferry.linker.sglang_reading import Reading, Seat, check_page_size

_MODULE = "sglang.srt.mem_cache.memory_pool"
MAMBA = f"{_MODULE}.MambaPool"

ROWS_OF_LAYOUT = {"nhd": "token", "hnd": "page"}
"""`kv_cache_layout` of MHA pools: what a row of the tensors is."""


def read_layers(pool: Any, seat: Seat) -> Reading:
    """Read a pool whose layers follow each other, without pools inside it.

    Raises:
        LayoutError: an unknown class, or a variant of it that is not described.
    """
    reader = LAYER_READERS.get(qualified_name(pool))
    if reader is None:
        raise LayoutError(
            f"pool {seat.prefix or seat.space!r} is a {qualified_name(pool)}, wanted one of "
            f"{sorted(LAYER_READERS)}"
        )
    check_page_size(pool, seat.page_size)
    reading = reader(pool, seat)
    if seat.layer_ids:
        reading.hands_out(seat.space, required(pool, "size") // seat.page_size + 1)
    return reading


def read_mamba(pool: Any, start_layer: int) -> Reading:
    """Read a Mamba pool: convolution and temporal states, one row per state slot.

    Raises:
        LayoutError: an unknown class.
    """
    if qualified_name(pool) != MAMBA:
        raise LayoutError(f"mamba_pool is a {qualified_name(pool)}, wanted {MAMBA}")
    layers = tuple(layer_id - start_layer for layer_id in required(pool, "mamba_layer_ids"))
    seat = Seat(1, "state", "", layers)
    reading = Reading()
    states = required(pool, "mamba_cache")
    convs = required(states, "conv")
    for number, conv in enumerate(convs):
        reading.add(seat, "conv" if len(convs) == 1 else f"conv{number}", "page", conv.unbind(0))
    reading.add(seat, "ssm", "page", required(states, "temporal").unbind(0))
    reading.hands_out("state", required(pool, "size") + 1)
    return reading


def _read_mha(pool: Any, seat: Seat) -> Reading:
    reading = Reading()
    layout = required(pool, "kv_cache_layout")
    rows = ROWS_OF_LAYOUT.get(layout)
    if rows is None:
        raise LayoutError(
            f"{type(pool).__qualname__}: kv_cache_layout is {layout!r}, wanted one of "
            f"{sorted(ROWS_OF_LAYOUT)}"
        )
    # MXFP8 keeps its scales token by token, or page-wise in the order that its kernel reads.
    scale_rows = "page" if getattr(pool, "mxfp8_sf_interleaved", False) else "token"
    for name, kind in (
        ("buffer", rows),
        ("scale_buffer", scale_rows),
        ("native_scale_buffer", "page"),
    ):
        stem = name.removesuffix("buffer").removesuffix("_")
        for side in ("k", "v"):
            attribute = f"native_{side}_scale_buffer" if "native" in name else f"{side}_{name}"
            tensors = getattr(pool, attribute, None)
            if tensors is not None:
                label = f"{side}_{stem}" if stem else side
                reading.add(seat, label, kind, tensors)
    return reading


def _read_mla(pool: Any, seat: Seat) -> Reading:
    reading = Reading()
    reading.add(seat, "kv", "token", required(pool, "kv_buffer"), replicated=True)
    scales = getattr(pool, "kv_scale_buffer", None)
    if scales is not None:
        reading.add(seat, "kv_scale", "token", scales, replicated=True)
    return reading


def _read_dsa(pool: Any, seat: Seat) -> Reading:
    if required(pool, "index_kpool") != 1:
        raise LayoutError(
            f"{type(pool).__qualname__}: index_kpool is {pool.index_kpool}, wanted 1: pooled index "
            f"keys have tails per request, which no page holds"
        )
    reading = _read_mla(pool, seat)
    # A page is all its keys, then all its scales: the smallest part that means something.
    keys = required(required(pool, "index_key_cache"), "buffer")
    reading.add(seat, "index_k", "page", keys, replicated=True)
    return reading


LAYER_READERS: dict[str, Callable[[Any, Seat], Reading]] = {
    f"{_MODULE}.MHATokenToKVPool": _read_mha,
    f"{_MODULE}.MHATokenToKVPoolFP4": _read_mha,
    f"{_MODULE}.MHATokenToKVPoolMXFP8": _read_mha,
    f"{_MODULE}.MLATokenToKVPool": _read_mla,
    f"{_MODULE}.MLATokenToKVPoolFP4": _read_mla,
    f"{_MODULE}.DSATokenToKVPool": _read_dsa,
}
"""Readers by the class of the pool."""
