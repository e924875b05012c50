"""Which prefixes of a prompt are found in the store: by pools, by tails, and by who wrote them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import Pause
from prompts import tokens
from standins import TINY_MODEL
from tree import Engine

from kvferry.linker.sglang_ranks import Ranks

CORES = pytest.mark.parametrize("core", ["python", "rust"])
Make = Callable[..., Engine]
NOTHING = '{"rms_norm_eps": 0.000001, "head_dim": 16}'
YARN = (
    '{"rope_scaling": '
    '{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}}'
)


def found(engine: Engine, prompt: Any, num_pages: float) -> tuple[int, int]:
    """Pages of a prompt's first `num_pages` that are on the device, and that the store has."""
    page_size = engine.kind.page_size
    match = engine.match(prompt[: int(num_pages * page_size)]).match
    assert match is not None
    return match.device_prefix_len // page_size, match.host_hit_length // page_size


@CORES
@pytest.mark.parametrize("name", ["gdn", "gdn_page1", "swa_states", "empty_layers"])
def test_states_are_at_the_ends_of_nodes_alone(name: str, core: str, make: Make) -> None:
    engine = make(name, core)
    page_size = engine.kind.page_size
    prompt = tokens(6 * page_size)
    for num_pages in (2, 5):
        engine.prefill(prompt[: num_pages * page_size])
    engine.settle()
    engine.flush()
    assert [found(engine, prompt, n)[1] for n in (1, 2, 3, 4, 5, 6)] == [0, 2, 2, 2, 5, 5]
    request = engine.match(prompt[: 4 * page_size])
    engine.load(request)


@CORES
@pytest.mark.parametrize(("name", "window"), [("swa", 2), ("swa_page1", 3), ("deepseek_v4", 1)])
def test_a_prefix_needs_its_whole_window(name: str, window: int, core: str, make: Make) -> None:
    engine = make(name, core)
    page_size = engine.kind.page_size
    prompt = tokens(6 * page_size)
    slots = engine.allocate(6 * page_size)
    engine.compute(prompt, slots)
    # The request has freed what lay before its window: the tree has no such pages.
    gone = 5 - window
    engine.insert(prompt, slots, evicted=gone * page_size)
    engine.settle()
    engine.flush()
    wanted = [0, 0, 0, 0, 0, 5, 6]
    assert [found(engine, prompt, n)[1] for n in range(7)] == wanted
    engine.load(engine.match(prompt[: 5 * page_size]))


@CORES
@pytest.mark.parametrize("hit", [2, 5])
@pytest.mark.parametrize("name", ["mha", "mha_page1", "swa", "swa_page1", "deepseek_v4", "kda_mla"])
def test_the_tail_behind_what_is_on_the_device(name: str, hit: int, core: str, make: Make) -> None:
    engine = make(name, core)
    page_size = engine.kind.page_size
    prompt = tokens(6 * page_size)
    engine.prefill(prompt[: hit * page_size])
    engine.prefill(prompt)
    engine.settle()
    engine.evict((6 - hit) * page_size)
    assert found(engine, prompt, 6) == (hit, 6 - hit)
    request = engine.match(prompt)
    engine.load(request)
    engine.adopt(request)
    assert found(engine, prompt, 6) == (6, 0)
    engine.settle()


@CORES
@pytest.mark.parametrize("name", ["mha", "swa", "gdn"])
def test_a_node_that_splits_while_its_offload_is_under_way(
    name: str, core: str, make: Make
) -> None:
    engine = make(name, core)
    page_size = engine.kind.page_size
    first, second = (tokens(4 * page_size, branch, page_size) for branch in (0, 1))
    pause = engine.store.before["put"] = Pause()
    engine.prefill(first)
    pause.wait()
    engine.prefill(second)
    published = [each.publish_node_ids for each in engine.cache.linker.pending_offloads]
    assert len(published[0]) == 2, "the first node was split"
    pause.release()
    engine.settle()
    engine.flush()
    requests = [engine.match(prompt) for prompt in (first, second)]
    assert [request.match.host_hit_length for request in requests] == [4 * page_size] * 2
    engine.load(*requests)


@pytest.mark.parametrize("name", ["mha", "dsa", "swa_states", "deepseek_v4"])
def test_an_engine_finds_what_another_wrote(name: str, make: Make) -> None:
    writer, reader = make(name, "python"), make(name, "rust")
    prompt = tokens(4 * writer.kind.page_size)
    writer.prefill(prompt)
    writer.settle()
    writer.close()
    request = reader.match(prompt)
    reader.load(request)
    reader.adopt(request)
    reader.settle()  # what is in the store counts as stored
    assert not any(reader.linker.linker.stats.snapshot()["failures"].values())


