"""Objects in staging get trailers before they leave, and are verified before they are used."""

from collections.abc import Mapping

import torch

from kvferry.errors import StoreError
from kvferry.kernels.checksum import ObjectSums
from kvferry.layout import CacheLayout
from kvferry.linker.plan import SpacePlan
from kvferry.linker.staging import Span
from kvferry.linker.streams import Fence, Lane
from kvferry.trailer import find_faults, make_ends

DEVICE_LIMIT_S = 60.0
"""Longest wait for work on the device."""


class Seal:
    """Writes and checks the ends of objects, for one layout, in one direction's thread.

    Both cost a small copy between host and device per part, in the worker's thread, never in the
    model's stream.
    """

    def __init__(self, layout: CacheLayout, lane: Lane, backend: str) -> None:
        assert layout.device is not None
        self._device = layout.device
        self._fingerprint = layout.fingerprint
        self._lane = lane
        self._backend = backend
        self._sums: Mapping[str, ObjectSums] = {
            space: ObjectSums(layout.layer_offsets[space], layout.device) for space in layout.spaces
        }

    def zeros(self, part: SpacePlan) -> torch.Tensor:
        """Return int64 `[num_pages, num_layers]` zeros on the device, to add checksums to."""
        shape = (len(part.keys), self._sums[part.space].num_layers)
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def write(self, part: SpacePlan, span: Span, sums: torch.Tensor) -> None:
        """Put trailers behind the payloads of a packed part; its pack has ended.

        Args:
            part: what the span holds.
            span: the part's memory.
            sums: the checksums that the pack has computed.
        """
        ends = make_ends(self._fingerprint, part.object_bytes, part.keys, sums.cpu().numpy())
        with self._lane.work(Fence()) as fences:
            _ends_of(part, span).copy_(torch.from_numpy(ends))
        wait(fences[-1])

    def verify(self, part: SpacePlan, span: Span) -> dict[str, str]:
        """Return what is wrong with a part that was fetched: object key to reason."""
        with self._lane.work(Fence()) as fences:
            sums = self.zeros(part)
            self._sums[part.space].add(
                span.tensor, len(part.keys), part.stride_bytes, sums, backend=self._backend
            )
        wait(fences[-1])
        return find_faults(
            _ends_of(part, span).cpu().numpy(),
            self._fingerprint,
            part.object_bytes,
            part.keys,
            sums.cpu().numpy(),
        )


def wait(fence: Fence) -> None:
    """Wait for a fence.

    Raises:
        StoreError: it was not passed within `DEVICE_LIMIT_S`.
    """
    if not fence.wait(DEVICE_LIMIT_S):
        raise StoreError(f"work on the device was not done within {DEVICE_LIMIT_S:g} s")


def _ends_of(part: SpacePlan, span: Span) -> torch.Tensor:
    """Return what follows each payload in the span, a view `[num_pages, end]`."""
    return span.tensor.as_strided(
        (len(part.keys), part.size_bytes - part.object_bytes),
        (part.stride_bytes, 1),
        span.tensor.storage_offset() + part.object_bytes,
    )
