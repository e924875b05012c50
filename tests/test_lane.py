"""The lane of a device: what was launched is through before anybody hears of a failure."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvferry.linker import streams
from kvferry.linker.streams import Fence, Lane


class Event:
    """An event of a GPU that passes once it was asked for a few times."""

    made: list["Event"]

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Any = None
        self.num_polls = 0
        Event.made.append(self)

    def record(self, stream: Any = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        self.num_polls += 1
        return self.num_polls > 3


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    """A lane with a stream; none of it needs a GPU."""
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    lane = Lane(torch.device("cpu"))
    lane._stream = object()  # type: ignore[assignment]
    return lane


def test_a_failure_waits_for_what_was_launched(lane: Lane) -> None:
    with pytest.raises(RuntimeError, match="launch"), lane.work(Fence()):
        raise RuntimeError("the second launch failed")
    assert (Event.made[-1].stream, Event.made[-1].num_polls) == (lane.stream, 4)


def test_that_wait_has_a_bound(
    lane: Lane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "DRAIN_LIMIT_S", 0.0)
    with pytest.raises(RuntimeError), lane.work(Fence()):
        raise RuntimeError
    assert "did not end within 0 s" in caplog.text


def test_work_that_ends_well_waits_for_nothing(lane: Lane) -> None:
    with lane.work(Fence()) as fences:
        pass
    assert len(fences) == 1
    assert [event.num_polls for event in Event.made] == [0, 0]
