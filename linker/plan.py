"""What a transfer will do, computed before any byte moves; its cost grows with pages alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.arguments import shown
from kvferry.errors import ArgumentError
from kvferry.kernels.page_ids import AnyIds, PageIds, check_host_ids, own_array
from kvferry.layout import CacheLayout
from kvferry.linker.keys import KeyScheme, check_page_keys
from kvferry.trailer import stored_bytes

OBJECT_ALIGN_BYTES = 64
"""Objects in staging begin at multiples of this, so that kernels keep to 16-byte accesses."""

SpaceIds = AnyIds | Mapping[str, AnyIds]
"""Page ids for each key: of the only index space, or by index space."""


class SpacePlan(NamedTuple):  # made for every part, in a third of a frozen dataclass's time
    """One index space's pages of a transfer.

    Attributes:
        space: the index space.
        keys: object keys `[num_pages]`.
        page_ids: `[num_pages]`, checked, in host memory.
        object_bytes: size of an object's payload.
        size_bytes: size of an object in the store, its trailer included if it has one.
        stride_bytes: from one object to the next in staging.
        holds_last: whether its last page is that of the transfer's last key.
        fingerprint: of the objects, as their trailers have it: that of the keys.
    """

    space: str
    keys: list[str]
    page_ids: NDArray[np.int64]
    object_bytes: int
    size_bytes: int
    stride_bytes: int
    holds_last: bool
    fingerprint: str = ""

    def select(self, wanted: Sequence[bool]) -> "SpacePlan":
        """Return the plan of those pages alone whose entry is true."""
        if all(wanted):
            return self
        return self._replace(
            keys=[key for key, keep in zip(self.keys, wanted, strict=True) if keep],
            page_ids=self.page_ids[np.asarray(wanted, dtype=bool)],
            holds_last=self.holds_last and wanted[-1],
        )

    def parts(self, max_bytes: int) -> Iterator["SpacePlan"]:
        """Cut into parts that take at most `max_bytes` of staging each, or one object."""
        pages = max(1, max_bytes // self.stride_bytes)
        for start in range(0, len(self.keys), pages):
            end = start + pages
            yield SpacePlan(
                self.space,
                self.keys[start:end],
                self.page_ids[start:end],
                self.object_bytes,
                self.size_bytes,
                self.stride_bytes,
                self.holds_last and end >= len(self.keys),
                self.fingerprint,
            )

    def parts_and_ids(self, ids: PageIds, max_bytes: int) -> Iterator[tuple["SpacePlan", PageIds]]:
        """Cut into parts, each with its share of the plan's page ids, which are on the device."""
        first = 0
        for part in self.parts(max_bytes):
            end = first + len(part.keys)
            yield part, ids[first:end]
            first = end

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that the part takes."""
        return len(self.keys) * self.stride_bytes

    @property
    def end_bytes(self) -> int:
        """Bytes that follow an object's payload in the store; 0 without trailers."""
        return self.size_bytes - self.object_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its objects' payloads."""
        return len(self.keys) * self.object_bytes

    def addresses(self, base: int) -> range:
        """Return the objects' addresses, the first at `base`."""
        return range(base, base + self.staging_bytes, self.stride_bytes)

    @property
    def sizes(self) -> list[int]:
        """The objects' sizes in the store."""
        return [self.size_bytes] * len(self.keys)


