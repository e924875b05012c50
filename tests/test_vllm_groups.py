"""Which prefixes of vLLM's requests can be restored, over groups, ranks and block sizes."""

import hashlib
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.linker.keys import KeyScheme
from kvferry.linker.vllm_groups import Group, GroupKeys, Prefixes

FULL, SWA, STATE = Group(0, "full", 16), Group(1, "swa", 32), Group(2, "state", 64)


def hashes(count: int) -> list[bytes]:
    """Hashes as of a request; each tells its number."""
    return [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def keys_of(rank: str, group: Group, window_pages: int | None = None) -> GroupKeys:
    return GroupKeys(f"{rank}/{group.group_id}/", f"/{group.space}", window_pages)


def prefixes(
    groups: Sequence[Group],
    hash_tokens: int = 16,
    *,
    ranks: Sequence[str] = ("r",),
    windows: Mapping[int, int] | None = None,
    drop_last: bool = False,
) -> Prefixes:
    made = Prefixes(groups, hash_tokens, drop_last=drop_last)
    windows = windows or {}
    made.learn(
        [
            {group.group_id: keys_of(rank, group, windows.get(group.group_id)) for group in groups}
            for rank in ranks
        ]
    )
    return made


def test_page_keys_are_the_hashes_at_the_ends_of_blocks() -> None:
    told = hashes(7)
    assert FULL.page_keys(told, 16, 3) == [told[at].hex() for at in range(3)]
    assert SWA.page_keys(told, 16, 99) == [told[at].hex() for at in (1, 3, 5)]
    assert STATE.page_keys(told, 16, 1) == [told[3].hex()]
    assert STATE.page_keys(told[:3], 16, 1) == []


def test_group_keys_are_those_of_the_linker() -> None:
    scheme = KeyScheme("prod", {"swa": ("ab" * 16, "tp0of2")})
    keys = GroupKeys.of(scheme, "swa", 3)
    assert keys.object_keys(["k", "l"]) == scheme.object_keys(["k", "l"], "swa")


def brute_force(
    groups: Sequence[Group],
    there: Mapping[int, set[int]],
    windows: Mapping[int, int],
    first: int,
    end: int,
) -> int:
    """The longest prefix, by the rule word by word; `there` are pages, by group."""
    best = first
    for length in range(first + 1, end + 1):
        if any(length % group.block_tokens for group in groups):
            continue
        good = True
        for group in groups:
            last, known = length // group.block_tokens, first // group.block_tokens
            needed = range(last)
            if group.space == "state":
                needed = range(last - 1, last)
            elif group.space == "swa":
                needed = range(max(0, last - windows[group.group_id]), last)
            good &= all(page < known or page in there[group.group_id] for page in needed)
        best = length if good else best
    return best


@given(data=st.data())
def test_the_longest_prefix(data: st.DataObject) -> None:
    groups = data.draw(
        st.sampled_from([[FULL], [FULL, SWA], [FULL, STATE], [FULL, SWA, STATE], [SWA]])
    )
    windows = {group.group_id: data.draw(st.integers(1, 3)) for group in groups}
    num_hashes = data.draw(st.integers(0, 14))
    ranks = data.draw(st.sampled_from([["a"], ["a", "b"]]))
    made = prefixes(groups, ranks=ranks, windows=windows)
    first = data.draw(st.sampled_from(range(0, num_hashes * 16 + 1, made.align_tokens)))
    end = data.draw(st.integers(first, num_hashes * 16))
    stored = data.draw(st.sets(st.sampled_from([(r, g.group_id, p) for r in ranks for g in groups
                                                for p in range(15)])))  # fmt: skip
    told = hashes(num_hashes)
    pages = {g.group_id: g.page_keys(told, 16, 99) for g in groups}
    objects = {
        keys_of(rank, group, windows[group.group_id]).object_keys([pages[group.group_id][page]])[0]
        for rank, group_id, page in stored
        for group in groups
        if group.group_id == group_id and page < len(pages[group_id])
    }
    asked = made.questions(told, first, end)
    assert len(set(asked.keys)) == len(asked.keys)
    got = asked.longest([key in objects for key in asked.keys])
    there = {
        group.group_id: {
            page for page in range(15) if all((r, group.group_id, page) in stored for r in ranks)
        }
        for group in groups
    }
    assert got == brute_force(groups, there, windows, first, end)


def test_pages_that_are_there_already_are_not_asked_for() -> None:
    made = prefixes([FULL, STATE])
    asked = made.questions(hashes(12), 64, 12 * 16)
    told = hashes(12)
    wanted = [f"r/0/{told[at].hex()}/full" for at in range(4, 12)]
    assert asked.keys == [*wanted, *(f"r/2/{told[at].hex()}/state" for at in (7, 11))]
    assert asked.longest([True] * 10) == 192
    assert asked.longest([True] * 8 + [True, False]) == 128
    assert asked.longest([False] + [True] * 9) == 64


def test_the_last_block_may_be_left_for_the_draft_model() -> None:
    made = prefixes([FULL], drop_last=True)
    asked = made.questions(hashes(5), 0, 80)
    assert asked.longest([True] * 4 + [False]) == 48
    assert asked.longest([True] + [False] * 4) == 0


def test_nothing_is_known_before_the_workers_have_told() -> None:
    made = Prefixes([FULL, SWA], 16, drop_last=False)
    assert not made.is_ready
    made.learn([{0: keys_of("r", FULL)}])
    assert not made.is_ready
    made.learn([{0: keys_of("r", FULL)}, {1: keys_of("s", SWA)}])  # as of two pipeline stages
    assert made.is_ready


def test_blocks_must_be_whole_hashes() -> None:
    with pytest.raises(LayoutError, match=r"group 0: blocks of 16 tokens, wanted a multiple of"):
        Prefixes([FULL], 12, drop_last=False)
