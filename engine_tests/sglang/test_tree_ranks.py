"""Two tensor-parallel ranks of SGLang's cache side: they agree on what is found, came, is stored.

The answers of the ranks' linkers differ here; what SGLang makes of them must be the same on both.
"""

import itertools
from collections.abc import Iterator

import pytest
from rank_processes import Ranks, ranks_of
from tree_rank import RID, TreeRank

_names = itertools.count()


@pytest.fixture(scope="module")
def ranks(master_address: str) -> Iterator[Ranks]:
    with ranks_of(TreeRank, 2, master_address) as ranks:
        yield ranks


def engines(ranks: Ranks, kind: str, **settings: object) -> None:
    ranks.all("engine", kind, f"ranks-{next(_names)}", **settings)


def stored(ranks: Ranks, num_pages: int) -> None:
    """Offload a prompt, in as many nodes of the tree as it takes."""
    first, second = ranks.all("offload", 0, num_pages)
    assert first == second
    assert first
    assert all(first)


@pytest.mark.parametrize("kind", ["mha", "mla", "kda_mla", "deepseek_v4"])
def test_both_ranks_get_back_what_they_have_stored(ranks: Ranks, kind: str) -> None:
    engines(ranks, kind)
    stored(ranks, 6)
    put = ranks.all("puts")
    assert set(put[0]).isdisjoint(put[1])  # in whatever shares, each object is one rank's
    objects = ranks.all("object_keys", 0, 6)
    assert (objects[0] == objects[1]) == (kind != "mha")
    assert {*objects[0], *objects[1]} <= {*put[0], *put[1]}
    assert ranks.all("found", 0, 6) == [6, 6]
    ranks.all("load", 0, 6)


@pytest.mark.parametrize("kind", ["mla", "kda_mla", "deepseek_v4"])
def test_reads_are_shared(ranks: Ranks, kind: str) -> None:
    engines(ranks, kind, share_reads=True)
    stored(ranks, 6)
    first, second = ranks.all("load", 0, 6)
    assert first["shared"] == second["shared"] > 0
    assert not first["alone"] + first["differed"] + second["alone"] + second["differed"]
    assert first["received_bytes"] > 0
    assert second["received_bytes"] > 0


@pytest.mark.parametrize("share_reads", [False, True])
def test_ranks_draw_one_generation(ranks: Ranks, share_reads: bool) -> None:
    engines(ranks, "mla", share_reads=share_reads)
    stored(ranks, 6)
    first, second = ranks.all("update_weights")
    assert first == second != ""
    assert first.startswith("drawn-")
    assert ranks.all("found", 0, 6) == [0, 0]
    stored(ranks, 6)  # each rank half of them
    assert ranks.all("found", 0, 6) == [6, 6]
    ranks.all("load", 0, 6)


def test_what_one_rank_could_not_store_is_stored_on_neither(ranks: Ranks) -> None:
    engines(ranks, "mha")
    ranks.one(1, "break_calls", "put")
    assert ranks.all("offload", 0, 4) == [[False], [False]]
    assert ranks.all("found", 0, 4) == [0, 0]  # rank 0 has all of it in the store
    ranks.one(1, "break_calls")
    assert ranks.all("offload", 0, 4) == [[True], [True]]
    assert ranks.all("found", 0, 4) == [4, 4]


def test_what_is_found_is_what_both_find(ranks: Ranks) -> None:
    engines(ranks, "mha")
    assert ranks.all("offload", 0, 6) == [[True], [True]]
    ranks.one(1, "remove", 0, 6, 4)
    assert ranks.all("found", 0, 6) == [4, 4]
    ranks.one(0, "remove", 0, 6, 1)
    assert ranks.all("found", 0, 6) == [1, 1]
    ranks.all("load", 0, 1)


@pytest.mark.parametrize("share", [False, True])
def test_a_load_that_fails_on_one_rank_aborts_the_request_on_both(
    ranks: Ranks, share: bool
) -> None:
    engines(ranks, "mla", share_reads=share, miss_ttl_s=0)
    assert ranks.all("offload", 0, 4) == [[True], [True]]
    ranks.one(1, "break_calls", "read", "get")
    (first, own), (second, other) = ranks.all("failing_load", 0, 4)
    assert first == second == [RID]
    # Alone, rank 0 got all of it; where reads are shared, both lack what rank 1 could not read.
    assert (own, other) == (not share, False)
    ranks.one(1, "break_calls")
    ranks.all("load", 0, 4)
