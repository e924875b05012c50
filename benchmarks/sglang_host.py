"""What Python costs: both linkers against a client that answers at once and moves no bytes.

Processor time is read from the threads' own clocks (`pthread_getcpuclockid`), the calling thread's
around the linker's methods alone; the client's own is taken off. Not counted are what Mooncake's
binding makes of the lists (62,464 ranges of 1,024 keys 7.5 ms, 8 of 8 keys 5 µs), and the events
that either has on a GPU.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sglang_sides as sides
import torch
from instant_client import InstantClient
from sglang_models import Build, Model, Places
from sglang_rounds import Rounds
from thread_clocks import clocked

from kvferry.kernels import counter_memory
from kvferry.kernels.handles import Launch
from kvferry.kernels.pack import Packer
from kvferry.kernels.signals import signal_launch

WARM_ROUNDS = 2
NUM_CALLS = ("batch_get_session_start", "batch_get_into_multi_buffer_ranges", "batch_get_into")


@dataclass(frozen=True)
class HostCost:
    """One transfer each way, in milliseconds of processor time and in what the store was asked.

    Attributes:
        load_caller_ms, load_workers_ms: of a load, in the calling thread and in all others.
        offload_caller_ms, offload_workers_ms: of an offload.
        num_keys: objects that the load names.
        num_calls: store calls of the load.
        num_ranges: contiguous pieces that the load names.
    """

    load_caller_ms: float
    load_workers_ms: float
    offload_caller_ms: float
    offload_workers_ms: float
    num_keys: int
    num_calls: int
    num_ranges: int

    @property
    def load_ms(self) -> float:
        """Of a load, in all threads."""
        return self.load_caller_ms + self.load_workers_ms

    @property
    def offload_ms(self) -> float:
        """Of an offload, in all threads."""
        return self.offload_caller_ms + self.offload_workers_ms


def host_costs(
    build: Build, num_pages: int, num_rounds: int, master_address: str, makers: sides.Makers
) -> Rounds[HostCost]:
    """Offload and load a prefix by each linker, in an order that turns from round to round.

    Args:
        build: makes the model's pools; they are described, and never touched.
        num_pages: of the prefix.
        num_rounds: that count.
        master_address: somebody must listen there: kvferry looks before it connects.
        makers: of the linkers, by name.
    """
    rounds: Rounds[HostCost] = Rounds()
    model = build(2 * num_pages)
    places = Places.draw(model, num_pages, random.Random(0))
    with ExitStack() as stack:
        stack.enter_context(launching_nothing())
        pairs = []
        for name, make in makers.items():
            client = InstantClient()
            with mock.patch("mooncake.store.MooncakeDistributedStore", return_value=client):
                side = make(model, master_address)
            stack.callback(side.close)
            pairs.append((name, side, client))
        for name, _, _ in pairs:
            rounds.by_side[name] = []
        for number in range(num_rounds + WARM_ROUNDS):
            for name, side, client in pairs if number % 2 else pairs[::-1]:
                cost = _cost(side, client, model, places)
                if number >= WARM_ROUNDS:
                    rounds.add(name, cost)
    return rounds


def _cost(side: sides.Side, client: InstantClient, model: Model, places: Places) -> HostCost:
    keys = [f"{page:064x}" for page in range(places.num_pages)]
    outgoing = model.transfers(keys, places.sources)
    incoming = model.transfers(keys, places.destinations)
    client.remove_all()
    client.forget()
    side.caller_ms = 0.0
    with clocked() as spent:
        side.offload(outgoing)
    offload = (side.caller_ms, spent.less(client.seconds))
    client.forget()
    side.caller_ms = 0.0
    with clocked() as spent:
        side.load(incoming)
    return HostCost(
        side.caller_ms,
        spent.less(client.seconds),
        *offload,
        client.num_keys,
        sum(client.calls[name] for name in NUM_CALLS),
        client.num_ranges,
    )


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Have kernels of pools on a CPU launched as on a GPU, by a driver that launches nothing."""
    import stub_driver

    start = Launch.start
    device = torch.device("cuda", 0)

    def started(launch: Launch, _: torch.device) -> None:
        start(launch, device)
        stub_driver.calls.clear()

    def signalled(*arguments: Any, scope: str) -> None:
        started(signal_launch(*arguments, scope=scope), device)
        values, _, limits, first_layer, end_layer, num_signals = arguments
        assert limits is None, "a load failed"
        values.numpy()[first_layer:end_layer] += num_signals  # who waits on a CPU looks at these

    with (
        # By a plain function: a mock takes 20 µs to note each call.
        mock.patch.object(Packer, "_use_kernels", lambda *_: True),  # noqa: PT008
        mock.patch.object(Launch, "start", started),
        mock.patch.object(counter_memory, "signal_reference", signalled),
    ):
        yield
