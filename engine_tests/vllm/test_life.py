"""From start to end: what is refused, calls that come twice or too early, sleep, and reset."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine import Engine, prompt
from hooked import Pause
from test_failures import check

from kvferry.errors import ArgumentError
from kvferry.linker import vllm_loads
from kvferry.linker.vllm_setup import log_as_vllm, scheduler_side
from kvferry.linker.vllm_stats import COUNTERS

Make = Callable[..., Engine]


def test_calls_without_metadata_do_nothing(make: Make) -> None:
    worker = make().workers[0].connector
    worker.wait_for_save()
    worker.start_load_kv(None)
    worker.wait_for_layer_load("model.layers.0.self_attn.attn")
    worker.save_kv_layer("nobody's", None, None)
    assert worker.get_transfer_results(set()).finished_recving in (None, set())
    assert worker.build_connector_worker_meta() is None


def test_a_save_begins_once(make: Make) -> None:
    engine = make()
    side = engine.workers[0].connector._worker
    begun = []
    real = side.linkers[0].save
    side.linkers[0].save = lambda *args, **more: begun.append(args) or real(*args, **more)
    connector = engine.workers[0].connector
    again = connector.wait_for_save
    connector.wait_for_save = lambda: (again(), again())
    engine.ask(prompt(200), 1)
    assert len(begun) == 1
    check(engine)


def test_a_step_that_computes_nothing_waits_for_a_load(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(), make()
    first.ask(prompt(200))
    second.stores[0].before["get"] = lambda *_: time.sleep(0.3)
    monkeypatch.setattr(vllm_loads, "IDLE_WAIT_S", 20.0)
    answer = second.ask(prompt(200), 1)
    assert (answer.is_right, answer.num_external) == (True, 192)
    assert len(second.workers[0].seen) < 6  # spinning: thousands
    check(first, second)


def test_nothing_is_found_before_the_workers_have_told(make: Make) -> None:
    first, second = make(), make()
    first.ask(prompt(200))
    second.connector._plan.prefixes.learn([])
    assert second.ask(prompt(200)).num_external == 0
    second.shake_hands()
    second.flush()
    assert second.ask(prompt(200)).num_external == 192
    check(first, second)


def test_prefix_caching_is_needed(make: Make, base_config: Any) -> None:
    base_config.cache_config.enable_prefix_caching = False
    try:
        with pytest.raises(ArgumentError, match="enable_prefix_caching is False, wanted True"):
            make()
    finally:
        base_config.cache_config.enable_prefix_caching = True


def test_context_parallel_prefills_are_refused(make: Make, base_config: Any) -> None:
    base_config.parallel_config.prefill_context_parallel_size = 2
    try:
        with pytest.raises(ArgumentError, match="prefill_context_parallel_size is 2, wanted 1"):
            make()
    finally:
        base_config.parallel_config.prefill_context_parallel_size = 1


@pytest.mark.parametrize("seed", ["", "7"])
def test_hashes_that_nobody_else_makes_are_warned_of(
    seed: str,
    make: Make,
    base_config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    connector = make().connector
    monkeypatch.setattr(base_config.cache_config, "prefix_caching_hash_algo", "xxhash")
    caplog.clear()
    scheduler_side(
        base_config,
        connector._config,
        connector._plan.prefixes.groups,
        connector._settings,
        connector._store,
    )
    told = [line for line in caplog.messages if "without PYTHONHASHSEED: no other engine" in line]
    assert len(told) == (0 if seed else 1)


def test_sleep_and_wake(make: Make) -> None:
    engine = make("gpt_oss")
    engine.ask(prompt(200))
    worker = engine.workers[0].connector
    before = worker.get_handshake_metadata()
    for _ in range(2):
        worker.unregister_kv_caches()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvferry-save")]
    engine.flush()
    for cache in engine.workers[0].plan.caches.values():
        cache.untyped_storage().fill_(0xA5)  # what sleeps has lost its content
    for _ in range(2):
        worker.restore_kv_caches()
    assert worker.get_handshake_metadata() == before
    assert engine.ask(prompt(200)).num_external == 192
    check(engine)


def test_sleep_while_a_save_is_in_flight(make: Make) -> None:
    """Its blocks are given back even so: nobody reads them any more."""
    engine = make(settings={"staging_bytes": 1 << 15, "transfer_timeout_s": 2.0})
    pause = engine.stores[0].before["put"] = Pause()
    answer = engine.add(prompt(300), 1)
    engine.until(lambda: bool(answer.reason))
    pause.wait()
    threading.Timer(0.5, pause.release).start()
    engine.workers[0].connector.unregister_kv_caches()
    engine.workers[0].connector.restore_kv_caches()
    engine.run()
    check(engine)


def test_counters(make: Make) -> None:
    first, second = make(), make()
    first.ask(prompt(200), 20)
    second.ask(prompt(200), 20)
    total = {name: sum(step.get("data", step).get(name, 0) for step in second.stats)
             for name in COUNTERS}  # fmt: skip
    num_bytes = second.workers[0].connector._worker.linkers[0].layout.object_bytes["full"]
    assert (total["load_transfers"], total["load_objects"]) == (1, 12)
    assert total["load_bytes"] >= 12 * num_bytes
    assert total["load_failures"] == 0


def test_lines_go_where_vllms_go() -> None:
    lines: list[str] = []
    theirs, ours = logging.Logger("theirs"), logging.Logger("ours")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    for _ in range(2):
        log_as_vllm(ours, theirs)
    ours.info("once")
    ours.debug("never")
    assert lines == ["once"]
