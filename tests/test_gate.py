"""The gate and the breaker, without Mooncake."""

import itertools
import threading
import time

import pytest

from kvferry.errors import StoreClosed, StoreError, StoreUnavailable
from kvferry.linker.gate import Breaker, Gate


def wait_until(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_closed_gate_refuses():
    gate = Gate()
    with gate:
        pass
    assert gate.close(0.0) == 0
    with pytest.raises(StoreClosed), gate:
        pass
    assert gate.close(0.0) == 0


def test_gate_has_its_own_refusal():
    gate = Gate(lambda: StoreError("the session is over"))
    gate.close(0.0)
    with pytest.raises(StoreError, match="session is over"), gate:
        pass


def test_close_waits_for_calls_in_flight():
    gate, entered, leave = Gate(), threading.Event(), threading.Event()

    def call():
        with gate:
            entered.set()
            assert leave.wait(5.0)

    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(5.0)
    assert gate.close(0.05) == 1  # the deadline passes, and the caller is told
    with pytest.raises(StoreClosed), gate:
        pass
    threading.Timer(0.1, leave.set).start()
    begin_s = time.monotonic()
    assert gate.close(5.0) == 0
    assert 0.05 < time.monotonic() - begin_s < 4.0
    thread.join(5.0)


def test_gate_counts_calls_that_raise():
    gate = Gate()
    with pytest.raises(ValueError, match="inside"), gate:
        raise ValueError("inside")
    assert gate.close(0.0) == 0


def test_gate_with_many_threads_never_closes_over_a_call():
    gate, inside, seen_after_close = Gate(), [0], []
    lock, closed = threading.Lock(), threading.Event()

    def call():
        try:
            while True:
                with gate:
                    with lock:
                        inside[0] += 1
                    if closed.is_set():
                        seen_after_close.append(True)
                    time.sleep(0.0005)
                    with lock:
                        inside[0] -= 1
        except StoreClosed:
            return

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert gate.close(5.0) == 0
    closed.set()
    assert inside[0] == 0
    for thread in threads:
        thread.join(5.0)
    assert not seen_after_close


def test_breaker_lets_through_until_opened():
    breaker = Breaker(lambda: True)
    breaker.check()
    assert not breaker.is_open
    assert breaker.close(0.0)


def test_breaker_turns_away_until_the_probe_is_answered():
    answers = threading.Event()
    num_probes = [0]

    def probe():
        num_probes[0] += 1
        return answers.is_set()

    breaker = Breaker(probe, first_pause_s=0.01, longest_pause_s=0.02)
    breaker.open("the master is away")
    breaker.open("told twice")
    assert breaker.num_outages == 1
    assert [t.name for t in threading.enumerate()].count("kvferry-probe") == 1
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="the master is away"):
        breaker.check()
    assert time.monotonic() - begin_s < 0.1
    wait_until(lambda: num_probes[0] >= 3)
    assert breaker.is_open
    answers.set()
    wait_until(lambda: not breaker.is_open)
    breaker.check()
    wait_until(lambda: "kvferry-probe" not in [t.name for t in threading.enumerate()])
    breaker.open("away again")
    assert breaker.num_outages == 2
    assert breaker.close(5.0)


def test_probe_that_raises_counts_as_no_answer():
    calls = []

    def probe():
        calls.append(None)
        if len(calls) < 3:
            raise StoreError("no")
        return True

    breaker = Breaker(probe, first_pause_s=0.01, longest_pause_s=0.01)
    breaker.open("away")
    wait_until(lambda: not breaker.is_open)
    assert len(calls) == 3


def test_pauses_between_probes_grow_to_a_bound():
    times_s = [time.monotonic()]

    def probe():
        times_s.append(time.monotonic())
        return len(times_s) > 5

    breaker = Breaker(probe, first_pause_s=0.02, longest_pause_s=0.08)
    breaker.open("away")
    wait_until(lambda: not breaker.is_open)
    pauses_s = [after - before for before, after in itertools.pairwise(times_s)]
    for pause_s, least_s in zip(pauses_s, [0.02, 0.04, 0.08, 0.08, 0.08], strict=True):
        assert least_s <= pause_s < least_s + 0.5


def test_close_ends_the_probe_and_stays_unavailable():
    breaker = Breaker(lambda: False, first_pause_s=30.0)
    breaker.open("away")
    assert breaker.close(5.0)
    assert "kvferry-probe" not in [t.name for t in threading.enumerate()]
    with pytest.raises(StoreUnavailable):
        breaker.check()
    breaker.open("after close")
    assert "kvferry-probe" not in [t.name for t in threading.enumerate()]
