"""The auditor: a tensor that no layout describes is named, whatever view it comes as."""

import pytest
import torch

import kvferry
from kvferry.auditor import audit, uncovered
from kvferry.errors import LayoutError
from kvferry.layout import CacheLayout
from kvferry.pools import PoolTensors


@pytest.fixture
def model() -> tuple[CacheLayout, dict[str, torch.Tensor]]:
    kv = torch.zeros(2, 16, 4, 8)  # K and V, halves of one allocation
    ssm = torch.zeros(3, 5, 6)
    layout = CacheLayout.from_tensors(
        [
            PoolTensors("k", "full", "token", {0: kv[0]}),
            PoolTensors("v", "full", "token", {0: kv[1]}),
            PoolTensors("ssm", "state", "page", {1: ssm}),
        ],
        page_size=4,
        num_layers=2,
    )
    return layout, {"kv": kv, "k view": kv[0, 3:7], "ssm": ssm, "empty": torch.zeros(0)}


def test_all_is_described(model: tuple[CacheLayout, dict[str, torch.Tensor]]) -> None:
    layout, tensors = model
    assert uncovered([layout], tensors) == []
    audit([layout], tensors)
    assert kvferry.audit is audit


def test_a_side_pool_that_nobody_described_is_refused_by_name(
    model: tuple[CacheLayout, dict[str, torch.Tensor]],
) -> None:
    layout, tensors = model
    tensors = {**tensors, "conv": torch.zeros(3, 5), "scale": torch.zeros(16, dtype=torch.uint8)}
    assert uncovered([layout], tensors) == ["conv", "scale"]
    with pytest.raises(LayoutError, match=r"2 of 6.*conv \[3, 5\] float32; scale \[16\] uint8"):
        audit([layout], tensors)
    with pytest.raises(LayoutError, match=r"1 of 6.*: conv"):
        audit([layout], tensors, {"scale": "one value per layer, from the checkpoint"})
    audit([layout], tensors, {"scale": "from the checkpoint", "conv": "rebuilt"})


def test_a_view_between_described_rows_is_not_covered() -> None:
    whole = torch.zeros(8, 4, 6)
    layout = CacheLayout.from_tensors(
        [PoolTensors("k", "full", "token", {0: whole[:, :, :4]})], page_size=2, num_layers=1
    )
    assert uncovered([layout], {"rest": whole[:, :, 4:], "whole": whole}) == ["rest", "whole"]
    assert uncovered([layout], {"k": whole[:, :, :4]}) == []


def test_two_layouts_together_cover(model: tuple[CacheLayout, dict[str, torch.Tensor]]) -> None:
    layout, tensors = model
    draft = torch.zeros(16, 2)
    other = CacheLayout.from_tensors(
        [PoolTensors("draft", "full", "token", {0: draft})], page_size=4, num_layers=1
    )
    assert uncovered([layout], {**tensors, "draft": draft}) == ["draft"]
    audit([layout, other], {**tensors, "draft": draft})


def test_bad_excuses_are_refused(model: tuple[CacheLayout, dict[str, torch.Tensor]]) -> None:
    layout, tensors = model
    tensors["conv"] = torch.zeros(3)
    with pytest.raises(LayoutError, match="'conv' has no reason"):
        audit([layout], tensors, {"conv": ""})
    for name, words in (("ssm", "is described, and travels"), ("nope", "is no tensor")):
        with pytest.raises(LayoutError, match=words):
            audit([layout], tensors, {"conv": "rebuilt", name: "because"})
