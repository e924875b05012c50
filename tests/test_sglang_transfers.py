"""SGLang's transfers as page keys and page ids, checked against what they were made of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linker_bed import HYBRID

from kvferry.errors import ArgumentError, LayoutError, TransferFailed
from kvferry.layout import CacheLayout
from kvferry.linker import sglang_transfers
from kvferry.linker.sglang_pools import SGLangPools
from kvferry.linker.sglang_transfers import Pages, pages_of
from kvferry.linker.streams import Fence
from kvferry.testing import make_tensors

PAGE_SIZE = HYBRID["page_size"]
_plain = CacheLayout.from_description(HYBRID)
POOLS = SGLangPools(
    _plain.bind(make_tensors(_plain, 40)),
    {"full": PAGE_SIZE, "swa": PAGE_SIZE, "state": 1},
    frozenset(),
    (),
)


def slots_of(page_ids: list[int], per_page: int = PAGE_SIZE) -> torch.Tensor:
    """SGLang's slots of whole pages."""
    pages = torch.tensor(page_ids, dtype=torch.int64)
    return (pages[:, None] * per_page + torch.arange(per_page)).reshape(-1)


def transfer(name: Any, keys: list[str], slots: torch.Tensor | None) -> Any:
    return SimpleNamespace(name=name, keys=keys, device_indices=slots)


@st.composite
def transfers(draw: st.DrawFn) -> dict[str, dict[str, int]]:
    """By SGLang's name of a pool, in any order: key to page id, in order of the prefix."""
    keys = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=12))
    names = draw(st.permutations(["kv", "swa", "mamba"]))
    return {
        name: dict(
            zip(
                [key for key in keys if draw(st.booleans())],
                draw(st.permutations(range(40))),
                strict=False,
            )
        )
        for name in names[: draw(st.integers(1, 3))]
    }


@given(transfers())
def test_each_key_has_its_page_in_each_space(wanted: dict[str, dict[str, int]]) -> None:
    given_transfers = [
        transfer(name, list(pages), slots_of(list(pages.values()), 1 if name == "mamba" else 4))
        for name, pages in wanted.items()
    ]
    pages = pages_of(POOLS, given_transfers, check_slots=True)
    rows = pages.on_host()
    assert len(set(pages.keys)) == len(pages.keys)
    assert set(pages.keys) == {key for row in wanted.values() for key in row}
    if "kv" in wanted:  # a prefix is looked up by these, in this order
        assert pages.keys[: len(wanted["kv"])] == list(wanted["kv"])
    names = {"kv": "full", "swa": "swa", "mamba": "state"}
    assert set(rows) == {names[name] for name in wanted}
    for name, row in wanted.items():
        got = rows[names[name]].tolist()
        assert got == [row.get(key, -1) for key in pages.keys]


def test_names_are_those_of_an_enumeration_too() -> None:
    name = SimpleNamespace(value="swa")
    pages = pages_of(POOLS, [transfer(name, ["a"], slots_of([3]))])
    assert pages.on_host()["swa"].tolist() == [3]


def test_slots_may_change_afterwards() -> None:
    slots = slots_of([3, 1])
    state = torch.tensor([5])
    pages = pages_of(POOLS, [transfer("kv", ["a", "b"], slots), transfer("mamba", ["b"], state)])
    slots.zero_()
    state.zero_()
    rows = pages.on_host()
    assert rows["full"].tolist() == [3, 1]
    assert rows["state"].tolist() == [-1, 5]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([transfer("kv", ["a"], None)], "has 0 slots"),
        ([transfer("kv", ["a", "b"], slots_of([1]))], "has 4 slots for 2 different keys, wanted 8"),
        ([transfer("kv", ["a"], slots_of([1])[:3])], "has 3 slots"),
        ([transfer("kv", ["a", "a"], slots_of([1, 2]))], "for 1 different keys"),
        ([transfer("mamba", ["a"], slots_of([1]))], "has 4 slots"),
        ([transfer("draft", ["a"], slots_of([1]))], "wanted each of"),
        ([transfer("kv", ["a"], slots_of([1]))] * 2, "wanted each of"),
    ],
)
def test_refused(bad: list[Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        pages_of(POOLS, bad)


def test_a_space_that_the_pools_have_not() -> None:
    plain = CacheLayout.from_description({**HYBRID, "pools": HYBRID["pools"][:2]})
    pools = SGLangPools(plain.bind(make_tensors(plain, 4)), {"full": 4}, frozenset(), ())
    with pytest.raises(ArgumentError, match=r"wanted each of \['kv'\] at most once"):
        pages_of(pools, [transfer("swa", ["a"], slots_of([1]))])


def test_torn_pages_are_told_where_slots_are_checked() -> None:
    torn = slots_of([1, 2]).flip(0)
    pages_of(POOLS, [transfer("kv", ["a", "b"], torn)])
    with pytest.raises(LayoutError, match="page 0 of the slots"):
        pages_of(POOLS, [transfer("kv", ["a", "b"], torn)], check_slots=True)
    with pytest.raises(LayoutError, match=r"wanted 0 \.\. 159"):
        pages_of(POOLS, [transfer("kv", ["a"], slots_of([40]))], check_slots=True)


def test_ids_that_never_reach_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(Fence):
        def is_passed(self) -> bool:
            return False

    monkeypatch.setattr(sglang_transfers, "COPY_LIMIT_S", 0.02)
    pages = Pages(["a"], {"full": [0]}, {"full": torch.tensor([1])}, Never())
    with pytest.raises(TransferFailed, match=r"not on the host within 0\.02 s") as failed:
        pages.on_host()
    assert failed.value.cause == "deadline"
