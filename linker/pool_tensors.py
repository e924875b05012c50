"""Every tensor that an engine's pool objects hold, so that none is left undescribed.

An engine that grows a side pool does not tell its cache connectors. So the readers of
`sglang_pools` and `vllm_pools` do not trust a list of attributes: they walk the objects, and a
tensor that is neither in the layout nor in a list with reasons is an error.
"""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.auditor import CoveredRanges, extent_of
from kvferry.errors import LayoutError


@dataclass(frozen=True)
class HeldTensor:
    """A tensor and where it was found.

    Attributes:
        owner: class of the object that holds it.
        attribute: the object's attribute.
        path: from the root, for example `SWAKVPool.swa_kv_pool.k_buffer[3]`; the number is the
            layer in the pool's own count.
        tensor: the tensor.
    """

    owner: str
    attribute: str
    path: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Excluded:
    """A tensor that does not travel, and why.

    Attributes:
        path: where it was found, as in `HeldTensor`.
        reason: why a page is whole without it.
        num_bytes: its size.
    """

    path: str
    reason: str
    num_bytes: int


def held_tensors(roots: Iterable[Any], packages: Sequence[str]) -> Iterator[HeldTensor]:
    """Yield the tensors that objects hold, through lists, dictionaries and each other.

    Args:
        roots: where to begin.
        packages: names of the packages whose objects are entered; others are passed by.
    """
    seen: set[int] = set()
    todo = [(root, "", "", type(root).__qualname__) for root in roots]
    while todo:
        value, owner, attribute, path = todo.pop()
        if isinstance(value, torch.Tensor):
            yield HeldTensor(owner, attribute, path, value)
            continue
        if id(value) in seen:
            continue
        if isinstance(value, Mapping):
            seen.add(id(value))
            todo += [(inner, owner, attribute, f"{path}[{key!r}]") for key, inner in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            seen.add(id(value))
            todo += [
                (inner, owner, attribute, f"{path}[{index}]") for index, inner in enumerate(value)
            ]
        elif _is_entered(value, packages):
            seen.add(id(value))
            name = type(value).__qualname__
            todo += [(inner, name, key, f"{path}.{key}") for key, inner in _attributes(value)]


def undescribed(
    held: Iterable[HeldTensor],
    described: Iterable[torch.Tensor],
    reasons: Mapping[tuple[str, str], str],
    excluded: Iterable[tuple[torch.Tensor, str]] = (),
) -> tuple[Excluded, ...]:
    """Return the tensors that do not travel, each with its reason.

    Args:
        held: what the objects hold.
        described: the layout's tensors.
        reasons: by class and attribute, why a tensor does not travel.
        excluded: single tensors that do not travel, with the reason.

    Raises:
        LayoutError: a tensor has neither a place in the layout nor a reason; names class,
            attribute and layer.
    """
    ranges = CoveredRanges(described)
    one_by_one = {extent_of(tensor): reason for tensor, reason in excluded}
    left_out = {}
    for item in held:
        extent = extent_of(item.tensor)
        reason = one_by_one.get(extent) or reasons.get((item.owner, item.attribute))
        if item.tensor.numel() == 0 or item.tensor.device.type == "meta":
            continue
        if reason is not None:
            num_bytes = item.tensor.numel() * item.tensor.element_size()
            left_out[item.path] = Excluded(item.path, reason, num_bytes)
        elif not ranges.hold(*extent):
            raise LayoutError(
                f"{item.path}: a tensor {list(item.tensor.shape)} of {item.tensor.dtype} that no "
                f"pool describes, wanted every tensor in the layout or in a list with reasons"
            )
    return tuple(left_out[path] for path in sorted(left_out))


def qualified_name(value: object) -> str:
    """Return module and name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def required(value: object, attribute: str) -> Any:
    """Return an attribute that a reader relies on.

    Raises:
        LayoutError: the object has none of that name; names class and attribute.
    """
    if not hasattr(value, attribute):
        raise LayoutError(
            f"{type(value).__qualname__} has no attribute {attribute!r}: the engine's version "
            f"differs from the one this reader was written for"
        )
    return getattr(value, attribute)


def _is_entered(value: object, packages: Sequence[str]) -> bool:
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    return type(value).__module__.split(".")[0] in packages


def _attributes(value: object) -> list[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:  # slots, and msgspec's structs
        slots = cls.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
        names.update(dict.fromkeys(cls.__dict__.get("__struct_fields__", ())))
    missing = object()
    found = [(name, getattr(value, name, missing)) for name in names if name != "__dict__"]
    return [(name, inner) for name, inner in found if inner is not missing]
