"""Wall times over TCP loopback, of linkers side by side, with every byte of every load compared."""

import random
from contextlib import ExitStack
from dataclasses import dataclass

import sglang_sides as sides
from sglang_models import Build, Model, Places
from sglang_rounds import Rounds

from kvferry.layout import CacheLayout
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.sglang_pools import read_cache_params
from kvferry.testing import check_poison, check_telling, poison, write_telling

WARM_ROUNDS = 2


@dataclass(frozen=True)
class Times:
    """What one round took, in milliseconds.

    Attributes:
        offload_ms: from `offload` to its verdict.
        first_ms: from `load` until layer 0 could be read.
        last_ms: from `load` until every layer could.
    """

    offload_ms: float
    first_ms: float
    last_ms: float


def run_rounds(
    build: Build, num_pages: int, num_rounds: int, master_address: str, makers: sides.Makers
) -> tuple[Rounds[Times], int]:
    """Offload and load a prefix by each linker, in an order that turns from round to round.

    Args:
        build: makes the model's pools.
        num_pages: of the prefix.
        num_rounds: that count.
        master_address: of a Mooncake master that has no owner yet.
        makers: of the linkers, by name.

    Returns:
        What each took, and how many bytes went each way.

    Raises:
        AssertionError: a byte of a load is wrong, or one was written where nobody should.
    """
    rounds: Rounds[Times] = Rounds({name: [] for name in makers})
    model = build(2 * num_pages)
    layout = read_cache_params(model.params()).layout
    places = Places.draw(model, num_pages, random.Random(0))
    num_bytes = sum(
        len(pages) * layout.object_bytes[space] for space, pages in places.sources.items()
    )
    with ExitStack() as stack:
        # Twice: objects of the linker before are removed, yet space may be given back late.
        stack.enter_context(LocalOwner(master_address, 2 * num_bytes + (64 << 20)))
        store = stack.enter_context(MooncakeStore(MooncakeConfig(master_address)))
        made = []
        for make in makers.values():
            made.append(make(model, master_address))
            stack.callback(made[-1].close)
        for number in range(num_rounds + WARM_ROUNDS):
            keys = [f"{number:08x}{page:056x}" for page in range(num_pages)]
            for name, side in _turned(dict(zip(makers, made, strict=True)), number):
                times = _times(side, model, layout, places, keys)
                store.client.remove_all(True)
                if number >= WARM_ROUNDS:
                    rounds.add(name, times)
    return rounds, num_bytes


def _turned(made: dict[str, sides.Side], number: int) -> list[tuple[str, sides.Side]]:
    pairs = list(made.items())
    return pairs if number % 2 else pairs[::-1]


def _times(
    side: sides.Side, model: Model, layout: CacheLayout, places: Places, keys: list[str]
) -> Times:
    """Return one round's times, once its bytes were found right."""
    poison(layout)
    for space, pages in places.sources.items():
        write_telling(layout, space, pages, range(len(pages)))
    offload_ms = side.offload(model.transfers(keys, places.sources))
    first_ms, last_ms = side.load(model.transfers(keys, places.destinations))
    for space, pages in places.destinations.items():
        check_telling(layout, space, pages, range(len(pages)))
        check_telling(layout, space, places.sources[space], range(len(pages)))
        check_poison(layout, space, [*pages, *places.sources[space]])
    return Times(offload_ms, first_ms, last_ms)
