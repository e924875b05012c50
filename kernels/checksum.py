"""The checksum of a layer in an object: what the kernels compute in their own pass, and in numpy.

An object's payload is read as pairs of little-endian 32-bit words, pair i at byte 8 i. Both words
are mixed with their place and with one another, and the results added up modulo 2**64:

    one, other = i * 0x9E3779B1, i * 0x85EBCA6A + 0xC2B2AE35      modulo 2**32
    key        = one * other // 2**32
    low        = (lower word ^ one ^ key) * 0x9E3779B1            modulo 2**32
    high       = (upper word ^ other ^ key) * 0x9E3779B1          modulo 2**32
    product    = low * high + low + high * 2**32                  modulo 2**64
    term       = product ^ product // 2**32

A layer's checksum is the sum over the pairs that hold bytes of it, others' bytes counted as zeros.
So tiles may be summed in any order, and any group of layers be verified as soon as it has arrived.

Every change within one word is told for sure: but for what the other word alone makes, `product` is
`low * (high + 1)`, or `high * (low + 2**32)`, and neither repeats. All else is a matter of chance,
and was tried: exchanges of blocks of 1 to 256 bytes, rotations, shifts, repeats, fills and
permutations of neighbours, in normal numbers and in data of few values, such as signed zeros
(`tests/test_checksum_strength.py`). None went unseen, and none of 49 million exchanges tried once.
No 22 bits of the sum, taken alone, let many more of those pass than random bits would: 12 to 19,
where 12 were expected. It is no protection against forgery.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.errors import ArgumentError
from kvferry.kernels.device import PLACE_1, PLACE_2, PLACE_3, SPREAD, SUM_ONLY
from kvferry.kernels.handles import is_interpreted
from kvferry.kernels.launches import launches_of
from kvferry.kernels.tables import Move, Tables, build_tables
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.launch import DEFAULT_LAUNCH, LaunchConfig
from kvferry.segments import Segment

_BLOCK_PAIRS = 32768
_SPREAD = np.uint32(SPREAD.value)
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


class ObjectSums:
    """Computes the layers' checksums by reading objects, without any pools. Safe from any thread.

    Attributes:
        layer_offsets: as in `CacheLayout`: where each layer begins in an object, and the end.
        device: where the objects are read.
    """

    def __init__(
        self,
        layer_offsets: Sequence[int],
        device: torch.device,
        config: LaunchConfig = DEFAULT_LAUNCH,
    ) -> None:
        self.layer_offsets = tuple(layer_offsets)
        self.device = device
        self._config = config
        self._tables: dict[int, Tables] = {}

    @property
    def num_layers(self) -> int:
        """How many layers an object has, with or without bytes."""
        return len(self.layer_offsets) - 1

    def add(
        self,
        objects: torch.Tensor,
        num_objects: int,
        stride_bytes: int,
        sums: torch.Tensor,
        *,
        backend: str = "auto",
    ) -> None:
        """Add the checksum of each layer of each object to `sums`; ordered on the current stream.

        Args:
            objects: contiguous uint8, objects at multiples of `stride_bytes`; on the device, or
                pinned host memory where that is a GPU.
            num_objects: how many.
            stride_bytes: from one to the next.
            sums: contiguous int64 `[num_objects, num_layers]` on the device.
            backend: as in `Packer.pack`.

        Raises:
            ArgumentError: `objects` are too short for so many.
        """
        end = self.layer_offsets[-1]
        needed = (num_objects - 1) * stride_bytes + end if num_objects else 0
        if objects.numel() < needed:
            raise ArgumentError(f"objects have {objects.numel()} bytes, wanted at least {needed}")
        if not num_objects:
            return
        on_cpu = self.device.type == "cpu"
        ranges = ((0, self.num_layers),)
        if backend == "reference" or (backend == "auto" and on_cpu):
            layer_sums_reference(
                objects, num_objects, self.layer_offsets, ranges, stride_bytes, 0, sums
            )
            return
        if on_cpu and not is_interpreted(_move_tiles_kernel):
            raise ArgumentError("backend is 'triton' on a CPU: set TRITON_INTERPRET=1 beforehand")
        address = objects.data_ptr()
        move = Move(
            0, 8, num_objects, 1, address, stride_bytes, ranges, SUM_ONLY, sums.data_ptr(),
            self.num_layers,
        )  # fmt: skip
        align = math.gcd(16, address, stride_bytes)
        for launch in launches_of(self._tables_for(align), move, self._config):
            launch.start(self.device)

    def _tables_for(self, align: int) -> Tables:
        tables = self._tables.get(align)
        if tables is None:
            segments = []
            for layer_id, (start, end) in enumerate(itertools.pairwise(self.layer_offsets)):
                # All that is aligned goes by the wide path, only the ends by a narrow one.
                first = min(end, -(-start // 16) * 16)
                last = max(first, end // 16 * 16)
                segments += [
                    Segment(layer_id, None, 0, 0, 0, part, stop - part, 1, stop - part, stop - part)
                    for part, stop in ((start, first), (first, last), (last, end))
                    if stop > part
                ]
            tables = build_tables(segments, self.num_layers, self.device, align, self._config)
            self._tables[align] = tables
        return tables


def layer_sums_reference(
    objects: torch.Tensor,
    num_objects: int,
    layer_offsets: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    stride_bytes: int,
    origin_bytes: int,
    sums: torch.Tensor,
) -> None:
    """Do in numpy what the kernels do: add each layer's checksum in each object to `sums`.

    Args:
        objects: uint8; `objects[0]` stands at `origin_bytes` of object 0.
        num_objects: how many.
        layer_offsets: as in `CacheLayout`.
        ranges: `[first, end)` ranges of the layers that are there.
        stride_bytes: from one object to the next.
        origin_bytes: see `objects`.
        sums: int64 `[num_objects, num_layers]`.
    """
    for layer_id in (layer_id for first, end in ranges for layer_id in range(first, end)):
        start, end = layer_offsets[layer_id : layer_id + 2]
        sums[:, layer_id] += checksums_reference(
            objects[start - origin_bytes :], num_objects, end - start, stride_bytes, position=start
        )


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
    lead, behind = position % 8, -(position + num_bytes) % 8
    if lead or behind:
        pieces = torch.nn.functional.pad(pieces, (lead, behind))
    sums = _sums_of(pieces.cpu().numpy(), position // 8)
    return torch.from_numpy(sums.view(np.int64)).to(objects.device)


def _sums_of(pieces: NDArray[np.uint8], first_pair: int) -> NDArray[np.uint64]:
    """Return the sums of pieces of whole pairs of words, `[num_objects]`.

    A block at a time, which stays in a core's cache through all passes; keys once for all objects.
    """
    pairs = pieces.view(np.uint64)
    num_objects, num_pairs = pairs.shape
    sums = np.zeros(num_objects, dtype=np.uint64)
    start = 0
    while start < num_pairs:
        block, skipped = divmod(first_pair + start, _BLOCK_PAIRS)
        keys = _keys_of(block)[skipped : skipped + num_pairs - start]
        end = start + len(keys)
        num_rows = max(1, _BLOCK_PAIRS // len(keys))
        for first in range(0, num_objects, num_rows):
            rows = slice(first, first + num_rows)
            sums[rows] += _terms_of(pairs[rows, start:end], keys).sum(1)
        start = end
    return sums


def _terms_of(pairs: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return what each pair of words adds; eight passes, none of which leaves the cache."""
    words = pairs ^ keys
    halves = words.view(np.uint32)
    np.multiply(halves, _SPREAD, out=halves)
    terms = words >> _HALF
    terms *= words & _LOW
    terms += words
    np.right_shift(terms, _HALF, out=words)
    terms ^= words
    return terms


@lru_cache(maxsize=128)  # 32 MiB; larger objects have their keys worked out anew
def _keys_of(block: int) -> NDArray[np.uint64]:
    """Return the keys of the places in a block of `_BLOCK_PAIRS` pairs."""
    places = np.arange(block * _BLOCK_PAIRS, (block + 1) * _BLOCK_PAIRS, dtype=np.uint64)
    places = places.astype(np.uint32)
    one, other = places * np.uint32(PLACE_1.value), places * np.uint32(PLACE_2.value)
    other += np.uint32(PLACE_3.value)
    upper = ((one.astype(np.uint64) * other) >> _HALF).astype(np.uint32)
    keys = np.stack((one ^ upper, other ^ upper), axis=1).view(np.uint64)[:, 0]
    keys.flags.writeable = False
    return keys
