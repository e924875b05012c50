"""Staging: spans that never overlap, back-pressure with a deadline, first come first served."""

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from kvferry.errors import ArgumentError, StagingTimeout, StoreClosed
from kvferry.linker.memory import allocate
from kvferry.linker.spans import SpanAllocator
from kvferry.linker.staging import SPAN_ALIGN_BYTES, Span, StagingBuffer

CPU = torch.device("cpu")


class SpanMachine(RuleBasedStateMachine):
    """Any order of takes and returns, against a list of who holds which byte."""

    held = Bundle("held")

    @initialize(align=st.sampled_from([1, 16, 256]), units=st.integers(1, 40))
    def start(self, align: int, units: int) -> None:
        self.align, self.size = align, align * units
        self.spans = SpanAllocator(self.size, align)
        self.owners: list[object] = [None] * self.size

    @rule(target=held, num_bytes=st.integers(1, 3000))
    def take(self, num_bytes: int) -> Any:
        offset = self.spans.take(num_bytes)
        rounded = -(-num_bytes // self.align) * self.align
        if offset is None:
            assert self.longest_gap() < rounded
            return None
        assert offset % self.align == 0
        assert 0 <= offset <= self.size - num_bytes
        span = (offset, num_bytes)
        for byte in range(offset, offset + rounded):
            assert self.owners[byte] is None
            self.owners[byte] = span
        return span

    @rule(span=consumes(held))
    def give_back(self, span: Any) -> None:
        if span is None:
            return
        offset, num_bytes = span
        self.spans.give_back(offset, num_bytes)
        for byte in range(offset, offset + -(-num_bytes // self.align) * self.align):
            assert self.owners[byte] is span
            self.owners[byte] = None

    @invariant()
    def free_bytes_add_up(self) -> None:
        if hasattr(self, "spans"):
            assert self.spans.num_free_bytes == self.owners.count(None)
            assert self.spans.largest_free_bytes == self.longest_gap()

    def longest_gap(self) -> int:
        longest = current = 0
        for owner in self.owners:
            current = current + 1 if owner is None else 0
            longest = max(longest, current)
        return longest


TestSpans = SpanMachine.TestCase


@given(st.integers(SPAN_ALIGN_BYTES, 5000), st.lists(st.integers(1, 5000), max_size=12))
def test_spans_are_aligned_and_apart(num_bytes: int, sizes: list[int]) -> None:
    staging = StagingBuffer(num_bytes, device=CPU)
    assert staging.address % 4096 == 0
    assert staging.num_bytes % SPAN_ALIGN_BYTES == 0
    spans: list[Span] = []
    for size in sizes:
        try:
            spans.append(staging.acquire(size, 0))
        except StagingTimeout:
            assert staging.largest_free_bytes < size
        except ArgumentError:
            assert size > staging.num_bytes
    for number, span in enumerate(spans):
        assert span.address % SPAN_ALIGN_BYTES == 0
        assert span.tensor.data_ptr() == span.address
        assert span.tensor.numel() == span.num_bytes
        span.tensor.fill_(number)
    for number, span in enumerate(spans):
        assert bool((span.tensor == number).all())
        span.release()
    assert staging.num_free_bytes == staging.largest_free_bytes == staging.num_bytes


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="num_bytes is 0, wanted 256 "):
        StagingBuffer(0, device=CPU)
    with pytest.raises(ArgumentError, match="memory is 'device' for pools on cpu, wanted 'cpu'"):
        StagingBuffer(4096, device=CPU, memory="device")
    staging = StagingBuffer(1024, device=CPU)
    for num_bytes in (0, -1, 1025):
        with pytest.raises(ArgumentError, match=f"num_bytes is {num_bytes}, wanted 1 .. 1024"):
            staging.acquire(num_bytes, 0)
    span = staging.acquire(100, 0)
    span.release()
    with pytest.raises(ArgumentError, match="not held"):
        span.release()
    with pytest.raises(ArgumentError, match="not held"):
        staging.release(Span(staging, 0, 100))


def test_waiting_has_a_bound_and_says_what_is_free() -> None:
    staging = StagingBuffer(1024, device=CPU)
    with staging.acquire(700, 0):
        begin = time.monotonic()
        with pytest.raises(StagingTimeout, match="256 of 1024 bytes are free"):
            staging.acquire(700, 0.1)
        assert 0.09 < time.monotonic() - begin < 2
    staging.acquire(1024, 0).release()


def test_a_large_span_is_not_starved_by_small_ones() -> None:
    staging = StagingBuffer(1024, device=CPU)
    first = staging.acquire(512, 0)
    order: list[str] = []

    def want(name: str, num_bytes: int) -> None:
        with staging.acquire(num_bytes, 10):
            order.append(name)
            time.sleep(0.02)

    threads = []
    for name, num_bytes in (("large", 1024), ("small", 256)):
        threads.append(threading.Thread(target=want, args=(name, num_bytes)))
        threads[-1].start()
        time.sleep(0.1)
    assert order == []  # half of it is free, but the small one came second
    first.release()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert order == ["large", "small"]


def test_a_span_that_drains_comes_back_by_itself() -> None:
    staging = StagingBuffer(1024, device=CPU)
    staging.acquire(1024, 0).release(after_s=0.2)
    with pytest.raises(StagingTimeout):
        staging.acquire(1, 0)
    begin = time.monotonic()
    staging.acquire(1024, 10).release()
    assert 0.05 < time.monotonic() - begin < 2


def test_held_and_draining_bytes_are_told_apart() -> None:
    staging = StagingBuffer(1024, device=CPU)
    first, second = staging.acquire(300, 0), staging.acquire(256, 0)
    assert (staging.num_held_bytes, staging.num_free_bytes) == (556, 256)
    first.release(after_s=0.2)
    assert (staging.num_held_bytes, staging.num_free_bytes) == (256, 256)
    second.release()
    assert (staging.num_held_bytes, staging.num_free_bytes) == (0, 512)
    time.sleep(0.3)  # nobody has to ask for a span before what has drained counts as free
    assert (staging.num_free_bytes, staging.largest_free_bytes) == (1024, 1024)


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 10000])
def test_memory_is_aligned_and_whole(num_bytes: int) -> None:
    memory = allocate(num_bytes, CPU, "cpu")
    assert memory.data_ptr() % 4096 == 0
    assert memory.numel() == num_bytes
    memory.fill_(7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_gpu_staging(memory: str, device: torch.device) -> None:
    staging = StagingBuffer(1 << 20, device=device, memory=memory)
    assert staging.address % 4096 == 0
    with staging.acquire(1 << 20, 0) as span:
        span.tensor.fill_(3)
        assert int(span.tensor.sum()) == 3 << 20


def test_a_store_that_was_closed_first_has_let_go_of_the_memory() -> None:
    class Closed:
        def register(self, *_: int) -> None: ...

        def unregister(self, _: int) -> None:
            raise StoreClosed("the store is closed")

    staging = StagingBuffer(1024, device=CPU)
    staging.register(Closed())  # type: ignore[arg-type]
    staging.unregister()
    staging.register(Closed())  # type: ignore[arg-type]
