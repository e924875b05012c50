"""What a move is made of: equal parts that go between every page and its object."""

import math
from dataclasses import dataclass

import torch

from kvferry.runs import Run


@dataclass(frozen=True)
class Segment:
    """`count` parts of `part_bytes`, at a pitch in the pool and another in the object.

    A layout's own segments fill its objects without a gap. Other sets of segments move slices: of
    heads between ranks of different sizes, or of tokens.

    Byte b of part p belongs to token
    `(token_start_bytes + p * token_part_bytes + b) // token_bytes` of the page.

    Attributes:
        layer_id: the layer that the pool's memory belongs to.
        tensor: the pool's tensor, which keeps the memory alive; None where there is no memory.
        address: address of part 0 in page 0.
        page_stride_bytes: from one page to the next in the pool.
        num_pages: pages that the pool holds.
        object_offset: of part 0 in the object.
        part_bytes: length of a part.
        count: how many parts.
        pool_pitch_bytes: from one part to the next in the pool.
        object_pitch_bytes: from one part to the next in the object.
        token_bytes: see above; 0 where parts are not cut by tokens.
        token_part_bytes: see above.
        token_start_bytes: see above.
    """

    layer_id: int
    tensor: torch.Tensor | None
    address: int
    page_stride_bytes: int
    num_pages: int
    object_offset: int
    part_bytes: int
    count: int
    pool_pitch_bytes: int
    object_pitch_bytes: int
    token_bytes: int = 0
    token_part_bytes: int = 0
    token_start_bytes: int = 0

    @classmethod
    def of_run(
        cls,
        layer_id: int,
        tensor: torch.Tensor | None,
        address: int,
        page_stride_bytes: int,
        num_pages: int,
        object_offset: int,
        run: Run,
    ) -> "Segment":
        """Return the segment that moves a run whole, its parts in the object without a gap."""
        return cls(
            layer_id,
            tensor,
            address + run.offset_bytes,
            page_stride_bytes,
            num_pages,
            object_offset,
            run.length_bytes,
            run.count,
            run.pitch_bytes,
            run.length_bytes,
            run.token_bytes,
            run.token_part_bytes,
            run.token_start_bytes,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that it moves for each page."""
        return self.part_bytes * self.count

    @property
    def alignment_bytes(self) -> int:
        """Widest access, 16 bytes at most, that is aligned in pool, object and tokens."""
        alignment = math.gcd(
            16, self.address, self.page_stride_bytes, self.object_offset, self.part_bytes
        )
        if self.count > 1:
            alignment = math.gcd(alignment, self.pool_pitch_bytes, self.object_pitch_bytes)
        # An access must not straddle two tokens either: one may be moved and the other not.
        return math.gcd(alignment, self.token_bytes, self.token_part_bytes, self.token_start_bytes)