def test_lookups_are_remembered_and_change_nothing(make: Make) -> None:
    engine = make(settings={"lookup_ttl_s": 30.0})
    prompt = tokens(4 * 64)
    other = make()
    other.prefill(prompt)
    other.settle()
    request = engine.match(prompt)
    for _ in range(20):  # every scheduling pass, for as long as the request waits
        assert engine.match_again(request).host_hit_length == 4 * 64
    assert engine.store.count("exists") == 1
    engine.load(request)


DIFFERENCES: dict[str, dict[str, Any]] = {
    "model": {"server_args": {"model_path": "toy/other"}},
    "revision": {"server_args": {"revision": "abc"}},
    "version of the weights": {"configured": {"weight_version": "7"}},
    "generation": {"settings": {"generation": "7"}},
    "rope": {"configured": {"json_model_override_args": '{"rope_theta": 1000000}'}},
    "yarn": {"configured": {"json_model_override_args": YARN}},
    "quantization": {"configured": {"quantization": "fp8"}},
    "dummy weights": {"server_args": {"load_format": "dummy"}},
    "dtype by its name": {"server_args": {"kv_cache_dtype": "fp8_e4m3"}},
    "dtype": {"name": "fp8"},
    "order in a page": {"name": "hnd"},
    "page size": {"name": "mha_page1"},
    "draft": {"name": "mha_draft", "server_args": {"speculative_algorithm": "EAGLE"}},
    "rank": {"ranks": Ranks(tp=(1, 2))},
    "number of ranks": {"ranks": Ranks(tp=(0, 2))},
    "context parallelism": {"ranks": Ranks(cp=(0, 2))},
    "namespace": {"settings": {"namespace": "elsewhere"}},
    "tenant": {"settings": {"tenant_id": "somebody"}},
    "tag": {"settings": {"extra_backend_tag": "v2"}},
}


ALIKE: dict[str, dict[str, Any]] = {
    "context": {"configured": {"context_length": 512}},
    "overrides that change nothing": {"configured": {"json_model_override_args": NOTHING}},
    "dtype of auto": {"server_args": {"kv_cache_dtype": "bfloat16"}},
    "version by hand": {"settings": {"generation": "default"}},
}


def test_what_is_written_otherwise_is_not_found(make: Make, configured: Callable[..., Any]) -> None:
    writer = make("mha")
    prompt = tokens(4 * 64)
    writer.prefill(prompt)
    writer.settle()
    assert found(make("mha"), prompt, 4) == (0, 4)
    for what, difference in {**DIFFERENCES, **ALIKE}.items():
        with configured(**difference.pop("configured", {})):
            engine = make(**difference)
            lookup = engine.match(prompt).match
            assert lookup is not None
            assert (lookup.host_hit_length == 0) == (what in DIFFERENCES), what
            engine.close()


def test_another_host_finds_the_model_elsewhere(
    make: Make, configured: Callable[..., Any], tmp_path: Path
) -> None:
    writer = make("mha")
    prompt = tokens(4 * 64)
    writer.prefill(prompt)
    writer.settle()
    copy = shutil.copytree(TINY_MODEL, tmp_path / "copy")
    with configured(model_path=str(copy)):
        assert found(make("mha"), prompt, 4) == (0, 4)


def test_what_ranks_hold_alike_is_written_once_for_all(make: Make) -> None:
    prompt = tokens(8 * 64)
    ranks = [make("mla", ranks=Ranks(tp=(rank, 2))) for rank in (0, 1)]
    for engine in ranks:
        engine.prefill(prompt)
        engine.settle()
    written = [engine.linker.linker.stats.snapshot()["objects"]["save"] for engine in ranks]
    assert sum(written) == 8
    assert min(written) > 0
    for engine in (*ranks, make("mla")):  # a single rank reads what two have written
        engine.flush()
        engine.load(engine.match(prompt))


def test_states_of_ranks_are_each_ranks_own(make: Make) -> None:
    prompt = tokens(4 * 64)
    ranks = [make("kda_mla", ranks=Ranks(tp=(rank, 2))) for rank in (0, 1)]
    for engine in ranks:
        engine.prefill(prompt)
        engine.settle()
        engine.flush()
    for engine in ranks:
        engine.load(engine.match(prompt))
    assert found(make("kda_mla"), prompt, 4) == (0, 0)


def test_requests_of_one_prefix_load_in_one_batch(make: Make) -> None:
    engine = make("swa_states", "rust")
    prompt = tokens(4 * 64)
    engine.prefill(prompt)
    engine.settle()
    engine.flush()
    requests = [engine.match(prompt) for _ in range(3)]
    engine.load(*requests)
    slots = torch.cat([request.slots for request in requests])
    assert len(slots.unique()) == len(slots)
