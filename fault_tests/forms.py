"""The ways to move pages, behind one face: whole objects, layer by layer, a batch of requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransferFailed
from kvferry.linker.layer_load import LoadRequest
from kvferry.linker.linker import Linker
from kvferry.linker.transfer import Transfer, TransferResult

SLACK_S = 4.0
"""What a bound may be late by on a busy machine."""

TIMEOUT_S = 15.0
"""Deadline of the beds' transfers."""

PageIds = dict[str, list[int]]
End = TransferResult | TransferFailed


class Moving:
    """A save or load under way, in whatever form.

    Attributes:
        kind: `save` or `load`.
        whole: what the linker returned: a transfer, or a layer-wise load.
        handles: the transfers, one for each request.
        states: what the waits for layers came to.
    """

    def __init__(self, kind: str, linker: Linker, whole: Any, *, by_layer: bool) -> None:
        self.kind = kind
        self.whole = whole
        self.states: list[str] = []
        self._loads_by_layer = by_layer and kind == "load"
        self._saves_by_layer = by_layer and kind == "save"
        self.handles: list[Transfer] = [*whole.transfers] if self._loads_by_layer else [whole]
        self._num_layers = linker.layout.num_layers
        self._wait_limit_s = linker.config.wait_timeout_s + SLACK_S

    def go_on(self) -> None:
        """Say that the model has written all layers; nothing for other transfers."""
        if self._saves_by_layer:
            self.whole.all_written()

    def wait_layers(self, first: int = 0) -> list[str]:
        """Wait for each layer as a model does, and check that no wait raises or hangs."""
        for layer in range(first, self._num_layers):
            begin_s = time.monotonic()
            self.states.append(self.whole.wait_layer(layer).state)
            assert time.monotonic() - begin_s < self._wait_limit_s, f"layer {layer} waited too long"
        return self.states

    def end(self) -> list[End]:
        """Wait for the end of every request, and return how each ended."""
        self.go_on()
        if self._loads_by_layer:
            self.wait_layers(len(self.states))
        return [end_of(handle) for handle in self.handles]

    def result(self) -> TransferResult:
        """Return the result of the first request; raise if any failed."""
        ends = self.end()
        for each in ends:
            if isinstance(each, TransferFailed):
                raise each
        assert isinstance(ends[0], TransferResult)
        return ends[0]

    def cancel(self) -> None:
        """Give all of it up."""
        self.whole.cancel()


@dataclass(frozen=True)
class Form:
    """One way to move pages: `whole`, `layers`, or `batch`, which saves as `layers`."""

    name: str

    @property
    def by_layer(self) -> bool:
        """Whether layers travel one group after another."""
        return self.name != "whole"

    def save(
        self, linker: Linker, keys: Sequence[str], page_ids: PageIds, *, written: bool = True
    ) -> Moving:
        """Begin a save.

        Args:
            linker: that does it.
            keys: of the pages.
            page_ids: the pages.
            written: whether the model has written all layers already; else `Moving.go_on`.
        """
        if not self.by_layer:
            save = linker.save(keys, page_ids)
            return Moving("save", linker, save, by_layer=False)
        layer_save = linker.save(keys, page_ids, layerwise=True)
        if written:
            for layer in range(linker.layout.num_layers):
                layer_save.layer_written(layer)
        return Moving("save", linker, layer_save, by_layer=True)

    def load(self, linker: Linker, keys: Sequence[str], page_ids: PageIds) -> Moving:
        """Begin a load; a batch is cut into two requests of half the keys each."""
        if not self.by_layer:
            load = linker.load(keys, page_ids)
            return Moving("load", linker, load, by_layer=False)
        if self.name == "layers":
            layer_load = linker.load(keys, page_ids, layerwise=True)
        else:
            layer_load = linker.load_batch([LoadRequest(*half) for half in halves(keys, page_ids)])
        layer_load.start()
        return Moving("load", linker, layer_load, by_layer=True)


WHOLE, LAYERS, BATCH = Form("whole"), Form("layers"), Form("batch")
FORMS = (WHOLE, LAYERS, BATCH)
SAVE_FORMS = (WHOLE, LAYERS)
MOVES = [*((form, "save") for form in SAVE_FORMS), *((form, "load") for form in FORMS)]


def halves(keys: Sequence[str], page_ids: PageIds) -> list[tuple[list[str], PageIds]]:
    """Return the two requests of a batch."""
    middle = len(keys) // 2
    return [
        (list(keys[part]), {space: ids[part] for space, ids in page_ids.items()})
        for part in (slice(0, middle), slice(middle, None))
        if keys[part]
    ]


def name_of(value: Any) -> str:
    """Return a parameter's part of a test's name."""
    return value.name if isinstance(value, Form) else str(value)


def end_of(handle: Transfer) -> End:
    """Wait for a transfer's end, within its deadline, and return how it ended."""
    limit_s = handle.left_s + SLACK_S
    begin_s = time.monotonic()
    try:
        end: End = handle.result()
    except TransferFailed as error:
        end = error
    assert time.monotonic() - begin_s < limit_s, f"{handle!r} ended {limit_s:g} s late"
    assert handle.done()
    return end
