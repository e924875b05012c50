"""Handle of a layer-wise save: the model says which layers are written, the saver follows."""

import time
from collections.abc import Sequence

import torch

from kvferry.arguments import whole_number
from kvferry.linker.streams import Fence, fence_of_caller
from kvferry.linker.transfer import Ended, Transfer


class LayerSave(Transfer):
    """Handle of a save whose layers leave as they are written. Made by `Linker.save`.

    The model calls `layer_written` as it goes, from whatever thread launches its work. Until then a
    layer's pages are not read; from `wait_packed` on they may be written again. An object becomes
    readable once its every byte is stored; if the model does not come to its last layer in time, or
    the save is cancelled, none does.

    Attributes:
        groups: the layer groups, `[first, end)` ranges of layers: what leaves together.
        num_layers: of the model.
    """

    groups: tuple[tuple[int, int], ...]
    num_layers: int
    _device: torch.device

    def prepare(
        self, groups: Sequence[tuple[int, int]], num_layers: int, device: torch.device
    ) -> None:
        """Set how it travels; before anyone else has the handle."""
        self.groups = tuple(groups)
        self.num_layers = num_layers
        self._device = device
        self._written: list[Fence] = []  # one for each group that is written

    @property
    def is_written(self) -> bool:
        """Whether the model has said it of all layers."""
        return len(self._written) == len(self.groups)

    def layer_written(self, layer: int) -> None:
        """Say that the current stream has been given all that writes the layers up to this one.

        Cheap: an event where a layer group is complete, nothing else. Layers may be left out: the
        last one says it for all. Of a save that has ended, it is ignored.

        Args:
            layer: the last layer that is written, 0 .. num_layers - 1.

        Raises:
            ArgumentError: no such layer.
        """
        self._home.check()
        layer = whole_number("layer", layer, 0, self.num_layers - 1)
        if self.is_written:
            return
        if self.groups[len(self._written)][1] > layer + 1:
            return
        fence = fence_of_caller(self._device)
        with self._changed:
            while len(self._written) < len(self.groups) and (
                self.groups[len(self._written)][1] <= layer + 1
            ):
                self._written.append(fence)
            self._changed.notify_all()

    def all_written(self) -> None:
        """Say it of all layers at once: for engines that save after the forward pass."""
        self.layer_written(self.num_layers - 1)

    def wait_written(self, group: int, timeout_s: float) -> Fence | None:
        """Wait until a layer group is written; for the saver.

        Returns:
            The fence behind its writes; None if `timeout_s` passed before.

        Raises:
            Ended: the save is over.
        """
        until = time.monotonic() + min(timeout_s, self.left_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_over or len(self._written) > group,
                max(0.0, until - time.monotonic()),
            )
            if self.is_over:
                raise Ended
            return self._written[group] if len(self._written) > group else None
