"""SGLang's pools made of pools, and the pools of draft models.

Facts are those of SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import qualified_name, required
from kvferry.linker.sglang_layers import LAYER_READERS, read_layers
from kvferry.linker.sglang_reading import Reading, Seat, check_page_size
from kvferry.linker.sglang_v4 import DEEPSEEK_V4, read_deepseek_v4
from kvferry.pools import PoolTensors

HYBRID_LINEAR = "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"
SWA = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"


def read_target(pool: Any, page_size: int) -> Reading:
    """Read the pool that SGLang's `token_to_kv_pool_allocator.get_kvcache()` returns.

    Mamba states are read apart, by `read_mamba`: they hang on the request pool.

    Raises:
        LayoutError: an unknown class, or a variant of it that is not described.
    """
    name = qualified_name(pool)
    if name == HYBRID_LINEAR:
        return _read_hybrid_linear(pool, page_size)
    if name == SWA:
        return _read_swa(pool, page_size)
    if name == DEEPSEEK_V4:
        return read_deepseek_v4(pool, page_size, "")
    if name not in LAYER_READERS:
        known = sorted([*LAYER_READERS, HYBRID_LINEAR, SWA, DEEPSEEK_V4])
        raise LayoutError(f"kvcache is a {name}, wanted one of {known}")
    layer_ids = tuple(range(required(pool, "layer_num")))
    return read_layers(pool, Seat(page_size, "full", "", layer_ids))


def read_drafts(pools: Sequence[Any], page_size: int) -> Reading:
    """Read draft pools that share the target's slots: depth n rides on the target's layer n.

    Raises:
        LayoutError: as `read_layers`; depths keep different kinds of tensors.
    """
    merged: dict[str, PoolTensors] = {}
    whole = Reading()
    depth = 0
    for pool in pools:
        if qualified_name(pool) == DEEPSEEK_V4:
            reading = read_deepseek_v4(pool, page_size, "draft_", first_layer=depth)
            depth += required(pool, "_stage_end") - required(pool, "_stage_start")
        else:
            layer_ids = tuple(range(depth, depth + required(pool, "layer_num")))
            reading = read_layers(pool, Seat(page_size, "full", "draft_", layer_ids))
            depth += len(layer_ids)
        for part in reading.pools:
            before = merged.get(part.name, PoolTensors(part.name, part.space, part.rows, {}))
            if (before.space, before.rows) != (part.space, part.rows):
                raise LayoutError(
                    f"pool {part.name!r}: draft pools keep it in different ways, wanted one kind"
                )
            tensors = {**before.tensors, **part.tensors}
            merged[part.name] = PoolTensors(part.name, part.space, part.rows, tensors)
        reading.pools = []
        reading.window_tokens = None  # the target's window is what must be there
        whole.join(reading)
    whole.pools = list(merged.values())
    return whole


def _read_hybrid_linear(pool: Any, page_size: int) -> Reading:
    start = required(pool, "start_layer")
    mapping: Mapping[int, int] = required(pool, "full_attention_layer_id_mapping")
    layers = sorted(mapping, key=mapping.__getitem__)
    seat = Seat(page_size, "full", "", tuple(layer - start for layer in layers))
    check_page_size(pool, page_size)
    return read_layers(required(pool, "full_kv_pool"), seat)


def _read_swa(pool: Any, page_size: int) -> Reading:
    if required(pool, "swa_uses_full_indices") or required(pool, "swa_req_ring_size") is not None:
        raise LayoutError(
            "SWAKVPool: its sliding-window layers do not use page ids of their own (a ring per "
            "request, or the full pool's slots), wanted a paged window"
        )
    check_page_size(pool, page_size)
    start = required(pool, "start_layer")
    mapping: Mapping[int, tuple[int, bool]] = required(pool, "layers_mapping")
    reading = Reading()
    for attribute, space, prefix in (("full_kv_pool", "full", ""), ("swa_kv_pool", "swa", "swa_")):
        mine = [layer for layer, (_, is_swa) in mapping.items() if is_swa == (space == "swa")]
        mine.sort(key=lambda layer: mapping[layer][0])
        seat = Seat(page_size, space, prefix, tuple(layer - start for layer in mine))
        reading.join(read_layers(required(pool, attribute), seat))
    return reading
