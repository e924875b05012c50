"""Page ids, checked once and then kept where the kernels read them."""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout


class PageIds:
    """`[num_pages]` valid page ids of one index space, on the pools' device.

    Made by `PageIds.check`. Slicing gives page ids over the same memory, without a new check.

    Attributes:
        unique: whether no id occurs twice, so that they can be destinations.
        id_bytes: 4 or 8, width of an id.
        address: of the first id, on the device.
    """

    def __init__(self, on_device: torch.Tensor, *, unique: bool) -> None:
        """Take an int32 or int64 tensor `[num_pages]` of valid ids, contiguous, on the device."""
        self.unique = unique
        self.id_bytes = on_device.element_size()
        self.address = on_device.data_ptr()
        self._all = on_device
        self._first = 0
        self._num_pages = on_device.shape[0]

    @property
    def on_device(self) -> torch.Tensor:
        """The ids as a tensor `[num_pages]`."""
        return self._all[self._first : self._first + self._num_pages]

    def __len__(self) -> int:
        return self._num_pages

    def __getitem__(self, part: slice) -> "PageIds":
        first, end, step = part.indices(self._num_pages)
        if step != 1:
            raise ArgumentError(f"a slice of page ids has step {step}, wanted 1")
        # Not by a slice of the tensor: a launch takes the address alone, and that costs a tenth.
        some = PageIds.__new__(PageIds)
        some.unique = self.unique
        some.id_bytes = self.id_bytes
        some.address = self.address + first * self.id_bytes
        some._all = self._all
        some._first = self._first + first
        some._num_pages = max(0, end - first)
        return some

    @classmethod
    def check(
        cls,
        layout: CacheLayout,
        space: str,
        page_ids: "AnyIds",
        *,
        unique: bool,
    ) -> "PageIds":
        """Return the ids, checked, on the layout's device.

        Ids in host memory are checked there and uploaded without waiting. Ids that are already on
        a GPU cost one device-to-host wait: hand host ids, or a `PageIds`, on a hot path.

        Args:
            layout: bound to tensors.
            space: the index space that the ids address.
            page_ids: `[num_pages]` integers, on the host or on the layout's device.
            unique: refuse an id that occurs twice (needed where pages are written).

        Raises:
            ArgumentError: wrong space, dtype, shape or device; an id outside the pools; a double.
        """
        if isinstance(page_ids, PageIds):
            if unique and not page_ids.unique:
                return cls.check(layout, space, page_ids.on_device, unique=True)
            return page_ids
        if isinstance(page_ids, torch.Tensor) and page_ids.device.type != "cpu":
            return cls._check_on_device(layout, space, page_ids, unique)
        return cls.upload(layout, host_page_ids(layout, space, page_ids, unique=unique), unique)

    @classmethod
    def upload(cls, layout: CacheLayout, ids: NDArray[np.int64], unique: bool) -> "PageIds":
        """Return ids that `host_page_ids` has checked, on the layout's device.

        On a GPU the copy is ordered on the current stream and not waited for.
        """
        assert layout.device is not None
        host = torch.from_numpy(ids)
        if layout.device.type == "cpu":
            return cls(host, unique=unique)
        # Checked ids fit 32 bits; so they take half the registers of a kernel.
        narrow = host.to(torch.int32).pin_memory()
        return cls(narrow.to(layout.device, non_blocking=True), unique=unique)

    @classmethod
    def _check_on_device(
        cls, layout: CacheLayout, space: str, ids: torch.Tensor, unique: bool
    ) -> "PageIds":
        _check_space(layout, space)
        if ids.device != layout.device:
            raise ArgumentError(
                f"page_ids are on {ids.device}, wanted {layout.device}, as the pools, or the host"
            )
        _check_form(tuple(ids.shape), ids.dtype in (torch.int32, torch.int64), str(ids.dtype))
        ids = ids.contiguous()
        if len(ids):
            ordered = ids.sort().values
            doubles = ordered[1:][ordered[1:] == ordered[:-1]] if unique else ordered[:0]
            low, high, num_doubles = torch.stack(
                [ordered[0], ordered[-1], torch.tensor(len(doubles), device=ids.device)]
            ).tolist()
            _check_bounds(low, high, layout.num_pages[space], space)
            if num_doubles:
                _refuse_double(int(doubles[0]))
        return cls(ids, unique=unique)


def host_page_ids(
    layout: CacheLayout,
    space: str,
    page_ids: torch.Tensor | NDArray[Any] | Sequence[int],
    *,
    unique: bool,
) -> NDArray[np.int64]:
    """Return page ids, checked, as a new int64 array `[num_pages]` in host memory.

    Raises:
        ArgumentError: as `PageIds.check`.
    """
    ids = own_array(page_ids)
    check_host_ids(layout, space, ids, unique=unique)
    return ids


def own_array(page_ids: torch.Tensor | NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """Return integers as a new int64 array `[num_pages]`; whether pages are so called is not asked.

    Raises:
        ArgumentError: wrong dtype or shape.
    """
    if isinstance(page_ids, list) and page_ids and not isinstance(page_ids[0], bool):
        with suppress(TypeError, OverflowError):  # not integers of 64 bits: numpy tells what
            return np.frombuffer(array("q", page_ids), dtype=np.int64)  # takes two thirds as long
    ids = np.asarray(page_ids)
    _check_form(ids.shape, ids.dtype.kind in "iu" or ids.size == 0, str(ids.dtype))
    return np.array(ids, dtype=np.int64)


def check_host_ids(
    layout: CacheLayout, space: str, ids: NDArray[np.int64], *, unique: bool
) -> None:
    """Check that pages are called so, and if asked that each is named once.

    Raises:
        ArgumentError: wrong space; an id outside the pools; a double.
    """
    _check_space(layout, space)
    if ids.size:
        _check_bounds(int(ids.min()), int(ids.max()), layout.num_pages[space], space)
        if unique:
            ordered = np.sort(ids)
            doubles = ordered[1:][ordered[1:] == ordered[:-1]]
            if doubles.size:
                _refuse_double(int(doubles[0]))


def _check_space(layout: CacheLayout, space: str) -> None:
    if space not in layout.num_pages:
        raise ArgumentError(f"space is {space!r}, wanted one of {sorted(layout.num_pages)}")


def _check_form(shape: tuple[int, ...], is_integer: bool, dtype: str) -> None:
    if len(shape) != 1:
        raise ArgumentError(f"page_ids have shape {list(shape)}, wanted [num_pages]")
    if not is_integer:
        raise ArgumentError(f"page_ids are {dtype}, wanted int32 or int64")


def _check_bounds(low: int, high: int, num_pages: int, space: str) -> None:
    if low < 0 or high >= num_pages:
        raise ArgumentError(
            f"page_ids hold {low if low < 0 else high}, wanted 0 .. {num_pages - 1}: the pools of "
            f"index space {space!r} have {num_pages} pages"
        )


def _refuse_double(page_id: int) -> None:
    raise ArgumentError(f"page_ids hold {page_id} twice, wanted each destination once")


AnyIds: TypeAlias = PageIds | torch.Tensor | NDArray[Any] | Sequence[int]
"""What callers may hand as page ids."""
