"""How a call is cut for several ranks, what they tell of it, and what becomes of lost ones."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import StoreUnavailable
from kvferry.linker.attempts import Attempts
from kvferry.linker.peers import Agreement, PeersLost
from kvferry.linker.shared_call import Counts, LoadState, SharedCall
from kvferry.linker.shared_parts import ENDED, Told, are_same, cut_evenly, digest_of, runs_of
from kvferry.linker.store import ObjectResult, Outcome

SIZES = st.lists(st.integers(1, 1 << 20), max_size=40)


@given(SIZES, st.integers(1, 9))
def test_parts_are_all_of_it_in_order_and_about_even(sizes: list[int], num_parts: int) -> None:
    parts = cut_evenly(sizes, num_parts)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert len(parts) == num_parts
    for part in parts:
        even = sum(sizes) / num_parts
        assert sum(sizes[index] for index in part) <= even + max(sizes, default=0)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 500)), min_size=1, max_size=30))
def test_runs_cover_the_ranges_and_no_more_than_padding(steps: list[tuple[int, int]]) -> None:
    addresses, sizes, end = [], [], 1000
    for gap, size in steps:
        addresses.append(end + gap)
        sizes.append(size)
        end += gap + size
    wanted = {a + i for a, size in zip(addresses, sizes, strict=True) for i in range(size)}
    runs = list(runs_of(addresses, sizes))
    covered = {first + i for first, num_bytes in runs for i in range(num_bytes)}
    assert wanted <= covered
    assert len(covered - wanted) < 64 * len(sizes)
    for (first, num_bytes), (following, _) in itertools.pairwise(runs):
        assert following - (first + num_bytes) >= 64


def test_objects_in_a_span_are_one_run() -> None:
    assert list(runs_of([64, 192, 320], [100, 128, 7])) == [(64, 263)]
    assert list(runs_of([320, 64], [10, 10])) == [(320, 10), (64, 10)]
    assert list(runs_of([], [])) == []


def test_a_digest_tells_calls_apart_but_not_where_their_spans_are() -> None:
    call: dict[str, Any] = {
        "kind": "read", "keys": ["a", "b"], "addresses": [64, 256], "sizes": [10, 20],
        "offsets": [0, 5],
    }  # fmt: skip
    others = [
        {"kind": "get"}, {"keys": ["a", "c"]}, {"keys": ["a\0b", "b"]}, {"addresses": [64, 320]},
        {"sizes": [10, 21]}, {"offsets": [1, 5]}, {"offsets": []},
    ]  # fmt: skip
    assert digest_of(**call) == digest_of(**{**call, "addresses": [1064, 1256]})
    assert len({digest_of(**call), *(digest_of(**{**call, **other}) for other in others)}) == 8


def test_what_a_rank_tells_comes_back() -> None:
    told = Told("d", {3: ObjectResult(Outcome.MISSING, "OBJECT_NOT_FOUND")})
    assert Told.of_text(told.text()) == told
    same = Told("d", {}).text()
    assert are_same([told.text(), same])
    assert not are_same([told.text(), Told("e", {}).text()])
    assert not are_same([told.text(), ENDED])


class Alone:
    """Peers of one rank, the others' part of which a test plays."""

    def __init__(self, act: str) -> None:
        self.rank, self.size, self.act = 0, 2, act
        self.told: list[str] = []

    def agree(
        self,
        load: int,
        call: int,
        text: str,
        same: Callable[[Sequence[str]], bool],
        wanted: Callable[[], bool],
    ) -> Agreement:
        self.told.append(text)
        if self.act == "lost":
            raise PeersLost("nobody there")
        return Agreement([text, Told(Told.of_text(text).digest, {}).text()], True)

    def send(self, shares: Sequence[Any]) -> None:
        raise PeersLost("broken off", still_arriving=self.act == "arriving")


def made(peers: Alone, read: Callable[..., list[ObjectResult]]) -> tuple[SharedCall, list[str]]:
    lost: list[str] = []
    call = SharedCall(
        peers,  # type: ignore[arg-type]
        LoadState(0, lambda: True),
        Counts(),
        lambda address, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
        lambda error: lost.append(str(error)),
        "read", read, list("abcd"), [[0, 64, 128, 192], [10] * 4, [0] * 4], range(4),
    )  # fmt: skip
    return call, lost


@pytest.mark.parametrize("act", ["lost", "broken"])
def test_what_lost_ranks_do_not_send_is_read_alone(act: str) -> None:
    asked: list[list[str]] = []

    def read(keys: list[str], *_: object) -> list[ObjectResult]:
        asked.append(keys)
        return [ObjectResult(Outcome.FETCHED)] * len(keys)

    call, lost = made(Alone(act), read)
    assert [result.outcome for result in call.together()] == [Outcome.FETCHED] * 4
    assert asked == [["a", "b"], ["c", "d"]]
    assert len(lost) == 1


def test_memory_that_may_still_be_written_is_not_read_into() -> None:
    asked: list[str] = []

    def read(keys: list[str], *_: object) -> list[ObjectResult]:
        asked.extend(keys)
        return [ObjectResult(Outcome.FETCHED)] * len(keys)

    call, lost = made(Alone("arriving"), read)
    attempts = Attempts()
    results = attempts.twice(lambda _: call.together(), list("abcd"), again=())
    assert attempts.drain_s > 0  # nor given to another transfer before long
    assert [result.outcome for result in results] == [Outcome.FETCHED] * 2 + [Outcome.FAILED] * 2
    assert asked == ["a", "b"]
    assert len(lost) == 1


def test_a_rank_whose_store_raises_tells_the_others_before_it_raises() -> None:
    def read(keys: list[str], *_: object) -> list[ObjectResult]:
        raise StoreUnavailable("the master cannot be reached")

    peers = Alone("broken")
    call, _ = made(peers, read)
    with pytest.raises(StoreUnavailable):
        call.together()
    (text,) = peers.told
    assert {result.code_name for result in Told.of_text(text).failures.values()} == {
        "StoreUnavailable"
    }