def stride_bytes(layout: CacheLayout, space: str, *, trailer: bool) -> int:
    """Return the distance of whole objects in staging, with or without trailers."""
    size = layout.object_bytes[space]
    size = stored_bytes(size, layout.num_layers) if trailer else size
    return -(-size // OBJECT_ALIGN_BYTES) * OBJECT_ALIGN_BYTES


def plan_transfer(
    layout: CacheLayout,
    scheme: KeyScheme,
    keys: Sequence[str],
    page_ids: SpaceIds,
    *,
    unique: bool,
    trailer: bool,
    partial: bool = True,
) -> tuple[SpacePlan, ...]:
    """Check a transfer's arguments and return its plans, one per index space that has pages.

    Args:
        layout: bound to tensors.
        scheme: makes the object keys.
        keys: page keys, each once.
        page_ids: for each index space, integers `[len(keys)]`; -1 where a key has no page there.
            On a GPU they cost a device-to-host wait here: hand host ids where that matters.
        unique: they are destinations: refuse page ids that occur twice, and keys that would stay
            without a page.
        trailer: whether objects end in a trailer.
        partial: of destinations: let index spaces be left out, and pages that a prefix of these
            keys needs; each key still has one in some space.

    Raises:
        ArgumentError: an argument is wrong; nothing has happened.
    """
    checked = check_page_keys(keys)
    plans, rows = [], {}
    by_space = _by_space(layout, page_ids)
    if not by_space and checked:
        raise ArgumentError(f"page_ids are an empty mapping, wanted some of {layout.spaces}")
    for space, ids in by_space.items():
        row, some = own_array(_on_host(layout, space, ids)), checked
        if len(row) != len(checked):
            raise ArgumentError(
                f"page_ids of {space!r} have shape {list(row.shape)}, wanted [{len(checked)}], one "
                "for each key (-1 where it has no page)"
            )
        rows[space] = row
        has_last = bool(len(row)) and int(row[-1]) != -1
        if len(row) and row.min() < 0:
            present = np.flatnonzero(row != -1)
            some = [checked[index] for index in present.tolist()]
            row = row[present]
        check_host_ids(layout, space, row, unique=unique)
        object_bytes = layout.object_bytes[space]
        plans.append(
            SpacePlan(
                space,
                scheme.object_keys(some, space),
                row,
                object_bytes,
                stored_bytes(object_bytes, layout.num_layers) if trailer else object_bytes,
                stride_bytes(layout, space, trailer=trailer),
                has_last,
                scheme.fingerprint(space),
            )
        )
    if unique and rows:
        _check_complete(layout, checked, rows, partial=partial)
    return tuple(plan for plan in plans if plan.keys)


def _check_complete(
    layout: CacheLayout,
    keys: Sequence[str],
    rows: Mapping[str, NDArray[np.int64]],
    *,
    partial: bool,
) -> None:
    """Refuse page ids, by index space with -1 for no page, that leave out what is asked for."""
    num_keys = len(keys)
    if not partial:
        for space in layout.spaces:
            if space not in rows:
                raise ArgumentError(
                    f"page_ids have no {space!r}, wanted all of {layout.spaces}, or partial=True"
                )
            first = num_keys - pages_needed(layout, space, num_keys)
            needed = rows[space][first:]
            if needed.size and needed.min() < 0:
                index = first + int(needed.argmin())
                raise ArgumentError(
                    f"page_ids of {space!r} are -1 for keys[{index}], wanted a page for the last "
                    f"{num_keys - first} of {num_keys} keys, or partial=True"
                )
        if "full" in rows:
            return  # a page for each key
    without = np.maximum.reduce(list(rows.values())) < 0
    if without.any():
        index = int(without.argmax())
        raise ArgumentError(
            f"page_ids are -1 in every index space for keys[{index}], {shown(keys[index])}, wanted "
            "a page in one at least, or the key left out"
        )


def pages_needed(layout: CacheLayout, space: str, num_pages: int) -> int:
    """Return how many pages, from the last one back, a prefix needs in an index space."""
    if space == "state":
        return min(1, num_pages)
    if space == "swa" and layout.window_pages is not None:
        return min(layout.window_pages, num_pages)
    return num_pages


def _on_host(
    layout: CacheLayout, space: str, ids: AnyIds
) -> torch.Tensor | NDArray[Any] | Sequence[int]:
    """Return page ids in host memory, as they came; those on a device are waited for."""
    if isinstance(ids, PageIds):
        ids.check_space(layout, space)
        ids = ids.on_device
    if not isinstance(ids, torch.Tensor):
        return ids
    if ids.device.type != "cpu" and ids.device != layout.device:
        raise ArgumentError(
            f"page_ids of {space!r} are on {ids.device}, wanted {layout.device}, as the pools, or "
            "the host"
        )
    return ids.cpu()


def _by_space(layout: CacheLayout, page_ids: SpaceIds) -> dict[str, AnyIds]:
    if isinstance(page_ids, Mapping):
        unknown = [space for space in page_ids if space not in layout.object_bytes]
        if unknown:
            raise ArgumentError(
                f"page_ids name {shown(unknown)}, wanted index spaces {layout.spaces}"
            )
        return dict(page_ids)
    if len(layout.spaces) != 1:
        raise ArgumentError(
            f"page_ids are of one index space, wanted a mapping with {layout.spaces}"
        )
    return {layout.spaces[0]: page_ids}
