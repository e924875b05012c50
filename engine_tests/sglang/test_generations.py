"""Weights change under a running engine, by SGLang's own code, and its keys with them."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prompts import tokens
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
    _WeightUpdateSession,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_context, get_parallel
from standins import TINY_MODEL
from tree import Engine

from kvferry.linker.sglang_identity import weights_told

Make = Callable[..., Engine]
PROMPT = tokens(4 * 64)


class Updates:
    """SGLang's scheduler and model runner, as far as an update of weights goes through them."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        runner = SimpleNamespace(is_draft_worker=False)

        def from_disk(path: str, load_format: str, **_: Any) -> tuple[bool, str]:
            ModelRunner.update_model_fields(
                runner, None, model_path=path, load_format=load_format, load_config=None
            )
            return True, "done"

        updater = SimpleNamespace(
            update_weights_from_disk=from_disk, update_weights_from_tensor=lambda **_: (True, "")
        )
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))],
            deserialize_own_rank=lambda _: [],
        )
        scheduler = SimpleNamespace(
            collect_inflight_reqs=set,
            waiting_queue=[],
            chunked_req=None,
            hisparse_coordinator=None,
            disaggregation_mode=DisaggregationMode.NULL,
            _engine_paused=False,
        )
        scheduler.record_weight_version_change = lambda **told: (
            Scheduler.record_weight_version_change(scheduler, **told)
        )
        group = SimpleNamespace(cpu_group=None)
        with get_parallel().override(tp_group=group):
            self.manager = SchedulerWeightUpdaterManager(
                tp_worker=worker,
                draft_worker=None,
                memory_saver_adapter=SimpleNamespace(pause=lambda _: None, resume=lambda _: None),
                flush_cache=self.flush,
                is_fully_idle=lambda **_: True,
                scheduler=scheduler,
            )

    def flush(self, **_: Any) -> bool:
        """As the scheduler does; the engines forget all that they have."""
        for engine in self.engines:
            engine.flush()
        return True

    def from_disk(self, path: str, version: str | None = None, *, flush: bool = True) -> None:
        """`/update_weights_from_disk`."""
        request = UpdateWeightFromDiskReqInput(
            model_path=path, weight_version=version, flush_cache=flush
        )
        assert self.manager.update_weights_from_disk(request).success

    def from_tensors(self, monkeypatch: pytest.MonkeyPatch, version: str | None = None) -> None:
        """`/update_weights_from_tensor`."""
        monkeypatch.setattr("torch.distributed.barrier", lambda **_: None)
        self.manager._session = _WeightUpdateSession(selector="all")
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[], weight_version=version
        )
        assert self.manager.update_weights_from_tensor(request).success


def store(engine: Engine) -> None:
    engine.prefill(PROMPT)
    engine.settle()
    engine.flush()


def found(engine: Engine) -> int:
    match = engine.match(PROMPT).match
    assert match is not None
    return int(match.host_hit_length) // engine.kind.page_size


def test_a_flush_keeps_the_generation(make: Make) -> None:
    engine = make()
    keys = engine.linker.linker.keys
    store(engine)
    updates = Updates(engine)
    updates.flush()
    assert (found(engine), engine.linker.linker.keys) == (4, keys)
    updates.manager.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))  # it flushes
    updates.manager.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert (found(engine), engine.linker.linker.keys) == (4, keys)


def test_engines_with_one_version_meet(make: Make, configured: Callable[..., Any]) -> None:
    engine = make()
    store(engine)
    Updates(engine).from_disk("/step/2", "v2")
    assert found(engine) == 0
    store(engine)
    assert found(engine) == 4
    with configured(weight_version="v2"):  # another engine that starts with these weights
        assert found(make()) == 4
    with configured():  # and one that has the old ones: nothing of theirs is deleted
        assert found(make()) == 4
    Updates(engine).from_disk("/step/1", "default")
    assert found(engine) == 4


def test_tensors_with_a_version(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    store(engine)
    Updates(engine).from_tensors(monkeypatch, "v2")
    assert found(engine) == 0
    assert "/v2/" in engine.linker.linker.keys.stem


@pytest.mark.parametrize("path", ["/step/2", None])
def test_without_a_version_a_generation_is_drawn(
    path: str | None, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the new weights lie where the old ones were."""
    engine = make()
    store(engine)
    for number in (1, 2):
        Updates(engine).from_disk(path or TINY_MODEL)
        assert found(engine) == 0
        store(engine)
        assert found(engine) == 4
        assert engine.linker.linker.keys.generation.endswith(f"-{number}")
    told = [line for line in caplog.messages if "was drawn, which no other engine has" in line]
    assert len(told) == 2


def test_draws_of_two_engines_differ(make: Make) -> None:
    engines = make(), make()
    Updates(*engines).from_disk("/step/2")
    first, second = (engine.linker.linker.keys.generation for engine in engines)
    assert first.startswith("drawn-")
    assert first != second


def test_without_a_flush_nothing_is_stored_or_found(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """What is computed between an update and the next flush stands on pages of the old weights."""
    engine = make()
    store(engine)
    updates = Updates(engine)
    updates.from_disk("/step/2", "v2", flush=False)
    assert found(engine) == 0
    objects = engine.linker.linker.stats.snapshot()["objects"]["save"]
    engine.prefill(tokens(4 * 64, 1))
    engine.settle()
    assert engine.linker.linker.stats.snapshot()["objects"]["save"] == objects
    told = [line for line in caplog.messages if "until the next flush nothing is stored" in line]
    assert len(told) == 1
    updates.flush()
    assert found(engine) == 0
    store(engine)
    assert found(engine) == 4


def test_an_offload_that_an_update_meets_ends_under_the_old_keys(make: Make) -> None:
    engine = make()
    engine.prefill(PROMPT)  # queued, perhaps not begun
    Updates(engine).from_disk("/step/2", "v2")
    assert found(engine) == 0
    store(engine)
    assert found(engine) == 4


def test_a_generation_set_by_hand_is_that_of_the_start(make: Make) -> None:
    engine = make(settings={"generation": "fleet-7"})
    store(engine)
    assert "/fleet-7/" in engine.linker.linker.keys.stem
    Updates(engine).flush()
    assert found(engine) == 4
    Updates(engine).from_disk("/step/8", "v8")
    assert "/v8/" in engine.linker.linker.keys.stem


def test_what_is_in_the_keys_is_told_at_the_start(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = make(settings={"generation": "fleet-7"})
    (line,) = (line for line in caplog.messages if "kvferry's keys begin with" in line)
    identity = engine.layout.identity
    for part in (engine.linker.linker.keys.stem, "toy/model", "fleet-7", identity.config):
        assert part in line
    assert len(identity.config) == 32


def test_updates_are_counted_as_sglang_writes_them_down() -> None:
    before = weights_told()
    Updates().from_disk(TINY_MODEL)
    get_context().override("somebody else", model_path=TINY_MODEL)
    assert weights_told().num_updates == before.num_updates + 1
