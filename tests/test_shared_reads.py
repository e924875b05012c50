"""Reads that ranks share, in processes of their own: equal bytes, each read once, nobody hangs."""

import itertools
import time

import pytest
from rank_processes import Ranks, ranks_of
from rank_worker import Worker, sums

from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner

pytestmark = pytest.mark.mooncake

KEYS = [f"page-{number}" for number in range(12)]
SAVED = list(range(1, 13))
HERE = ([30 - number for number in range(12)], [20 + number for number in range(12)])
"""Where each rank loads to: pages differ between ranks."""
QUICK_S = 12.0
"""Less than ranks wait for each other, and more than a busy machine takes."""
_names = itertools.count()


def saved(ranks: Ranks, kind: str = "mla", **settings: object) -> None:
    """Engines that share reads, and pages in the store."""
    ranks.all("engine", kind, f"shared-{next(_names)}", share=True, **settings)
    assert all(good for good, _ in ranks.all("offload", KEYS, SAVED))


def load(ranks: Ranks) -> list[str]:
    return ranks.each("load", (KEYS, HERE[0]), (KEYS, HERE[1]))


def check(ranks: Ranks) -> None:
    """Each rank holds its own bytes, and all of them."""
    ranks.each("check", (HERE[0], SAVED), (HERE[1], SAVED))


def test_each_byte_is_read_once_and_both_have_all(rank_pair: Ranks) -> None:
    saved(rank_pair)
    rank_pair.all("count_reads")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    reads, counts = rank_pair.all("reads"), rank_pair.all("counts")
    total = sums(reads)
    assert sorted(total) == sorted(rank_pair.one(0, "object_keys", KEYS)["full"])
    assert len(set(total.values())) == 1  # of each object as many bytes: all of it, once
    own = [sum(read.values()) for read in reads]
    assert max(own) < 0.6 * sum(own)
    assert [count["fetched_bytes"] for count in counts] == own
    assert [count["received_bytes"] for count in counts] == own[::-1]
    assert all(count["shared"] > 3 and not count["differed"] + count["alone"] for count in counts)
    assert rank_pair.all("num_threads") == [1, 1]


def test_states_are_read_by_each_rank_in_the_same_calls(rank_pair: Ranks) -> None:
    saved(rank_pair, "mla+mamba")
    rank_pair.all("count_reads")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    objects = rank_pair.all("object_keys", KEYS)
    total = sums(rank_pair.all("reads"))
    assert set(objects[0]["state"]).isdisjoint(objects[1]["state"])
    assert sorted(total) == sorted(
        {*objects[0]["full"], *objects[0]["state"], *objects[1]["state"]}
    )
    assert len({total[key] for key in objects[0]["full"]}) == 1
    assert len({total[key] for each in objects for key in each["state"]}) == 1
    assert all(count["shared"] > 3 and not count["alone"] for count in rank_pair.all("counts"))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_both_fetch_whole(rank_pair: Ranks, rank: int) -> None:
    saved(rank_pair)
    rank_pair.one(rank, "at_call", "read", 1, "fail")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    first, second = rank_pair.all("counts")
    assert first["shared"] == second["shared"] > 3
    assert not first["differed"] + first["alone"] + second["differed"] + second["alone"]
    # The whole objects too came from one rank each.
    assert first["received_bytes"] == second["fetched_bytes"] > 0
    assert second["received_bytes"] == first["fetched_bytes"] > 0


def test_objects_that_nobody_can_read_fail_on_both(rank_pair: Ranks) -> None:
    saved(rank_pair)
    rank_pair.one(0, "at_call", "read", 1, "fail")
    rank_pair.one(0, "at_call", "get", 0, "fail", keep=True)
    errors = load(rank_pair)
    assert all("objects could not be had" in error for error in errors)
    assert errors[0] == errors[1]
    rank_pair.all("heal")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)


