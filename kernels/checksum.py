"""The checksum of an object: what the kernels compute in their own pass, and the same in numpy.

The sum over all little-endian 32-bit words w_i of the object's payload of w_i x (2 i + 1), modulo
2**64; a last word of fewer bytes is filled up with zeros. Words may be summed in any order, and so
may tiles and layers. Within an object of under 2 GiB it tells every change of a single bit, byte or
word and every exchange of two bytes or words for sure: a difference of under 2**32, times one of
weights of under 2**31, is no multiple of 2**64. Other changes go unseen with a chance of some
2**-64. It is no protection against forgery.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.errors import ArgumentError
from kvferry.kernels.device import SUM_ONLY
from kvferry.kernels.handles import is_interpreted
from kvferry.kernels.launches import launches_of
from kvferry.kernels.tables import Move, Tables, build_tables
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.launch import DEFAULT_LAUNCH, LaunchConfig
from kvferry.segments import Segment

_ROW_WORDS = 1024


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
    if not num_objects or not num_bytes:
        return torch.zeros(num_objects, dtype=torch.int64, device=objects.device)
    pieces = objects.as_strided(
        (num_objects, num_bytes), (stride_bytes, 1), objects.storage_offset()
    )
    lead, behind = position % 4, -(position + num_bytes) % 4
    if lead or behind:
        pieces = torch.nn.functional.pad(pieces, (lead, behind))
    sums = _sums_of(pieces.cpu().numpy(), position // 4)
    return torch.from_numpy(sums.view(np.int64)).to(objects.device)


def _sums_of(pieces: NDArray[np.uint8], first_word: int) -> NDArray[np.uint64]:
    """Return the sums of pieces of whole words, `[num_objects]`.

    As a table of rows of `_ROW_WORDS`, weights are 2 x (row start) + (2 column + 1): so the sums of
    rows and of columns are enough, which are plain additions, at several GB/s in one thread.
    """
    words = pieces.view(np.uint32)
    num_rows, rest = divmod(words.shape[1], _ROW_WORDS)
    table = words[:, : num_rows * _ROW_WORDS].reshape(len(words), num_rows, _ROW_WORDS)
    sums = np.zeros(len(words), dtype=np.uint64)
    if num_rows:
        rows, columns = table.sum(2, dtype=np.uint64), table.sum(1, dtype=np.uint64)
        sums += (columns * (2 * np.arange(_ROW_WORDS, dtype=np.uint64) + 1)).sum(1)
        starts = first_word + np.arange(num_rows, dtype=np.uint64) * _ROW_WORDS
        sums += (rows * (2 * starts)).sum(1)
    if rest:
        index = first_word + num_rows * _ROW_WORDS + np.arange(rest, dtype=np.uint64)
        sums += (words[:, -rest:].astype(np.uint64) * (2 * index + 1)).sum(1)
    return sums
