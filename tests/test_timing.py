"""Times taken turn by turn: whose turn it is, what is kept, and what is made of samples."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.errors import ArgumentError
from kvferry.tuning.timing import Timing, median_ratio, time_together, timing_of

CPU = torch.device("cpu")


def test_every_name_has_its_turn_in_every_round_in_both_orders() -> None:
    turns: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: turns.append(name)

    calls = {name: [call(f"{name}{number}") for number in range(3)] for name in "abc"}
    samples = time_together(calls, CPU, num_rounds=4, num_warmups=2)
    rounds = [turns[at : at + 3] for at in range(0, len(turns), 3)]
    assert len(rounds) == 6
    for number, names in enumerate(rounds):
        wanted = [f"{name}{number % 3}" for name in "abc"]  # all on the same input
        assert names == (wanted if number % 2 else wanted[::-1])
    assert {name: len(kept) for name, kept in samples.items()} == dict.fromkeys("abc", 4)


def test_samples_are_microseconds_of_the_call_alone_without_warmups() -> None:
    sleeps_s = iter([0.2, 0.01, 0.01, 0.01])
    calls = {"sleep": [lambda: time.sleep(next(sleeps_s))], "nothing": [lambda: None]}
    samples = time_together(calls, CPU, num_rounds=3, num_warmups=1)
    assert all(10_000 <= sample < 150_000 for sample in samples["sleep"])
    assert all(sample < 10_000 for sample in samples["nothing"])


def test_percentiles() -> None:
    timing = timing_of([float(number) for number in range(100, -1, -1)])
    assert timing == Timing(50.0, 10.0, 90.0, 101)
    assert timing.spread == 1.6
    assert timing_of([7.0]) == Timing(7.0, 7.0, 7.0, 1)
    assert timing_of([1.0, 2.0]).median_us == 1.5


def test_ratios_are_paired_by_round() -> None:
    # The medians of each alone, 4 and 20, would say 0.2.
    assert median_ratio([3.0, 4.0, 100.0], [1.0, 20.0, 50.0]) == 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: time_together({}, CPU, num_rounds=1), "calls are empty"),
        (lambda: time_together({"a": []}, CPU, num_rounds=1), "calls of 'a' are empty"),
        (lambda: time_together({"a": [print]}, CPU, num_rounds=0), "num_rounds is 0, wanted at"),
        (
            lambda: time_together({"a": [print]}, CPU, num_rounds=1, num_warmups=-1),
            "num_warmups is -1, wanted at least 0",
        ),
        (lambda: timing_of([]), "samples are empty"),
        (lambda: median_ratio([1.0], [1.0, 2.0]), "have 1 and 2 samples, wanted as many"),
        (lambda: median_ratio([], []), "have 0 and 0 samples"),
    ],
)
def test_what_cannot_be_timed_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_on_a_gpu_each_sample_is_flushed_then_enclosed_by_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The real order, on stand-ins for what needs a GPU.
    done: list[str] = []
    clock = iter(range(1, 100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")
            self.ms = next(clock) ** 2

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

    class Memory:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes

        def zero_(self) -> None:
            done.append(f"write {self.num_bytes >> 20} MiB")

    class Stream:
        def synchronize(self) -> None:
            done.append("wait")

    def empty(num_bytes: int, **_: Any) -> Memory:
        return Memory(num_bytes)

    properties = SimpleNamespace(L2_cache_size=200 << 20)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", empty)
    calls = {name: [partial(done.append, name)] for name in "ab"}
    gpu = torch.device("cuda", 0)
    samples = time_together(calls, gpu, num_rounds=1, num_warmups=0)
    flush = "write 400 MiB"
    assert done == [flush, "event", "b", "event", flush, "event", "a", "event", "wait"]
    assert samples == {"b": [3000.0], "a": [7000.0]}  # 2² - 1², 4² - 3², in us
    done.clear()
    time_together(calls, gpu, num_rounds=1, num_warmups=0, cold=False)
    assert done == ["event", "b", "event", "event", "a", "event", "wait"]
    properties.L2_cache_size = 50 << 20
    time_together(calls, gpu, num_rounds=1, num_warmups=0)
    assert "write 256 MiB" in done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_time_the_work_not_its_enqueueing(device: torch.device) -> None:
    small, large = (torch.empty(n << 20, dtype=torch.uint8, device=device) for n in (64, 1024))
    calls = {"small": [small.zero_], "large": [large.zero_]}
    samples = time_together(calls, device, num_rounds=5)
    assert median_ratio(samples["large"], samples["small"]) > 4
