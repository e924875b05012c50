"""SGLang's ranks: every page is written by exactly one of those that hold it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.linker.sglang_ranks import Ranks, check_pipeline, ranks_of

keys = st.lists(st.text(min_size=1, max_size=70), max_size=15)


@given(keys, st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_each_page_is_written_by_one_of_those_that_hold_it(
    page_keys: list[str], num_groups: int, dcp_size: int
) -> None:
    size = num_groups * dcp_size
    ranks = [Ranks(tp=(rank, size), dcp=(rank % dcp_size, dcp_size)) for rank in range(size)]
    for part in range(dcp_size):  # ranks of one part hold the same bytes
        alike = [rank for rank in ranks if rank.dcp[0] == part]
        assert [rank.replica for rank in alike] == [(n, num_groups) for n in range(num_groups)]
        written = [rank.writes(page_keys) for rank in alike]
        assert [sum(of_page) for of_page in zip(*written, strict=True)] == [1] * len(page_keys)


def test_the_work_is_shared_out() -> None:
    page_keys = [f"{number:064x}" for number in range(4000)]
    shares = [sum(Ranks(tp=(rank, 8)).writes(page_keys)) for rank in range(8)]
    assert sum(shares) == 4000
    assert max(shares) < 1.25 * 500


def params(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "tp_cache_group": None, "attn_tp_cache_group": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_a_process_of_its_own_is_one_rank() -> None:
    ranks = ranks_of(params())
    assert (ranks.tp, ranks.pp, ranks.cp, ranks.dcp) == ((0, 1),) * 4
    assert ranks.num_ranks == 1


def test_ranks_of_the_attentions_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"attention": (1, 4), "all": (5, 8)}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: groups[group][0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: groups[group][1])
    both = params(tp_cache_group="all", attn_tp_cache_group="attention")
    assert ranks_of(both).tp == (1, 4)
    assert ranks_of(params(tp_cache_group="all")).tp == (5, 8)
    ranks = ranks_of(params(tp_cache_group="all", pp_rank=1, pp_size=2), (1, 2))
    assert (ranks.pp, ranks.dcp, ranks.num_ranks) == ((1, 2), (1, 2), 16)
    identity = ranks.identity(model="m", generation="g", layers=(20, 40))
    assert identity.share == "tp5of8-pp1of2.layers20to39-cp0of1-dcp1of2"
    assert (identity.model, identity.generation) == ("m", "g")
    with pytest.raises(ArgumentError, match="ranks of one dcp group side by side"):
        ranks_of(params(tp_cache_group="all"), (0, 2))
    with pytest.raises(ArgumentError, match="ranks of one dcp group side by side"):
        ranks_of(params(tp_cache_group="all"), (2, 3))


@pytest.mark.parametrize("name", ["pp", "attn_cp"])
def test_ranks_that_do_not_fit(name: str) -> None:
    with pytest.raises(ArgumentError, match="wanted 0 <= rank < size"):
        ranks_of(params(**{f"{name}_rank": 2, f"{name}_size": 2}))


def test_pipeline_stages_are_asked_for_by_name() -> None:
    check_pipeline(Ranks(), False)
    check_pipeline(Ranks(pp=(0, 2)), True)
    with pytest.raises(ArgumentError, match="allow_pipeline"):
        check_pipeline(Ranks(pp=(0, 2)), False)
