"""What the readers of SGLang's pools hand back, and where a pool's layers sit in the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import Excluded, required
from kvferry.pools import PoolTensors


@dataclass(frozen=True)
class Seat:
    """Where a pool's layers sit in the model.

    Attributes:
        page_size: the prefix tree's.
        space: index space of the pool's page ids.
        prefix: of the names of the layout's pools.
        layer_ids: stage-local layer ids of the pool's layers, in the pool's order.
    """

    page_size: int
    space: str
    prefix: str
    layer_ids: tuple[int, ...]


@dataclass
class Reading:
    """What a reader found.

    Attributes:
        pools: for the layout, in object order.
        page_ids: by index space, how many page ids the engine's allocator can hand out, the
            reserved one included.
        replicated: names of pools that hold the same bytes on every tensor-parallel rank.
        window_tokens: sliding window, where the pool knows it.
        covers: tensors of which the layout holds a view, with `excluded` for the rest.
        kept_back: tensors that do not travel, each with the reason.
        excluded: parts of tensors that do not travel.
    """

    pools: list[PoolTensors] = field(default_factory=list)
    page_ids: dict[str, int] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    window_tokens: int | None = None
    covers: list[torch.Tensor] = field(default_factory=list)
    kept_back: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)

    def add(
        self,
        seat: Seat,
        name: str,
        rows: str,
        tensors: Sequence[torch.Tensor],
        *,
        replicated: bool = False,
    ) -> None:
        """Add a pool by its tensors, one per layer of the seat; empty tensors own nothing."""
        if len(tensors) != len(seat.layer_ids):
            raise LayoutError(
                f"pool {seat.prefix + name!r}: got {len(tensors)} tensors for layers "
                f"{list(seat.layer_ids)}, wanted one per layer"
            )
        owned = {
            layer_id: tensor
            for layer_id, tensor in zip(seat.layer_ids, tensors, strict=True)
            if tensor.numel()
        }
        if owned:
            self.pools.append(PoolTensors(seat.prefix + name, seat.space, rows, owned))
            if replicated:
                self.replicated.add(seat.prefix + name)

    def hands_out(self, space: str, page_ids: int) -> None:
        """Note that the engine uses page ids below `page_ids` in a space."""
        self.page_ids[space] = max(page_ids, self.page_ids.get(space, 0))

    def join(self, other: "Reading") -> None:
        """Add another reading's pools behind this one's."""
        self.pools += other.pools
        self.replicated |= other.replicated
        self.covers += other.covers
        self.kept_back += other.kept_back
        self.excluded += other.excluded
        for space, page_ids in other.page_ids.items():
            self.hands_out(space, page_ids)
        if other.window_tokens is not None:
            self.window_tokens = max(other.window_tokens, self.window_tokens or 0)


def check_page_size(pool: Any, page_size: int) -> None:
    """Check that a pool's pages are the tree's.

    Raises:
        LayoutError: they are not; names the class and both sizes.
    """
    got = required(pool, "page_size")
    if got != page_size:
        raise LayoutError(
            f"{type(pool).__qualname__}: page_size is {got}, wanted the tree's {page_size} "
            f"(mixed page sizes are not described)"
        )
