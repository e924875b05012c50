"""Page ids, checked once and then kept where the kernels read them."""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.arguments import flag, of_type, shown
from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout

_MAX_ID = 2**63 - 1


class PageIds:
    """`[num_pages]` valid page ids of one index space, on the pools' device.

    Made by `PageIds.check`. Slicing gives page ids over the same memory, without a new check.

    Attributes:
        unique: whether no id occurs twice, so that they can be destinations.
        checked_for: the layout and index space that they are good for; None: any, by whoever made
            them without a check.
        id_bytes: 4 or 8, width of an id.
        address: of the first id, on the device.
    """

    def __init__(
        self,
        on_device: torch.Tensor,
        *,
        unique: bool,
        checked_for: tuple[CacheLayout, str] | None = None,
    ) -> None:
        """Take an int32 or int64 tensor `[num_pages]` of valid ids, contiguous, on the device."""
        self.unique = unique
        self.checked_for = checked_for
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
        if not isinstance(part, slice):
            raise ArgumentError(f"page ids are taken by {shown(part)}, wanted a slice")
        first, end, step = part.indices(self._num_pages)
        if step != 1:
            raise ArgumentError(f"a slice of page ids has step {step}, wanted 1")
        # Not by a slice of the tensor: a launch takes the address alone, and that costs a tenth.
        some = PageIds.__new__(PageIds)
        some.unique = self.unique
        some.checked_for = self.checked_for
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
        if type(unique) is not bool:
            flag("unique", unique)
        if isinstance(page_ids, PageIds):
            page_ids.check_space(layout, space)
            if unique and not page_ids.unique:
                return cls.check(layout, space, page_ids.on_device, unique=True)
            return page_ids
        if isinstance(page_ids, torch.Tensor) and page_ids.device.type != "cpu":
            return cls._check_on_device(layout, space, page_ids, unique)
        host = host_page_ids(layout, space, page_ids, unique=unique)
        checked = cls.upload(layout, host, unique)
        checked.checked_for = (layout, space)
        return checked

    def check_space(self, layout: CacheLayout, space: str) -> None:
        """See that they are ids of a layout's index space.

        Raises:
            ArgumentError: they were checked for another.
        """
        if self.checked_for is None:
            return
        their_layout, their_space = self.checked_for
        if their_space != space or their_layout is not layout:
            other = "another layout" if their_layout is not layout else f"{their_space!r}"
            raise ArgumentError(
                f"page_ids are PageIds that were checked for {other}, wanted some for index space "
                f"{space!r} of this layout"
            )

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
        return cls(ids, unique=unique, checked_for=(layout, space))


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
    if isinstance(page_ids, list) and page_ids:
        with suppress(TypeError, OverflowError):  # not integers of 64 bits: numpy tells what
            ids = np.frombuffer(array("q", page_ids), dtype=np.int64)  # takes two thirds as long
            _check_no_truths(page_ids, ids)
            return ids
    try:
        found = np.asarray(page_ids)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged; on a device; sparse
        raise ArgumentError(
            f"page_ids are {shown(page_ids)}, wanted integers [num_pages]: {error}"
        ) from None
    if found.ndim == 0:
        raise ArgumentError(f"page_ids are {shown(page_ids)}, wanted integers [num_pages]")
    _check_form(found.shape, found.dtype.kind in "iu" or found.size == 0, str(found.dtype))
    if found.dtype.kind == "u" and found.size and int(found.max()) > _MAX_ID:
        raise ArgumentError(f"page_ids hold {found.max()}, wanted {_MAX_ID} at most")
    if not isinstance(page_ids, np.ndarray | torch.Tensor):
        _check_no_truths(page_ids, found)
    return np.array(found, dtype=np.int64)


def _check_no_truths(page_ids: Sequence[Any], ids: NDArray[Any]) -> None:
    """Refuse truth values, which pass for 0 and 1: a mask instead of what it picks."""
    if ids.size and ids.min() <= 1:  # else a look at each is spared
        for index in np.flatnonzero((ids == 0) | (ids == 1)).tolist():
            value = page_ids[index]
            if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
                raise ArgumentError(f"page_ids[{index}] is {value}, wanted an integer")


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
    of_type("layout", layout, CacheLayout)
    if not layout.is_bound:
        raise ArgumentError("layout is not bound to tensors, wanted layout.bind(tensors)")
    if not isinstance(space, str) or space not in layout.num_pages:
        raise ArgumentError(f"space is {shown(space)}, wanted one of {sorted(layout.num_pages)}")


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
