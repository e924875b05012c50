"""What vLLM's cache specs say of a group's layers: index space, window, equal on all ranks or not.

Specs are recognised by the exact names of their classes; what is not known is refused.
"""

from collections.abc import Sequence
from typing import Any

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import qualified_name, required

_MODULE = "vllm.v1.kv_cache_interface"
_SPACE_OF_SPEC = {
    f"{_MODULE}.FullAttentionSpec": "full",
    f"{_MODULE}.MLAAttentionSpec": "full",
    f"{_MODULE}.SlidingWindowSpec": "swa",
    f"{_MODULE}.SlidingWindowMLASpec": "swa",
    f"{_MODULE}.MambaSpec": "state",
}
_UNIFORM = f"{_MODULE}.UniformTypeKVCacheSpecs"
_LATENT = (f"{_MODULE}.MLAAttentionSpec", f"{_MODULE}.SlidingWindowMLASpec")


def space_of_group(group_id: int, group: Any) -> str:
    """Return the index space of a group's layers, without their tensors.

    Raises:
        LayoutError: a kind of layer that is not described, or several in one group.
    """
    names = list(required(group, "layer_names")) or ["?"]  # none on this pipeline stage
    spaces = {space_of(group_id, name, spec) for name, spec in specs_of(group, names).items()}
    if len(spaces) != 1:
        raise LayoutError(f"group {group_id}: its layers are {sorted(spaces)}, wanted one kind")
    return spaces.pop()


def specs_of(group: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return each layer's own spec; groups of layers of several sizes keep one for each."""
    spec = required(group, "kv_cache_spec")
    if qualified_name(spec) != _UNIFORM:
        return dict.fromkeys(names, spec)
    by_name = required(spec, "kv_cache_specs")
    # A layer that shares another's cache has no spec of its own; its tensor is the other's.
    return {name: by_name[name] for name in names if name in by_name}


def space_of(group_id: int, name: str, spec: Any) -> str:
    """Return the index space of a layer, or refuse a kind that is not described."""
    space = _SPACE_OF_SPEC.get(qualified_name(spec))
    if space is None:
        raise LayoutError(
            f"group {group_id} layer {name!r}: a {qualified_name(spec)}, wanted one of "
            f"{sorted(_SPACE_OF_SPEC)}"
        )
    return space


def window_tokens(spec: Any) -> int:
    """Return the tokens before the next one that a window still reads; 0 without a window."""
    if _SPACE_OF_SPEC[qualified_name(spec)] != "swa":
        return 0
    # As `num_retained_tokens`, which vLLM has from 0.33 on: the last token needs no more before it.
    window, extra = required(spec, "sliding_window"), required(spec, "extra_retained_tokens")
    return max(1, int(window) - 1 + int(extra))


def is_replicated(spec: Any) -> bool:
    """Whether the layer's pages are equal on every tensor-parallel rank."""
    if qualified_name(spec) in _LATENT:
        return True  # decode context parallelism shards it, and is part of the share
    return bool(getattr(spec, "tp_replicated", False))
