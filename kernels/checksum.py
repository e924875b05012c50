"""The checksum of an object, in plain torch: what the kernels compute in their own pass.

The sum over all little-endian 32-bit words w_i of the object's payload of w_i x (2 i + 1), modulo
2**64; a last word of fewer bytes is filled up with zeros. Words may be summed in any order, and so
may tiles and layers. Within an object of under 2 GiB it tells every change of a single bit, byte or
word and every exchange of two bytes or words for sure: a difference of under 2**32, times one of
weights of under 2**31, is no multiple of 2**64. Other changes go unseen with a chance of some
2**-64. It is no protection against forgery.
"""

import math

import torch

from kvferry.errors import ArgumentError
from kvferry.kernels.device import SUM_ONLY
from kvferry.kernels.handles import is_interpreted
from kvferry.kernels.launches import launches_of
from kvferry.kernels.tables import Move, Tables, build_tables
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.launch import DEFAULT_LAUNCH, LaunchConfig
from kvferry.segments import Segment

_WORDS_AT_ONCE = 1 << 16  # terms of 64 bits that stay in a core's cache


class ObjectSums:
    """Computes checksums of objects by reading them, without any layout. Safe from any thread.

    Attributes:
        object_bytes: payload of each object.
        device: where the objects are read.
    """

    def __init__(
        self, object_bytes: int, device: torch.device, config: LaunchConfig = DEFAULT_LAUNCH
    ) -> None:
        self.object_bytes = object_bytes
        self.device = device
        self._config = config
        self._tables: dict[int, Tables] = {}

    def add(
        self,
        objects: torch.Tensor,
        num_objects: int,
        stride_bytes: int,
        sums: torch.Tensor,
        *,
        backend: str = "auto",
    ) -> None:
        """Add the checksum of each object to `sums`; ordered on the current stream.

        Args:
            objects: contiguous uint8, objects at multiples of `stride_bytes`; on the device, or
                pinned host memory where that is a GPU.
            num_objects: how many.
            stride_bytes: from one to the next.
            sums: contiguous int64 `[num_objects]` on the device.
            backend: as in `Packer.pack`.

        Raises:
            ArgumentError: `objects` are too short for so many.
        """
        needed = (num_objects - 1) * stride_bytes + self.object_bytes if num_objects else 0
        if objects.numel() < needed:
            raise ArgumentError(f"objects have {objects.numel()} bytes, wanted at least {needed}")
        if not num_objects:
            return
        on_cpu = self.device.type == "cpu"
        if backend == "reference" or (backend == "auto" and on_cpu):
            sums += checksums_reference(objects, num_objects, self.object_bytes, stride_bytes)
            return
        if on_cpu and not is_interpreted(_move_tiles_kernel):
            raise ArgumentError("backend is 'triton' on a CPU: set TRITON_INTERPRET=1 beforehand")
        address = objects.data_ptr()
        move = Move(
            0, 8, num_objects, 1, address, stride_bytes, ((0, 1),), SUM_ONLY, sums.data_ptr()
        )
        align = math.gcd(16, address, stride_bytes)
        for launch in launches_of(self._tables_for(align), move, self._config):
            launch.start(self.device)

    def _tables_for(self, align: int) -> Tables:
        tables = self._tables.get(align)
        if tables is None:
            # All that is aligned goes by the wide path, only the rest by a narrow one.
            wide = self.object_bytes // 16 * 16
            parts = [(0, wide), (wide, self.object_bytes - wide)]
            segments = [
                Segment(0, None, 0, 0, 0, offset, num_bytes, 1, num_bytes, num_bytes)
                for offset, num_bytes in parts
                if num_bytes
            ]
            tables = build_tables(segments, 1, self.device, align, self._config)
            self._tables[align] = tables
        return tables


def checksums_reference(
    objects: torch.Tensor,
    num_objects: int,
    num_bytes: int,
    stride_bytes: int,
    *,
    position: int = 0,
) -> torch.Tensor:
    """Return what a piece of each object adds to its checksum, int64 `[num_objects]`.

    Args:
        objects: uint8, the pieces at multiples of `stride_bytes`.
        num_objects: how many.
        num_bytes: length of a piece; the whole payload with `position` 0 gives the checksum.
        stride_bytes: from one to the next.
        position: where the piece begins in its object.
    """
    sums = torch.zeros(num_objects, dtype=torch.int64, device=objects.device)
    for index in range(num_objects):
        piece = objects[index * stride_bytes : index * stride_bytes + num_bytes]
        sums[index] = _sum_of(piece, position)
    return sums


def _sum_of(piece: torch.Tensor, position: int) -> torch.Tensor:
    before, behind = position % 4, -(position + piece.numel()) % 4
    if before or behind or piece.data_ptr() % 4 or piece.storage_offset() % 4:
        piece = torch.nn.functional.pad(piece, (before, behind))
    words = piece.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for first in range(0, words.numel(), _WORDS_AT_ONCE):
        terms = words[first : first + _WORDS_AT_ONCE].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        index = position // 4 + first
        weights = torch.arange(index, index + terms.numel(), device=piece.device)
        total += torch.sum(terms.mul_(weights.mul_(2).add_(1)))
    return total
