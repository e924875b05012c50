"""Which entries of a pool's sharded axis each tensor-parallel rank holds.

An axis is one part or several concatenated ones (a Mamba convolution holds q, k and v), and every
part is cut by itself. A part of `total` entries, of which each of `tp_size` ranks holds `local`, is
cut into `total / local` pieces. Where there are more ranks than pieces (KV heads, mostly), as many
neighbouring ranks hold the same piece: rank r of n holds head `r * num_heads // n`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.arguments import integers, string
from kvferry.errors import LayoutError


@dataclass(frozen=True)
class Sharding:
    """How one axis of a pool's rows is shared out; the pool's four fields of the same names."""

    shard_axis: int | None = None
    shard_parts: tuple[int, ...] = ()
    shard_totals: tuple[int, ...] = ()
    head_group: str = ""

    @classmethod
    def of_entry(
        cls, entry: Mapping[str, Any], row_shape: tuple[int, ...], tp_size: int, owner: str
    ) -> "Sharding":
        """Read and check a description's entries; the defaults of parts and totals are filled in.

        Raises:
            LayoutError: they contradict each other, the row or the number of ranks; begins with
                `owner`.
        """
        axis = entry.get("shard_axis")
        parts = integers(owner, "shard_parts", entry.get("shard_parts") or ())
        totals = integers(owner, "shard_totals", entry.get("shard_totals") or ())
        group = string(
            f"{owner}: head_group", entry.get("head_group", ""), least=0, error=LayoutError
        )
        if axis is None:
            if parts or totals or group:
                raise LayoutError(
                    f"{owner}: shard_parts {parts}, shard_totals {totals} and head_group "
                    f"{group!r} describe no axis, wanted shard_axis with them"
                )
            return cls()
        if type(axis) is not int or not 0 <= axis < len(row_shape):
            raise LayoutError(
                f"{owner}: shard_axis is {axis!r}, wanted 0 .. {len(row_shape) - 1}, an axis of "
                f"row_shape {row_shape}"
            )
        parts = parts or (row_shape[axis],)
        totals = totals or tuple(size * tp_size for size in parts)
        if any(size < 1 for size in parts) or sum(parts) != row_shape[axis]:
            raise LayoutError(
                f"{owner}: shard_parts are {parts}, wanted positive sizes that add up to "
                f"{row_shape[axis]}, the row's axis {axis}"
            )
        if len(totals) != len(parts):
            raise LayoutError(
                f"{owner}: shard_totals are {totals}, wanted one for each of {len(parts)} parts"
            )
        for local, total in zip(parts, totals, strict=True):
            _check_part(local, total, tp_size, owner)
        if group and len(parts) > 1:
            raise LayoutError(
                f"{owner}: head_group is {group!r}, but the axis has parts {parts}, wanted one "
                "part: heads are counted along the whole axis"
            )
        return cls(axis, parts, totals, str(group))


def _check_part(local: int, total: int, tp_size: int, owner: str) -> None:
    held = local * tp_size
    if total < 1 or total % local:
        raise LayoutError(
            f"{owner}: a part of {total} entries in all has {local} on a rank, wanted a number "
            "that divides it"
        )
    if held < total or held % total:
        raise LayoutError(
            f"{owner}: {tp_size} ranks with {local} entries each hold {held}, wanted {total} or a "
            "multiple of it: every entry on equally many ranks"
        )


@dataclass(frozen=True)
class Piece:
    """Entries `[first, first + size)` of a part, and who holds them.

    Attributes:
        first: in the whole part.
        size: entries.
        ranks: tensor-parallel ranks, neighbours.
    """

    first: int
    size: int
    ranks: range


def pieces(local: int, total: int, tp_size: int) -> list[Piece]:
    """Return the pieces of a part, in order; together they are the whole of it."""
    replicas = local * tp_size // total
    return [
        Piece(number * local, local, range(number * replicas, (number + 1) * replicas))
        for number in range(total // local)
    ]


def held_by(rank: int, local: int, total: int, tp_size: int) -> Piece:
    """Return the piece that a rank holds."""
    return pieces(local, total, tp_size)[rank * total // (local * tp_size)]


def starts(parts: Sequence[int]) -> list[int]:
    """Return where each part begins along a rank's axis."""
    return [sum(parts[:number]) for number in range(len(parts))]
