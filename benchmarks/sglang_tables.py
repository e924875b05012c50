"""What `bench_sglang` measures, its tables and its bars."""

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import sglang_sides as sides
from bars import Bar, report
from instant_client import InstantClient
from sglang_host import HostCost, host_costs
from sglang_models import MODELS, tiny
from sglang_rounds import Rounds
from sglang_wire import Times, run_rounds

from kvferry.linker.master import LocalMaster

TOKENS = 32768
JUDGED = "DeepSeek-V3.2"
SUPPORTED = (JUDGED, "DeepSeek-V4-Flash")
HOST_ROUNDS = 9
WIRE = ((32, 11), (128, 5), (512, 3))
"""Pages of `JUDGED`, and rounds that count; the last are `TOKENS`, and are not judged."""
LEASE_S = 600.0
"""Of the masters: past Mooncake's own 10 s SGLang's loads of 512 pages fail on a busy machine."""
OTHER_PAGES, OTHER_ROUNDS = 32, 3
"""Over the wire, of models that SGLang's linker refuses."""


def host_rows(name: str, tokens: int, rounds: Rounds[HostCost]) -> list[dict[str, Any]]:
    """Return the table's rows of one model's host costs: medians of processor time."""
    return [
        {
            "model": name,
            "linker": side,
            "tokens": tokens,
            "keys": costs[-1].num_keys,
            "calls": costs[-1].num_calls,
            "ranges": costs[-1].num_ranges,
            "load: caller ms": rounds.median(side, lambda cost: cost.load_caller_ms),
            "workers ms": rounds.median(side, lambda cost: cost.load_workers_ms),
            "ratio": rounds.ratio(side, lambda cost: cost.load_ms),
            "offload: caller ms": rounds.median(side, lambda cost: cost.offload_caller_ms),
            "workers  ms": rounds.median(side, lambda cost: cost.offload_workers_ms),
            "ratio ": rounds.ratio(side, lambda cost: cost.offload_ms),
        }
        for side, costs in rounds.by_side.items()
    ]


def wire_rows(name: str, num_pages: int, found: tuple[Rounds[Times], int]) -> list[dict[str, Any]]:
    """Return the table's rows of one case: medians (least..most) of wall time."""
    rounds, num_bytes = found
    return [
        {
            "model": name,
            "linker": side,
            "pages": num_pages,
            "MB": round(num_bytes / 1e6),
            "offload ms": rounds.spread(side, lambda times: times.offload_ms),
            "ratio": rounds.ratio(side, lambda times: times.offload_ms),
            "layer 0 ms": rounds.spread(side, lambda times: times.first_ms),
            "ratio ": rounds.ratio(side, lambda times: times.first_ms),
            "all layers ms": rounds.spread(side, lambda times: times.last_ms),
            "ratio  ": rounds.ratio(side, lambda times: times.last_ms),
        }
        for side in rounds.by_side
    ]


def host_bars(rounds: Rounds[HostCost]) -> list[Bar]:
    """Return the bars of host costs."""
    own, base = (rounds.by_side[side][-1] for side in (sides.KVFERRY, sides.UPSTREAM))
    ratio = rounds.ratio(sides.KVFERRY, lambda cost: cost.load_ms)
    return [
        Bar("python_ms_of_a_load_sglang_over_kvferry", ratio, 50.0, at_least=True),
        Bar("keys_over_sglang", own.num_keys / base.num_keys, 0.5, at_least=False),
    ]


def wire_bars(num_pages: int, rounds: Rounds[Times]) -> list[Bar]:
    """Return the bars of wall times: how often SGLang's is as long, within each round."""
    return [
        Bar(f"{name}_{num_pages}_pages", rounds.ratio(sides.KVFERRY, of), wanted, at_least=True)
        for name, of, wanted in (
            ("all_layers", lambda times: times.last_ms, 2.5),
            ("layer_0", lambda times: times.first_ms, 1.0),
            ("offload", lambda times: times.offload_ms, 2.0),
        )
    ]


def refusal(name: str, master_address: str) -> str:
    """Return what SGLang's linker says when it is made for a model.

    Raises:
        AssertionError: it takes it.
    """
    client = InstantClient()
    try:
        with mock.patch("mooncake.store.MooncakeDistributedStore", return_value=client):
            sides.upstream(MODELS[name](1), master_address).close()
    except (ValueError, AssertionError) as error:  # by the latter it says «no strategy»
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"SGLang's linker takes {name}, wanted a refusal")


def measure(stack: ExitStack, *, is_tiny: bool) -> int:
    """Run all parts; return the exit status."""

    def master() -> str:
        """Start a master that knows no owner of an earlier part."""
        return stack.enter_context(LocalMaster(lease_ttl_s=LEASE_S)).address

    host, wire, refused, bars = [], [], [], []
    for name, build in {"tiny": tiny}.items() if is_tiny else MODELS.items():
        makers = sides.MAKERS if name in (*SUPPORTED, "tiny") else sides.OURS
        page_size = build(1).page_size
        num_pages = 8 if is_tiny else TOKENS // page_size
        print(f"{name}, Python alone", file=sys.stderr, flush=True)
        costs = host_costs(build, num_pages, 2 if is_tiny else HOST_ROUNDS, master(), makers)
        host += host_rows(name, num_pages * page_size, costs)
        cases = ((num_pages, OTHER_ROUNDS),)
        if is_tiny:
            cases = ((8, 2),)
        elif name == JUDGED:
            cases = WIRE
        elif name not in SUPPORTED:
            cases = ((OTHER_PAGES, OTHER_ROUNDS),)
            refused.append({"model": name, "SGLang's linker says": refusal(name, master())})
        if name in (JUDGED, "tiny"):
            bars += host_bars(costs)
        for case_pages, num_rounds in cases:
            print(f"{name}, {case_pages} pages", file=sys.stderr, flush=True)
            found = run_rounds(build, case_pages, num_rounds, master(), makers)
            wire += wire_rows(name, case_pages, found)
            if name == "tiny" or (name == JUDGED and case_pages < num_pages):
                bars += wire_bars(case_pages, found[0])
    return report("sglang", host, bars, more=[wire, refused])
