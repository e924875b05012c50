"""Objects in staging get trailers before they leave, and are verified before they are used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from kvferry.errors import StoreError
from kvferry.kernels.checksum import ObjectSums
from kvferry.kernels.pack import Packer
from kvferry.launch import LaunchConfig
from kvferry.linker.plan import SpacePlan
from kvferry.linker.staging import Span
from kvferry.linker.streams import Fence, Lane
from kvferry.trailer import find_faults, make_ends

DEVICE_LIMIT_S = 60.0
"""Longest wait for work on the device."""


@dataclass(frozen=True)
class Checked:
    """What verifying objects found.

    Attributes:
        faults: object key to what is wrong with it; empty if all are good.
        sums: the layers' checksums as received, int64 `[num_pages, num_layers]` on the device.
        ends: what followed the payloads, uint8 `[num_pages, end_bytes]` on the device.
    """

    faults: dict[str, str]
    sums: torch.Tensor
    ends: torch.Tensor


class Seal:
    """Writes and checks the ends of objects, for one layout, on one lane.

    Both cost a small copy between host and device per part, in the caller's thread and on the lane,
    never in the model's stream.
    """

    def __init__(self, packers: Mapping[str, Packer], lane: Lane, backend: str) -> None:
        """Make one for what `packers` move, by space, under their budget of programs."""
        layout = next(iter(packers.values())).layout
        assert layout.device is not None
        self._device = layout.device
        self._num_layers = layout.num_layers
        self._lane = lane
        self._backend = backend
        self._sums: Mapping[str, ObjectSums] = {
            space: ObjectSums(
                layout.layer_offsets[space],
                layout.device,
                LaunchConfig(max_programs=packer.max_programs),
            )
            for space, packer in packers.items()
        }

    def zeros(self, num_pages: int) -> torch.Tensor:
        """Return int64 `[num_pages, num_layers]` zeros on the device, to add checksums to."""
        return torch.zeros((num_pages, self._num_layers), dtype=torch.int64, device=self._device)

    def write(
        self, ends: torch.Tensor, part: SpacePlan, keys: Sequence[str], sums: torch.Tensor
    ) -> None:
        """Put trailers behind the payloads of packed objects; their pack has ended.

        Args:
            ends: the memory behind the payloads, a view uint8 `[num_pages, end_bytes]`.
            part: of whose index space they are.
            keys: the objects' keys.
            sums: the checksums that the pack has computed, `[num_pages, num_layers]`.
        """
        (host_sums,) = self._on_host(sums)
        made = make_ends(part.fingerprint, part.object_bytes, keys, host_sums)
        with self._lane.work(Fence()) as fences:
            ends.copy_(torch.from_numpy(made))
        wait(fences[-1])

    def verify(self, part: SpacePlan, span: Span) -> Checked:
        """Return what is right and wrong with whole objects that were fetched into a span."""
        ends = ends_of(
            span.tensor, len(part.keys), part.stride_bytes, part.object_bytes, part.end_bytes
        )
        with self._lane.work(Fence()):
            sums = self.zeros(len(part.keys))
            self._sums[part.space].add(
                span.tensor, len(part.keys), part.stride_bytes, sums, backend=self._backend
            )
        return Checked(self.faults(part, ends, sums), sums, ends)

    def faults(self, part: SpacePlan, ends: torch.Tensor, sums: torch.Tensor) -> dict[str, str]:
        """Return what is wrong with objects: object key to reason, empty if all are good.

        Waits for the lane: only its own stream, since any other may wait for this very load.

        Args:
            part: keys, and the size of a payload.
            ends: what followed the payloads, uint8 `[num_pages, end_bytes]`, on the device.
            sums: the layers' checksums as received, int64 `[num_pages, num_layers]`, there too.
        """
        host_ends, host_sums = self._on_host(ends, sums)
        return find_faults(host_ends, part.fingerprint, part.object_bytes, part.keys, host_sums)

    def _on_host(self, *tensors: torch.Tensor) -> list[NDArray[Any]]:
        """Return copies in host memory, made behind what the lane has been given."""
        with self._lane.work(Fence()) as fences:
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        wait(fences[-1])
        return [copy.numpy() for copy in copies]


def wait(fence: Fence) -> None:
    """Wait for a fence.

    Raises:
        StoreError: it was not passed within `DEVICE_LIMIT_S`.
    """
    if not fence.wait(DEVICE_LIMIT_S):
        raise StoreError(f"work on the device was not done within {DEVICE_LIMIT_S:g} s")


def ends_of(
    objects: torch.Tensor, num_objects: int, stride_bytes: int, start_bytes: int, end_bytes: int
) -> torch.Tensor:
    """Return what follows each payload, a view uint8 `[num_objects, end_bytes]`.

    Args:
        objects: uint8 memory that holds them.
        num_objects: how many.
        stride_bytes: from one to the next.
        start_bytes: where the first one's payload ends.
        end_bytes: how much follows it.
    """
    return objects.as_strided(
        (num_objects, end_bytes), (stride_bytes, 1), objects.storage_offset() + start_bytes
    )
