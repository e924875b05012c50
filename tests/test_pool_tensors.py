"""The walk through an engine's pool objects, and what counts as described."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.linker.pool_tensors import held_tensors, required, undescribed
from kvferry.linker.sglang_pools import read_sglang_pools
from kvferry.linker.vllm_pools import read_vllm_pools

HERE = (__name__.split(".")[0],)


@dataclass
class Inner:
    """An object inside a pool."""

    scale: torch.Tensor


class Slotted:
    """Keeps its tensor in a slot."""

    __slots__ = ("kept", "unset")

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept


class Pool:
    """Holds tensors in all ways."""

    def __init__(self) -> None:
        self.buffer = [torch.zeros(4), torch.zeros(4)]
        self.inner = {"a": Inner(torch.zeros(2))}
        self.slotted = (Slotted(torch.zeros(3)),)
        self.stranger = SimpleNamespace(tensor=torch.zeros(9))
        self.itself = self
        self.empty = torch.zeros(0, 7)


def test_walk_finds_every_tensor_once() -> None:
    found = {held.path: held for held in held_tensors([Pool()], HERE)}
    assert sorted(found) == [
        "Pool.buffer[0]",
        "Pool.buffer[1]",
        "Pool.empty",
        "Pool.inner['a'].scale",
        "Pool.slotted[0].kept",
    ]
    inner = found["Pool.inner['a'].scale"]
    assert (inner.owner, inner.attribute) == ("Inner", "scale")


def test_described_excluded_or_refused() -> None:
    pool = Pool()
    held = list(held_tensors([pool], HERE))
    reasons = {("Inner", "scale"): "a reason", ("Pool", "buffer"): "unused"}
    kept = [(pool.slotted[0].kept, "another")]
    left_out = undescribed(held, pool.buffer, {("Inner", "scale"): "a reason"}, kept)
    assert [(item.path, item.reason, item.num_bytes) for item in left_out] == [
        ("Pool.inner['a'].scale", "a reason", 8),
        ("Pool.slotted[0].kept", "another", 12),
    ]
    with pytest.raises(LayoutError, match=r"Pool.slotted\[0\].kept: a tensor \[3\]"):
        undescribed(held, pool.buffer, reasons)


def test_a_tensor_between_the_rows_of_others_is_not_described() -> None:
    whole = torch.zeros(8, 3)
    pool = SimpleNamespace(whole=whole)
    held = list(held_tensors([pool], ("types",)))
    undescribed(held, [whole[:, 0], whole[:, 1], whole[:, 2]], {})
    with pytest.raises(LayoutError, match="whole: a tensor"):
        undescribed(held, [whole[:, 0], whole[:, 2]], {})
    side = list(held_tensors([SimpleNamespace(side=whole[:, 1])], ("types",)))
    with pytest.raises(LayoutError, match="side: a tensor"):
        undescribed(side, [whole[:, 0], whole[:, 2]], {})


def test_missing_attributes_are_named() -> None:
    with pytest.raises(LayoutError, match="SimpleNamespace has no attribute 'size'"):
        required(SimpleNamespace(), "size")


@pytest.mark.parametrize("nothing", [object(), Pool(), None])
def test_objects_of_no_engine_are_refused(nothing: Any) -> None:
    with pytest.raises(LayoutError, match=r"kvcache is a .*, wanted one of"):
        read_sglang_pools(nothing, page_size=64)
    with pytest.raises(LayoutError, match="has no attribute 'num_blocks'"):
        read_vllm_pools(nothing, {})
