"""Reads that ranks share, in processes of their own: equal bytes, each read once, nobody hangs."""

import itertools
import socket
from collections.abc import Iterator

import pytest
from rank_worker import Ranks, ranks_of, sums

from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner

pytestmark = pytest.mark.mooncake

KEYS = [f"page-{number}" for number in range(12)]
SAVED = list(range(1, 13))
HERE = ([30 - number for number in range(12)], [20 + number for number in range(12)])
"""Where each rank loads to: pages differ between ranks."""
_names = itertools.count()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def pair(local_master: LocalMaster, local_owner: LocalOwner) -> Iterator[Ranks]:
    with ranks_of(2, local_master.address, free_port()) as ranks:
        yield ranks


def saved(ranks: Ranks, kind: str = "mla", **settings: object) -> None:
    """Engines that share reads, and pages in the store."""
    ranks.all("engine", kind, f"shared-{next(_names)}", share=True, **settings)
    assert all(good for good, _ in ranks.all("offload", KEYS, SAVED))


def load(ranks: Ranks) -> list[str]:
    return ranks.each("load", (KEYS, HERE[0]), (KEYS, HERE[1]))


def check(ranks: Ranks) -> None:
    """Each rank holds its own bytes, and all of them."""
    ranks.each("check", (HERE[0], SAVED), (HERE[1], SAVED))


def test_each_byte_is_read_once_and_both_have_all(pair: Ranks) -> None:
    saved(pair)
    pair.all("count_reads")
    assert load(pair) == ["", ""]
    check(pair)
    reads, counts = pair.all("reads"), pair.all("counts")
    total = sums(reads)
    assert sorted(total) == sorted(pair.one(0, "object_keys", KEYS)["full"])
    assert len(set(total.values())) == 1  # of each object as many bytes: all of it, once
    own = [sum(read.values()) for read in reads]
    assert max(own) < 0.6 * sum(own)
    assert [count["fetched_bytes"] for count in counts] == own
    assert [count["received_bytes"] for count in counts] == own[::-1]
    assert all(count["shared"] > 3 and not count["differed"] + count["alone"] for count in counts)
    assert pair.all("num_threads") == [1, 1]


def test_states_are_read_by_each_rank_in_the_same_calls(pair: Ranks) -> None:
    saved(pair, "mla+mamba")
    pair.all("count_reads")
    assert load(pair) == ["", ""]
    check(pair)
    objects = pair.all("object_keys", KEYS)
    total = sums(pair.all("reads"))
    assert set(objects[0]["state"]).isdisjoint(objects[1]["state"])
    assert sorted(total) == sorted(
        {*objects[0]["full"], *objects[0]["state"], *objects[1]["state"]}
    )
    assert len({total[key] for key in objects[0]["full"]}) == 1
    assert len({total[key] for each in objects for key in each["state"]}) == 1
    assert all(count["shared"] > 3 and not count["alone"] for count in pair.all("counts"))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_both_fetch_whole(pair: Ranks, rank: int) -> None:
    saved(pair)
    pair.one(rank, "at_call", "read", 1, "fail")
    assert load(pair) == ["", ""]
    check(pair)
    first, second = pair.all("counts")
    assert first["shared"] == second["shared"] > 3
    assert not first["differed"] + first["alone"] + second["differed"] + second["alone"]
    # The whole objects too came from one rank each.
    assert first["received_bytes"] == second["fetched_bytes"] > 0
    assert second["received_bytes"] == first["fetched_bytes"] > 0


def test_objects_that_nobody_can_read_fail_on_both(pair: Ranks) -> None:
    saved(pair)
    pair.one(0, "at_call", "read", 1, "fail")
    pair.one(0, "at_call", "get", 0, "fail", keep=True)
    errors = load(pair)
    assert all("objects could not be had" in error for error in errors)
    assert errors[0] == errors[1]
    pair.all("heal")
    assert load(pair) == ["", ""]
    check(pair)


