"""Settings of a linker, as frozen data."""

from dataclasses import dataclass
from functools import partial

from kvferry.arguments import (
    flag,
    number,
    one_of,
    or_none,
    seconds,
    sequence,
    settle,
    shown,
    whole_number,
)
from kvferry.errors import ArgumentError
from kvferry.kernels.pack import BACKENDS
from kvferry.linker.counter_sets import WAITS
from kvferry.linker.keys import check_namespace
from kvferry.pools import SPACES

DIRECT = ("auto", "never")

MOST = 2**31 - 1
"""Of what is counted: it fits the kernels' 32 bits."""


@dataclass(frozen=True)
class LinkerConfig:
    """Settings of a linker.

    Attributes:
        namespace: first part of every key; keeps deployments in one store apart.
        replicated: index spaces whose objects are equal on every tensor-parallel rank, so that one
            rank's serve all; see `KeyScheme.of`.
        part_bytes: how much of a transfer travels at once. Larger ones stream through staging in
            parts of this size; each part is one store call. By default a quarter of staging, so
            that two of each direction fit. Larger staging then means fewer parts, and less of the
            host's time.
        transfer_timeout_s: deadline of a transfer, queueing included.
        lookup_ttl_s: how long an answer about existence is remembered. Under half the store's
            lease, which a positive answer has renewed.
        miss_ttl_s: how long a key that failed to load counts as missing.
        max_queued: transfers that may wait in each direction; more are refused.
        integrity: whether objects carry a trailer with a checksum, and loads verify it before a
            byte reaches the pools. Without it loads may deliver wrong bytes as good ones, where a
            master was restarted, an owner or this process stood still for longer than its lease, or
            objects were removed by force under a reader: nothing else can tell. Never off unless a
            user says so; objects without trailers have keys of their own.
        direct: `auto`: saves go straight from the pools where pages lie there in one piece of at
            least `min_direct_bytes` and `integrity` is off, see `direct`; or `never`.
        min_direct_bytes: shorter pages are packed all the same. From the least that `make
            bench-direct` measures on, packing has cost time and gained none.
        backend: how pages are packed; see `Packer.pack`.
        max_programs: programs that a pack or unpack has at most, beside a running model; 0 for no
            bound.
        groups: layers that travel together in layer-wise transfers, `[first, end)` ranges; chosen
            by their sizes if None, see `kvferry.groups`.
        compute_us_per_layer: time of a layer's compute, and
        wire_gb_per_s: rate of the store, 1e9 bytes a second: if both are known, they too tell how
            many layers should travel together.
        fetch_ahead: parts that a layer-wise load fetches beyond the one that is unpacked.
        wire_threads: threads that sit in store calls, for each direction of layer-wise transfers.
        wait: how `LayerLoad.wait_layer` waits: `host`, `event`, `device`, or `auto`; see `waits`.
        wait_timeout_s: longest wait for one layer; then the load fails.
        num_counters: layer-wise loads that may be in flight at once.
    """

    namespace: str = "kvferry"
    replicated: frozenset[str] = frozenset()
    part_bytes: int | None = None
    transfer_timeout_s: float = 30.0
    lookup_ttl_s: float = 1.0
    miss_ttl_s: float = 5.0
    max_queued: int = 1024
    integrity: bool = True
    direct: str = "auto"
    min_direct_bytes: int = 32 << 10
    backend: str = "auto"
    max_programs: int = 0
    groups: tuple[tuple[int, int], ...] | None = None
    compute_us_per_layer: float | None = None
    wire_gb_per_s: float | None = None
    fetch_ahead: int = 2
    wire_threads: int = 2
    wait: str = "auto"
    wait_timeout_s: float = 10.0
    num_counters: int = 4

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        spaces = sequence("replicated", self.replicated, "index spaces")
        object.__setattr__(
            self, "replicated", frozenset(one_of("replicated", each, SPACES) for each in spaces)
        )
        settle(self, "part_bytes", or_none, whole_number, 1)
        settle(self, "transfer_timeout_s wait_timeout_s", seconds, above=True)
        settle(self, "lookup_ttl_s miss_ttl_s", seconds)
        settle(self, "max_queued wire_threads num_counters", whole_number, 1, MOST)
        settle(self, "fetch_ahead max_programs min_direct_bytes", whole_number, 0, MOST)
        settle(self, "integrity", flag)
        settle(self, "direct", one_of, DIRECT)
        settle(self, "backend", one_of, BACKENDS)
        settle(self, "wait", one_of, WAITS)
        settle(self, "groups", or_none, _groups)
        settle(self, "compute_us_per_layer wire_gb_per_s", or_none, partial(number, above=True))


def _groups(name: str, value: object) -> tuple[tuple[int, int], ...]:
    """Return layer groups as tuples; whether they cover a layout's layers is asked later."""
    pairs = [sequence(name, pair, "pairs (first, end)") for pair in sequence(name, value, "pairs")]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"{name} are {shown(value)}, wanted pairs (first, end) of layers")
    return tuple(
        (whole_number(name, first, 0, MOST), whole_number(name, end, 1, MOST))
        for first, end in pairs
    )
