"""Who writes and who reads an object where several ranks or engines are at it, in processes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from rank_processes import Ranks

from kvferry.linker import sglang_sharing
from kvferry.linker.sglang_ranks import Ranks as Place
from kvferry.linker.sglang_sharing import shared_reads_of
from kvferry.linker.staging import StagingBuffer

pytestmark = pytest.mark.mooncake

KEYS = [f"page-{number}" for number in range(32)]
SAVED = list(range(1, 33))
HERE = [33 - number for number in range(32)]
_names = itertools.count()


def engines(ranks: Ranks, kind: str, **settings: object) -> str:
    """Make an engine of two ranks; return its namespace."""
    name = f"ranks-{next(_names)}"
    ranks.all("engine", kind, name, **settings)
    return name


def offload(ranks: Ranks) -> list[list[str]]:
    """Offload the same pages from all ranks; return which objects each put."""
    answers = ranks.all("offload", KEYS, SAVED)
    assert all(stored for stored, _ in answers)
    return [put for _, put in answers]


def test_each_rank_stores_and_loads_its_own_heads(rank_pair: Ranks) -> None:
    name = engines(rank_pair, "mha")
    put = offload(rank_pair)
    objects = [each["full"] for each in rank_pair.all("object_keys", KEYS)]
    assert [sorted(each) for each in put] == [sorted(each) for each in objects]
    assert set(objects[0]).isdisjoint(objects[1])
    assert rank_pair.all("lookup", KEYS) == [list(range(1, 33))] * 2
    assert rank_pair.all("load", KEYS, HERE) == ["", ""]
    rank_pair.all("check", HERE, SAVED)  # tells the ranks apart
    # An engine of one rank, with twice the heads, finds nothing of it: nor does rank 1's twin.
    rank_pair.all("engine", "mha", name, tp=(0, 1))
    assert rank_pair.all("lookup", KEYS) == [[], []]
    assert "missing" in rank_pair.one(0, "load", KEYS, HERE)


def test_an_object_that_ranks_have_alike_is_stored_once_by_one_of_them(rank_pair: Ranks) -> None:
    name = engines(rank_pair, "mla")
    put = offload(rank_pair)
    objects = [each["full"] for each in rank_pair.all("object_keys", KEYS)]
    assert objects[0] == objects[1]
    assert sorted(put[0] + put[1]) == sorted(objects[0])
    assert all(0.3 * len(KEYS) < len(each) < 0.7 * len(KEYS) for each in put)
    assert rank_pair.all("lookup", KEYS) == [list(range(1, 33))] * 2
    assert rank_pair.all("load", KEYS, HERE) == ["", ""]
    rank_pair.all("check", HERE, SAVED)
    # One rank alone, of an engine without tensor parallelism, finds all of it.
    rank_pair.one(1, "engine", "mla", name, tp=(0, 1))
    assert rank_pair.one(1, "lookup", KEYS) == list(range(1, 33))
    assert rank_pair.one(1, "load", KEYS, HERE) == ""
    rank_pair.one(1, "check", HERE, SAVED)


def test_latents_are_stored_once_and_states_by_each_rank(rank_pair: Ranks) -> None:
    name = engines(rank_pair, "mla+mamba")
    put = offload(rank_pair)
    objects = rank_pair.all("object_keys", KEYS)
    assert objects[0]["full"] == objects[1]["full"]
    latents = [[key for key in each if key.endswith("/full")] for each in put]
    assert sorted(latents[0] + latents[1]) == sorted(objects[0]["full"])
    for rank in range(2):
        assert sorted({*put[rank]} - {*latents[rank]}) == sorted(objects[rank]["state"])
    assert rank_pair.all("lookup", KEYS) == [list(range(1, 33))] * 2
    assert rank_pair.all("load", KEYS, HERE) == ["", ""]
    rank_pair.all("check", HERE, SAVED)
    # Latents without a state at the end restore nothing: states do name their rank.
    rank_pair.all("engine", "mla+mamba", name, tp=(0, 1))
    assert rank_pair.all("lookup", KEYS) == [[], []]


@pytest.mark.parametrize("kind", ["mha", "mla", "mla+mamba"])
def test_a_replica_finds_what_the_other_has_stored(rank_pair: Ranks, kind: str) -> None:
    name = engines(rank_pair, kind, tp=(0, 1))
    stored, put = rank_pair.one(0, "offload", KEYS, SAVED)
    assert stored
    assert len(put) == len(KEYS) * (2 if kind == "mla+mamba" else 1)
    assert rank_pair.one(1, "lookup", KEYS) == list(range(1, 33))
    assert rank_pair.one(1, "offload", KEYS, SAVED) == (True, [])
    assert rank_pair.one(1, "load", KEYS, HERE) == ""
    # It tells rank 0's bytes, whatever this replica's own would be.
    rank_pair.one(1, "check_of", 0, HERE, SAVED)
    assert name


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("what", ["cp", "pp"])
def test_context_and_pipeline_ranks_keep_their_objects_apart(
    rank_pair: Ranks, kind: str, what: str
) -> None:
    name = f"ranks-{next(_names)}"
    for rank in range(2):
        rank_pair.one(rank, "engine", kind, name, tp=(0, 1), **{what: (rank, 2)})
    assert rank_pair.one(0, "offload", KEYS, SAVED)[0]
    assert rank_pair.one(0, "lookup", KEYS) == list(range(1, 33))
    assert rank_pair.one(1, "lookup", KEYS) == []
    objects = [each["full"] for each in rank_pair.all("object_keys", KEYS)]
    assert set(objects[0]).isdisjoint(objects[1])
    assert all(f"{what}0of2" in key for key in objects[0])


@pytest.mark.parametrize(
    ("tp", "dcp", "together"),
    [((2, 4), (0, 1), [4, 5, 6, 7]), ((2, 4), (0, 2), [4, 6]), ((3, 4), (1, 2), [5, 7])],
)
def test_ranks_that_share_reads_hold_the_same_objects(
    monkeypatch: pytest.MonkeyPatch,
    tp: tuple[int, int],
    dcp: tuple[int, int],
    together: list[int],
) -> None:
    made: list[tuple[list[int], float]] = []

    def peers(ranks: list[int], device: torch.device, *, timeout_s: float) -> None:
        made.append((ranks, timeout_s))

    monkeypatch.setattr(sglang_sharing, "Peers", peers)
    monkeypatch.setattr(sglang_sharing.dist, "get_process_group_ranks", lambda _: [4, 5, 6, 7])
    monkeypatch.setattr(sglang_sharing.dist, "barrier", lambda _: None)
    staging = StagingBuffer(1024, device=torch.device("cpu"))
    params = SimpleNamespace(attn_tp_cache_group=object())
    shared = shared_reads_of(params, Place(tp=tp, dcp=dcp), staging, {"full"}, 30.0)
    assert shared is not None
    assert made == [(together, 15.0)]


@pytest.mark.parametrize(
    ("place", "replicated"),
    [(Place(), {"full"}), (Place((0, 2)), ()), (Place((0, 2), dcp=(0, 2)), {"full"})],
)
def test_where_nothing_is_alike_nothing_is_shared(
    caplog: pytest.LogCaptureFixture, place: Place, replicated: set[str]
) -> None:
    staging = StagingBuffer(1024, device=torch.device("cpu"))
    assert shared_reads_of(None, place, staging, replicated, 30.0) is None
    assert "share_reads does nothing here" in caplog.text


def test_a_rank_that_cannot_store_says_so_and_the_other_does_not(rank_pair: Ranks) -> None:
    """Each rank tells its own verdict: SGLang takes the least of them."""
    engines(rank_pair, "mla")
    rank_pair.one(1, "at_call", "put", 0, "fail", keep=True)
    (first, _), (second, _) = rank_pair.all("offload", KEYS, SAVED)
    assert (first, second) == (True, False)
    found = rank_pair.all("lookup", KEYS)
    assert found[0] == found[1]
    assert len(found[0]) < len(KEYS)