def test_a_rank_whose_store_is_away_fails_and_the_other_goes_on_alone(pair: Ranks) -> None:
    saved(pair)
    pair.one(1, "at_call", "read", 1, "raise")
    (first, first_s), (second, _) = pair.each("timed_load", (KEYS, HERE[0]), (KEYS, HERE[1]))
    assert first == ""
    assert "cannot be reached" in second
    assert first_s < 5
    pair.one(0, "check", HERE[0], SAVED)
    pair.all("heal")
    before = pair.all("counts")
    assert load(pair) == ["", ""]
    check(pair)
    assert all(a["shared"] > b["shared"] for a, b in zip(pair.all("counts"), before, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_given_up_leaves_the_other_alone_at_once(pair: Ranks, rank: int) -> None:
    saved(pair)
    pair.send(rank, "load", KEYS, HERE[rank], cancel_at=2)
    other, other_s = pair.one(1 - rank, "timed_load", KEYS, HERE[1 - rank])
    assert pair.receive(rank) == "load was cancelled"
    assert other == ""
    assert other_s < 5
    pair.one(1 - rank, "check", HERE[1 - rank], SAVED)
    assert pair.all("is_lost") == [False, False]
    before = pair.all("counts")
    assert load(pair) == ["", ""]
    check(pair)
    counts = pair.all("counts")
    assert all(a["shared"] > b["shared"] for a, b in zip(counts, before, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_never_begins_leaves_the_other_alone_at_once(pair: Ranks, rank: int) -> None:
    saved(pair)
    pair.send(rank, "refused_load", KEYS, HERE[rank])
    other, other_s = pair.one(1 - rank, "timed_load", KEYS, HERE[1 - rank])
    assert "given up by the test" in pair.receive(rank)
    assert other == ""
    assert other_s < 5
    pair.one(1 - rank, "check", HERE[1 - rank], SAVED)
    assert load(pair) == ["", ""]
    check(pair)
    counts = pair.all("counts")
    assert counts[0]["shared"] == counts[1]["shared"] > 3
    assert [count["alone"] > 0 for count in counts] == [rank == 1, rank == 0]


def test_calls_that_differ_are_each_ranks_own(pair: Ranks) -> None:
    saved(pair)
    answers = pair.each("load", (KEYS, HERE[0]), (KEYS[::-1], HERE[1]))
    assert answers == ["", ""]
    pair.each("check", (HERE[0], SAVED), (HERE[1], SAVED[::-1]))
    counts = pair.all("counts")
    assert all(count["differed"] > 3 and not count["shared"] for count in counts)
    assert load(pair) == ["", ""]
    check(pair)
    assert all(count["shared"] > 3 for count in pair.all("counts"))


def test_one_that_has_fewer_calls_to_make_is_not_waited_for(pair: Ranks) -> None:
    saved(pair)
    (first, first_s), (second, _) = pair.each(
        "timed_load", (KEYS, HERE[0]), (KEYS[:3], HERE[1][:3])
    )
    assert (first, second) == ("", "")
    assert first_s < 5
    pair.each("check", (HERE[0], SAVED), (HERE[1][:3], SAVED[:3]))
    assert load(pair) == ["", ""]
    check(pair)


def test_each_rank_verifies_the_bytes_that_came_to_it(pair: Ranks) -> None:
    saved(pair)
    pair.one(0, "at_call", "read", 1, "corrupt")
    errors = load(pair)
    assert all("corrupted" in error for error in errors)
    assert errors[0] == errors[1]


def test_a_rank_that_comes_too_late_reads_alone_like_the_one_that_waited(pair: Ranks) -> None:
    saved(pair, timeout_s=1.0)
    pair.one(1, "at_call", "read", 1, "delay", delay_s=2.5)
    (first, first_s), (second, second_s) = pair.each("timed_load", (KEYS, HERE[0]), (KEYS, HERE[1]))
    assert (first, second) == ("", "")
    check(pair)
    assert 0.9 < first_s < 2.4
    assert 2.4 < second_s < 5
    assert pair.one(0, "is_lost")
    pair.all("heal")
    for (answer, taken_s), pages in zip(
        pair.each("timed_load", (KEYS, HERE[0]), (KEYS, HERE[1])), HERE, strict=True
    ):
        assert (answer, taken_s < 0.9, len(pages)) == ("", True, 12)  # nobody waits any more
    check(pair)


def test_a_pause_shorter_than_the_limit_is_waited_for(pair: Ranks) -> None:
    saved(pair, timeout_s=10.0)
    pair.one(1, "at_call", "read", 1, "delay", delay_s=1.5)
    assert load(pair) == ["", ""]
    check(pair)
    counts = pair.all("counts")
    assert not any(count["alone"] + count["differed"] for count in counts)


@pytest.mark.parametrize(("size", "rank", "what"), [(3, 1, "die"), (2, 0, "die"), (2, 0, "stop")])
def test_a_rank_that_is_killed_or_stopped_holds_the_others_up_once(
    local_master: LocalMaster, local_owner: LocalOwner, size: int, rank: int, what: str
) -> None:
    with ranks_of(size, local_master.address, free_port()) as ranks:
        saved(ranks, timeout_s=2.0)
        ranks.all("count_reads")
        whole = [(KEYS, HERE[one % 2]) for one in range(size)]
        assert ranks.each("load", *whole) == [""] * size
        ranks.each("check", *[(pages, SAVED) for _, pages in whole])
        assert len(set(sums(ranks.all("reads")).values())) == 1
        ranks.one(rank, "at_call", "read", 2, what)
        others = [one for one in range(size) if one != rank]
        for one in (rank, *others):
            ranks.send(one, "timed_load", *whole[one])
        for one in others:
            answer, taken_s = ranks.receive(one)
            assert answer == ""
            assert taken_s < 4
            ranks.one(one, "check", whole[one][1], SAVED)
            assert ranks.one(one, "is_lost")
        for one in others:
            ranks.send(one, "timed_load", *whole[one])
        for one in others:
            answer, taken_s = ranks.receive(one)
            assert answer == ""
            assert taken_s < 1.5
            ranks.one(one, "check", whole[one][1], SAVED)
