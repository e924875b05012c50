"""Layouts as engines have them: views of shared storage, foreign strides, rings, drafts, scales.

Each comes with the whole of its memory, poisoned, so that a write outside the pages shows. Built
on torch's default device: `with torch.device("cuda"): LAYOUTS[name]()`.
"""

from collections.abc import Callable

import torch

from kvferry.layout import CacheLayout
from kvferry.pools import PoolTensors
from kvferry.testing import POISON

NUM_PAGES = 6
Build = Callable[[], tuple[CacheLayout, list[torch.Tensor]]]


def storage(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Poisoned memory of that shape."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    return torch.full((num_bytes,), POISON, dtype=torch.uint8).view(dtype).view(*shape)


def layout_of(*pools: PoolTensors, page_size: int = 4, num_layers: int = 3) -> CacheLayout:
    """Return the layout of some pools, by default of 3 layers and 4 tokens a page."""
    return CacheLayout.from_tensors(list(pools), page_size=page_size, num_layers=num_layers)


def vllm_order(order: str) -> Build:
    """One storage with layers L, pages B, heads H, tokens N and content C in the given order."""

    def build() -> tuple[CacheLayout, list[torch.Tensor]]:
        sizes = {"L": 3, "B": NUM_PAGES, "H": 2, "N": 4, "C": 24}
        whole = storage(*(sizes[axis] for axis in order))
        logical = whole.permute(*(order.index(axis) for axis in "LBHNC"))
        return (
            layout_of(PoolTensors("kv", "full", "page", {i: logical[i] for i in range(3)})),
            [whole],
        )

    return build


def halves() -> tuple[CacheLayout, list[torch.Tensor]]:
    """K and V as halves of one allocation per layer, the halves rounded up to whole pages."""
    wholes = [storage(2, NUM_PAGES * 4 + 3, 2, 16) for _ in range(3)]
    return (
        layout_of(
            PoolTensors("k", "full", "token", {i: whole[0] for i, whole in enumerate(wholes)}),
            PoolTensors("v", "full", "token", {i: whole[1] for i, whole in enumerate(wholes)}),
        ),
        wholes,
    )


def interleaved() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Pages of all layers side by side in one mapped range, behind a storage offset."""
    whole = storage(7 + NUM_PAGES * 3 * 4 * 20)
    pages = whole[7:].view(NUM_PAGES, 3, 4, 20)
    return (
        layout_of(PoolTensors("k", "full", "page", {i: pages[:, i] for i in range(3)})),
        [whole],
    )


def over_allocated() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Rows reserved beyond the last whole page, and wider than the model uses."""
    wholes = [storage(NUM_PAGES * 4 + 2, 3, 32) for _ in range(2)]
    return (
        layout_of(
            PoolTensors("k", "full", "token", {i: w[:, :2, :24] for i, w in enumerate(wholes)})
        ),
        wholes,
    )


def envelope_state() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Conv and temporal state of all layers inside one envelope per slot, in between others."""
    slot = storage(NUM_PAGES, 3, 100, dtype=torch.float32)
    conv = {i: slot[:, i, 4:28].unflatten(1, (8, 3)) for i in (0, 2)}
    ssm = {i: slot[:, i, 32:96].unflatten(1, (4, 16)) for i in (0, 2)}
    return (
        layout_of(
            PoolTensors("conv", "state", "page", conv),
            PoolTensors("ssm", "state", "page", ssm),
        ),
        [slot],
    )


def layers_without_buffers() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Only layers 1 and 4 of 6 own index keys; layer 3 and 5 own nothing at all."""
    kv = {i: storage(NUM_PAGES * 4, 40) for i in (0, 1, 2, 4)}
    index = {i: storage(NUM_PAGES, 132, dtype=torch.uint8) for i in (1, 4)}
    return (
        layout_of(
            PoolTensors("kv", "full", "token", kv),
            PoolTensors("index_k", "full", "page", index),
            num_layers=6,
        ),
        [*kv.values(), *index.values()],
    )


def draft_on_target() -> tuple[CacheLayout, list[torch.Tensor]]:
    """A draft model's layers ride on the last target layers, in the same object."""
    target = {i: storage(NUM_PAGES * 4, 2, 16) for i in range(3)}
    draft = {2: storage(NUM_PAGES * 4, 1, 8)}
    return (
        layout_of(
            PoolTensors("kv", "full", "token", target),
            PoolTensors("draft_kv", "full", "token", draft),
        ),
        [*target.values(), *draft.values()],
    )  # fmt: skip


def scaled(row: list[int], scale_row: list[int], scale_dtype: torch.dtype, rows: str) -> Build:
    """Quantised K and V with their scales, per token or per page."""

    def build() -> tuple[CacheLayout, list[torch.Tensor]]:
        pools, wholes = [], []
        for name in ("k", "v"):
            data = {i: storage(NUM_PAGES * 4, *row, dtype=torch.uint8) for i in range(2)}
            num_rows = NUM_PAGES * 4 if rows == "token" else NUM_PAGES
            scales = {i: storage(num_rows, *scale_row, dtype=scale_dtype) for i in range(2)}
            pools += [
                PoolTensors(name, "full", "token", data),
                PoolTensors(f"{name}_scale", "full", rows, scales),
            ]
            wholes += [*data.values(), *scales.values()]
        return layout_of(*pools), wholes

    return build


def rings() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Rings of compressor state whose rows are addressed by the sliding window's page id."""
    ring_rows = 8
    states = {i: storage(NUM_PAGES * ring_rows, 20, dtype=torch.float32) for i in range(2)}
    window = {i: storage(NUM_PAGES, 4 * 36, dtype=torch.uint8) for i in range(3)}
    return (
        layout_of(
            PoolTensors("swa", "swa", "page", window),
            PoolTensors(
                "state", "swa", "page",
                {i: state.view(NUM_PAGES, ring_rows * 20) for i, state in states.items()},
            ),
        ),
        [*states.values(), *window.values()],
    )  # fmt: skip


def one_token_pages() -> tuple[CacheLayout, list[torch.Tensor]]:
    """Token-granular pools: every slot is a page, in rows of odd lengths."""
    k = {i: storage(NUM_PAGES, 2, 40) for i in range(3)}
    scale = {i: storage(NUM_PAGES, 3, dtype=torch.uint8) for i in range(3)}
    return (
        layout_of(
            PoolTensors("k", "full", "token", k),
            PoolTensors("scale", "full", "token", scale),
            page_size=1,
        ),
        [*k.values(), *scale.values()],
    )


LAYOUTS: dict[str, Build] = {
    **{
        f"vLLM {order}": vllm_order(order)
        for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
    "halves of an allocation": halves,
    "interleaved in one range": interleaved,
    "over-allocated": over_allocated,
    "state in an envelope": envelope_state,
    "layers without buffers": layers_without_buffers,
    "draft riding on target": draft_on_target,
    "fp8, a scale per token": scaled([2, 16], [2, 1], torch.float32, "token"),
    "fp8, a scale per page": scaled([2, 16], [2], torch.float32, "page"),
    "FP4, 16 values a scale": scaled([2, 16], [4], torch.uint8, "token"),
    "MXFP8, 32 values a scale": scaled([2, 64], [2, 2], torch.uint8, "token"),
    "rings by window page": rings,
    "pages of one token": one_token_pages,
}
