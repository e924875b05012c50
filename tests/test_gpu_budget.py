"""The GPU check's matrix product beside packs: its order of events, on stand-ins for a GPU."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_budget
import pytest
import torch
from gpu_part import Check

ALONE_US, BESIDE_US = 100.0, 110.0
OBJECT_BYTES = 40_000
RATE = 0.1  # GB/s: four objects take 1.6 ms


class Gpu:
    """Two streams, each as far as its work goes; a product takes longer while packs are queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, move_us: float) -> None:
        self.now = {"main": 0.0, "side": 0.0}
        self.on = "main"
        self.move_us = move_us
        self.moves = 0
        self.moved: list[tuple[int, int]] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_us = gpu.now[gpu.on]

            def elapsed_time(self, end: "Event") -> float:
                return (end.at_us - self.at_us) / 1e3

        @contextmanager
        def stream(_: object) -> Iterator[None]:
            gpu.on = "side"
            yield
            gpu.on = "main"

        def wait_event(event: Event) -> None:
            gpu.now["main"] = max(gpu.now["main"], event.at_us)

        def synchronize(_: object) -> None:
            gpu.now = dict.fromkeys(gpu.now, max(gpu.now.values()))
            gpu.moves = 0

        def sleep(cycles: int) -> None:
            gpu.now[gpu.on] += cycles / 1e3

        stand_ins: dict[str, Any] = {
            "Event": Event, "stream": stream, "synchronize": synchronize, "_sleep": sleep,
            "Stream": lambda device, priority: None,
            "current_stream": lambda device: SimpleNamespace(wait_event=wait_event),
        }  # fmt: skip
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(gpu_budget, "time_together", lambda *_, **__: {"mm": [ALONE_US] * 3})

    def multiply(self) -> None:
        assert self.on == "main"
        self.now["main"] += BESIDE_US if self.moves else ALONE_US

    def pack(self, ids: list[int], objects: torch.Tensor, **_: Any) -> None:
        assert self.on == "side"
        self.moves += 1
        self.moved.append((ids[0], objects.storage_offset()))
        self.now["side"] += self.move_us


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[Gpu], tuple[float | None, dict[str, Any]]]:
    def measure(gpu: Gpu) -> tuple[float | None, dict[str, Any]]:
        path = tmp_path / "budget.json"
        loaded: Any = SimpleNamespace(
            layout=SimpleNamespace(object_bytes={"full": OBJECT_BYTES}),
            read=list(range(6)), objects=torch.zeros(6 * 64, dtype=torch.uint8), stride_bytes=64,
        )  # fmt: skip
        packer: Any = SimpleNamespace(pack=gpu.pack, max_programs=4)
        check = Check(path, "cuda:0")
        percent = gpu_budget._beside(check, loaded, packer, "square", gpu.multiply, RATE)
        return percent, json.loads(path.read_text())

    return measure


def test_a_slower_product_shows(
    measured: Callable[[Gpu], tuple[float | None, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, move_us=400.0)
    percent, found = measured(gpu)
    assert percent == pytest.approx(10)
    (row,) = found["rows"]
    assert (row["slower %"], row["lowest %"], row["highest %"]) == pytest.approx((10, 10, 10))
    # 120 products of 110 us hold 33 packs of 400 us, of a page each.
    assert row["pack GB/s beside"] == pytest.approx(33 * OBJECT_BYTES / 13_200 / 1e3)
    assert set(gpu.moved) == {(page, 64 * page) for page in range(6)}
    assert found["left_out"] == []


def test_packs_that_end_too_early_are_doubled_or_left_out(
    measured: Callable[[Gpu], tuple[float | None, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(Gpu(monkeypatch, move_us=100.0))[0] == pytest.approx(10)
    percent, found = measured(Gpu(monkeypatch, move_us=1.0))
    assert percent is None
    assert found["rows"] == []
    (left_out,) = found["left_out"]
    assert "ended before the product" in left_out