def test_a_rank_whose_store_is_away_fails_and_the_other_goes_on_alone(rank_pair: Ranks) -> None:
    saved(rank_pair)
    rank_pair.one(1, "at_call", "read", 1, "raise")
    (first, first_s), (second, _) = rank_pair.each("timed_load", (KEYS, HERE[0]), (KEYS, HERE[1]))
    assert first == ""
    assert "cannot be reached" in second
    assert first_s < QUICK_S
    rank_pair.one(0, "check", HERE[0], SAVED)
    rank_pair.all("heal")
    before = rank_pair.all("counts")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    assert all(
        a["shared"] > b["shared"] for a, b in zip(rank_pair.all("counts"), before, strict=True)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_given_up_leaves_the_other_alone_at_once(rank_pair: Ranks, rank: int) -> None:
    saved(rank_pair)
    rank_pair.send(rank, "load", KEYS, HERE[rank], cancel_at=2)
    other, other_s = rank_pair.one(1 - rank, "timed_load", KEYS, HERE[1 - rank])
    assert rank_pair.receive(rank) == "load was cancelled"
    assert other == ""
    assert other_s < QUICK_S
    rank_pair.one(1 - rank, "check", HERE[1 - rank], SAVED)
    assert rank_pair.all("is_lost") == [False, False]
    before = rank_pair.all("counts")
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    counts = rank_pair.all("counts")
    assert all(a["shared"] > b["shared"] for a, b in zip(counts, before, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_never_begins_leaves_the_other_alone_at_once(rank_pair: Ranks, rank: int) -> None:
    saved(rank_pair)
    rank_pair.send(rank, "refused_load", KEYS, HERE[rank])
    other, other_s = rank_pair.one(1 - rank, "timed_load", KEYS, HERE[1 - rank])
    assert "given up by the test" in rank_pair.receive(rank)
    assert other == ""
    assert other_s < QUICK_S
    rank_pair.one(1 - rank, "check", HERE[1 - rank], SAVED)
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    counts = rank_pair.all("counts")
    assert counts[0]["shared"] == counts[1]["shared"] > 3
    assert [count["alone"] > 0 for count in counts] == [rank == 1, rank == 0]


def test_calls_that_differ_are_each_ranks_own(rank_pair: Ranks) -> None:
    saved(rank_pair)
    answers = rank_pair.each("load", (KEYS, HERE[0]), (KEYS[::-1], HERE[1]))
    assert answers == ["", ""]
    rank_pair.each("check", (HERE[0], SAVED), (HERE[1], SAVED[::-1]))
    counts = rank_pair.all("counts")
    assert all(count["differed"] > 3 and not count["shared"] for count in counts)
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    assert all(count["shared"] > 3 for count in rank_pair.all("counts"))


def test_one_that_has_fewer_calls_to_make_is_not_waited_for(rank_pair: Ranks) -> None:
    saved(rank_pair)
    (first, first_s), (second, _) = rank_pair.each(
        "timed_load", (KEYS, HERE[0]), (KEYS[:3], HERE[1][:3])
    )
    assert (first, second) == ("", "")
    assert first_s < QUICK_S
    rank_pair.each("check", (HERE[0], SAVED), (HERE[1][:3], SAVED[:3]))
    assert load(rank_pair) == ["", ""]
    check(rank_pair)


def test_each_rank_verifies_the_bytes_that_came_to_it(rank_pair: Ranks) -> None:
    saved(rank_pair)
    rank_pair.one(0, "at_call", "read", 1, "corrupt")
    errors = load(rank_pair)
    assert all("corrupted" in error for error in errors)
    assert errors[0] == errors[1]


def test_a_rank_that_comes_too_late_reads_alone_like_the_one_that_waited(rank_pair: Ranks) -> None:
    saved(rank_pair, timeout_s=1.0)
    rank_pair.one(1, "at_call", "read", 1, "delay", delay_s=4)
    (first, first_s), (second, second_s) = rank_pair.each(
        "timed_load", (KEYS, HERE[0]), (KEYS, HERE[1])
    )
    assert (first, second) == ("", "")
    check(rank_pair)
    assert 0.9 < first_s < 3.9 < second_s
    assert rank_pair.all("is_lost") == [True, False]
    rank_pair.all("heal")
    rank_pair.one(0, "at_call", "read", 0, "delay", delay_s=2.0)
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    assert not rank_pair.one(1, "is_lost")  # it did not wait for rank 0, which reads alone now


def test_what_was_told_of_old_loads_is_taken_back(rank_pair: Ranks) -> None:
    saved(rank_pair)

    def told_after(num_loads: int) -> int:
        for _ in range(num_loads):
            assert load(rank_pair) == ["", ""]
        time.sleep(0.5)  # told and taken back behind the loads
        return int(rank_pair.one(0, "num_told"))

    several = told_after(10)
    assert told_after(6) == several


def test_a_pause_shorter_than_the_limit_is_waited_for(rank_pair: Ranks) -> None:
    saved(rank_pair, timeout_s=10.0)
    rank_pair.one(1, "at_call", "read", 1, "delay", delay_s=1.5)
    assert load(rank_pair) == ["", ""]
    check(rank_pair)
    counts = rank_pair.all("counts")
    assert not any(count["alone"] + count["differed"] for count in counts)


@pytest.mark.parametrize(("size", "rank", "what"), [(3, 1, "die"), (2, 0, "die"), (2, 0, "stop")])
def test_a_rank_that_is_killed_or_stopped_holds_the_others_up_once(
    local_master: LocalMaster, local_owner: LocalOwner, size: int, rank: int, what: str
) -> None:
    with ranks_of(Worker, size, local_master.address) as ranks:
        saved(ranks, timeout_s=3.0)
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
            assert taken_s < QUICK_S
            ranks.one(one, "check", whole[one][1], SAVED)
            assert ranks.one(one, "is_lost")
        for one in others:
            ranks.send(one, "timed_load", *whole[one])
        for one in others:
            answer, taken_s = ranks.receive(one)
            assert answer == ""
            assert taken_s < 2.9
            ranks.one(one, "check", whole[one][1], SAVED)
