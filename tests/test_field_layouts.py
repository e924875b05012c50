"""Layouts as engines have them, moved byte for byte; see `benchmarks/field_layouts.py`."""

import pytest
import torch
from field_layouts import LAYOUTS, storage

from kvferry.kernels.pack import Packer
from kvferry.testing import (
    POISON,
    check_poison,
    check_telling,
    object_bytes_of,
    poison,
    write_telling,
)


def raw(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.flatten().view(torch.uint8) for tensor in tensors]


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_byte_moves_and_no_other(name: str, path: str) -> None:
    layout, wholes = LAYOUTS[name]()
    for space in layout.spaces:
        sources, targets = [4, 0, 3], [1, 5, 2]
        write_telling(layout, space, sources, sources)
        packer = Packer(layout, space)
        stride = -(-layout.object_bytes[space] // 16) * 16
        objects = storage(3, stride, dtype=torch.uint8)
        packer.pack(sources, objects.view(-1), stride_bytes=stride, backend=path)
        wanted = object_bytes_of(layout, space, sources)
        assert torch.equal(objects[:, : layout.object_bytes[space]], wanted)
        packer.unpack(targets, objects.view(-1), stride_bytes=stride, backend=path)
        check_telling(layout, space, targets, sources)
        check_telling(layout, space, sources, sources)
        for other in layout.spaces:
            check_poison(layout, other, [*sources, *targets] if other == space else [])
        # All that is not a page keeps its poison: gaps, neighbours, rows behind the last page.
        poisoned = [torch.full_like(part, POISON) for part in raw(wholes)]
        poison(layout)
        assert all(torch.equal(*pair) for pair in zip(raw(wholes), poisoned, strict=True))


def test_orders_of_one_geometry_have_different_fingerprints() -> None:
    prints = {LAYOUTS[f"vLLM {order}"]()[0].fingerprint
              for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")}  # fmt: skip
    # Pages are head-major or token-major inside; where layers lie is not the object's business.
    assert len(prints) == 2
