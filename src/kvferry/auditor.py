"""Refusal: which of a model's tensors no layout describes. Unknown means refused.

A side pool that nobody moved is the field's most common loss: nothing crashes, the model goes on
with another request's state. So whoever builds a layout hands over all tensors that the model
keeps, and those that do not travel are excused one by one, with a reason.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvferry.arguments import mapping, of_type, sequence
from kvferry.errors import LayoutError
from kvferry.layout import CacheLayout


def uncovered(layouts: Iterable[CacheLayout], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors with bytes that no layout describes, in the order given.

    Args:
        layouts: bound; together they describe what travels.
        tensors: every tensor in which the model keeps state of a sequence, by any name. Views and
            whole allocations are both fine; tensors without elements or memory are covered.
    """
    ranges = CoveredRanges(
        buffer.tensor
        for layout in layouts
        for buffers in layout.buffers.values()
        for buffer in buffers
        if buffer.tensor is not None
    )
    return [
        name
        for name, tensor in tensors.items()
        if tensor.numel() and tensor.device.type != "meta" and not ranges.hold(*extent_of(tensor))
    ]


def audit(
    layouts: Iterable[CacheLayout],
    tensors: Mapping[str, torch.Tensor],
    excused: Mapping[str, str] | None = None,
) -> None:
    """Refuse a model of which the layouts leave something out.

    Args:
        layouts: as in `uncovered`.
        tensors: as in `uncovered`.
        excused: names of tensors that need not travel, each with the reason.

    Raises:
        LayoutError: a tensor is neither described nor excused; an excuse has no reason, names no
            tensor, or one that is described. Names them all.
    """
    described = list(sequence("layouts", layouts, "layouts"))
    for layout in described:
        if not of_type("layouts", layout, CacheLayout).is_bound:
            raise LayoutError(
                "layouts has one that is not bound to tensors, wanted layout.bind(tensors)"
            )
    for name, tensor in mapping("tensors", tensors, "names and tensors").items():
        of_type(f"tensors[{name!r}]", tensor, torch.Tensor)
    excuses = dict(mapping("excused", excused or {}, "names and reasons"))
    left_out = uncovered(described, tensors)
    missing = [name for name in left_out if name not in excuses]
    if missing:
        details = "; ".join(
            f"{name} {list(tensors[name].shape)} {str(tensors[name].dtype).removeprefix('torch.')}"
            for name in missing
        )
        raise LayoutError(
            f"{len(missing)} of {len(tensors)} tensors are not in the layout: {details}. Describe "
            "them as pools, or excuse them with a reason"
        )
    for name, reason in excuses.items():
        if not reason:
            raise LayoutError(f"excused {name!r} has no reason, wanted one")
        if name not in left_out:
            what = "is described, and travels" if name in tensors else "is no tensor of the model"
            raise LayoutError(f"excused {name!r} {what}, wanted one that is left out")


class CoveredRanges:
    """Address ranges of tensors, joined where they touch."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        unique = {_key_of(tensor): tensor for tensor in tensors}.values()
        self._whole = {extent_of(tensor) for tensor in unique}
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._num_bytes: list[int] = []
        for tensor in sorted(unique, key=extent_of):
            begin, end = extent_of(tensor)
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


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the byte after its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (last + 1) * tensor.element_size()


def _key_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
