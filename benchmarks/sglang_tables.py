"""What `bench_sglang` measures, its tables and its bars."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sglang_sides as sides
from bars import Bar, report
from instant_client import InstantClient
from sglang_host import HostCost, host_costs
from sglang_models import MODELS, Build, tiny
from sglang_rounds import Rounds
from sglang_wire import Times, run_rounds

from kvferry.linker.master import LocalMaster

JUDGED = "DeepSeek-V3.2"
LEASE_S = 600.0
"""Of the masters: past Mooncake's own 10 s SGLang's loads of 512 pages fail on a busy machine."""


@dataclass(frozen=True)
class Plan:
    """How one model is measured.

    Attributes:
        build: makes its pools.
        tokens: of the prefix whose Python is timed, 9 rounds.
        wire: pages, and rounds that count, of each case over the wire.
        judged: those pages that bars are about; the Python is judged too, if there are some.
        is_refused: whether SGLang's linker does not take the model.
    """

    build: Build
    tokens: int = 8192
    wire: tuple[tuple[int, int], ...] = ((32, 3),)
    judged: tuple[int, ...] = ()
    is_refused: bool = False


PLANS = {name: Plan(build, is_refused=True) for name, build in MODELS.items()} | {
    JUDGED: Plan(MODELS[JUDGED], 32768, ((32, 11), (128, 5), (512, 3)), (32, 128)),
    "DeepSeek-V4-Flash": Plan(MODELS["DeepSeek-V4-Flash"], 32768, ((128, 3),)),
}
TINY = {"tiny": Plan(tiny, 512, ((8, 2),), (8,))}
HOST_ROUNDS = 9


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
    """Return the bars of wall times: how often SGLang's is as long, within each round.

    Like with like first: SGLang's checks no sums, so the linker that most bars judge does not
    either. Then with checksums, as is the default: on a CPU numpy takes them after the copy, on a
    GPU the copying kernel.
    """
    return [
        Bar(f"{name}_{num_pages}_pages", rounds.ratio(side, of), wanted, at_least=True)
        for name, side, of, wanted in (
            ("all_layers", sides.PLAIN, lambda times: times.last_ms, 2.5),
            ("layer_0", sides.PLAIN, lambda times: times.first_ms, 1.0),
            ("offload", sides.PLAIN, lambda times: times.offload_ms, 2.0),
            ("all_layers_with_checksums", sides.KVFERRY, lambda times: times.last_ms, 2.2),
            ("offload_with_checksums", sides.KVFERRY, lambda times: times.offload_ms, 1.6),
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


def measure(plans: Mapping[str, Plan]) -> int:
    """Run all plans, print the tables and the bars; return the exit status."""
    host, wire, refused, bars = [], [], [], []
    for name, plan in plans.items():
        makers = sides.OURS if plan.is_refused else sides.MAKERS
        with _case(f"{name}, Python alone") as address:
            num_pages = plan.tokens // plan.build(1).page_size
            costs = host_costs(plan.build, num_pages, HOST_ROUNDS, address, makers)
            host += host_rows(name, plan.tokens, costs)
            if plan.judged:
                bars += host_bars(costs)
            if plan.is_refused:
                refused.append({"model": name, "SGLang's linker says": refusal(name, address)})
        for num_pages, num_rounds in plan.wire:
            with _case(f"{name}, {num_pages} pages") as address:
                found = run_rounds(plan.build, num_pages, num_rounds, address, makers)
                wire += wire_rows(name, num_pages, found)
                if num_pages in plan.judged:
                    bars += wire_bars(num_pages, found[0])
    return report("sglang", host, bars, more=[wire, refused])


@contextmanager
def _case(what: str) -> Iterator[str]:
    """Start a master of its own, and afterwards give the pools' memory back; yield its address."""
    print(what, file=sys.stderr, flush=True)
    with LocalMaster(lease_ttl_s=LEASE_S) as master:
        yield master.address
    gc.unfreeze()  # SGLang's linker froze all there was, so that no cycle would be found
    gc.collect()
