"""Every tensor that an engine's pool objects hold, so that none is left undescribed.

An engine that grows a side pool does not tell its cache connectors. So the readers of
`sglang_pools` and `vllm_pools` do not trust a list of attributes: they walk the objects, and a
tensor that is neither in the layout nor in a list with reasons is an error.
"""

import bisect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
    ranges = _Ranges(described)
    one_by_one = {_extent(tensor): reason for tensor, reason in excluded}
    left_out = {}
    for item in held:
        extent = _extent(item.tensor)
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


class _Ranges:
    """Address ranges of tensors, joined where they touch."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        unique = {_layout_of(tensor): tensor for tensor in tensors}.values()
        self._whole = {_extent(tensor) for tensor in unique}
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._num_bytes: list[int] = []
        for tensor in sorted(unique, key=_extent):
            begin, end = _extent(tensor)
            num_bytes = tensor.numel() * tensor.element_size()
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
                self._num_bytes[-1] += num_bytes
            else:
                self._begins.append(begin)
                self._ends.append(end)
                self._num_bytes.append(num_bytes)

    def hold(self, begin: int, end: int) -> bool:
        """Whether the tensors hold every byte; a view between the rows of others is not held."""
        if (begin, end) in self._whole:
            return True
        index = bisect.bisect_right(self._begins, begin) - 1
        if index < 0 or end > self._ends[index]:
            return False
        return self._num_bytes[index] >= self._ends[index] - self._begins[index]


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


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
