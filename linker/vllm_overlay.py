"""Whether vLLM's groups, which lie over each other in memory, do so block by block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.errors import LayoutError


@dataclass(frozen=True)
class Extent:
    """Memory of one layer's tensor.

    Attributes:
        group_id: the layer's group.
        begin: address of the first byte.
        end: address behind the last byte.
        block_stride: bytes from one block to the next.
    """

    group_id: int
    begin: int
    end: int
    block_stride: int

    @classmethod
    def of(cls, group_id: int, tensor: torch.Tensor, num_blocks: int) -> "Extent":
        """Measure a tensor of blocks."""
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size, begin = tensor.element_size(), tensor.data_ptr()
        stride = tensor.stride(0) * (len(tensor) // num_blocks) * size
        return cls(group_id, begin, begin + (last + 1) * size, stride)


def check_overlay(extents: Sequence[Extent]) -> None:
    """Refuse groups where a block of one lies over several of another's.

    vLLM keeps a block in one group at a time, so that groups may share memory block by block. With
    heads before blocks (LHBNC) and states, which have no heads, they share it in another way, and
    blocks of one request would be overwritten by another's.
    """
    seen: set[tuple[int, int, int]] = set()
    for one in extents:
        if (one.group_id, one.begin, one.block_stride) in seen:
            continue
        seen.add((one.group_id, one.begin, one.block_stride))
        for other in extents:
            if (
                one.group_id < other.group_id
                and one.begin < other.end
                and other.begin < one.end
                and one.block_stride != other.block_stride
            ):
                raise LayoutError(
                    f"groups {one.group_id} and {other.group_id} share memory in blocks of "
                    f"{one.block_stride} and {other.block_stride} bytes, wanted equal ones: choose "
                    "another kv_cache_layout"
                )
