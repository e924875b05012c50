"""Every public argument, nearly right: each is refused by an error that says which, what and why.

`CASES` has a row for every parameter of every public name; a new one without a row fails the first
test. What a row's value is handed to must raise before anything is launched, sent or written.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvferry
from kvferry import arguments
from kvferry.errors import ArgumentError, KVFerryError
from kvferry.kernels.counters import LayerCounters
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.layer_load import LoadRequest
from kvferry.linker.linker import Linker
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.streams import Fence
from kvferry.testing import check_poison, make_tensors

NAN, INF = float("nan"), float("inf")


def whole(least: int, most: int | None = None) -> list[Any]:
    """Return what is no integer of `least .. most`, but nearly."""
    above = [] if most is None else [most + 1, np.int64(most + 1) if most < 2**62 else 2**64]
    return [None, True, False, 1.0, "1", NAN, INF, b"1", [1], 1j, np.float64(4.0), np.True_,
            torch.tensor(True), torch.tensor([4]), least - 1, np.int64(least - 1),
            *above]  # fmt: skip


def or_none(values: list[Any]) -> list[Any]:
    """Return them without None."""
    return [value for value in values if value is not None]


SECONDS = [None, True, "1", NAN, INF, -INF, -1, -1e-9, [], 1j, 10**400, b"1", np.float32(NAN),
           torch.tensor([1.0])]  # fmt: skip
POSITIVE = [*SECONDS, 0, 0.0, -0.0]
FLAG = [None, 0, 1, "yes", "", 1.0, [], NAN]
STRING = [None, 1, b"x", "", "\ud800", "a\0b", [], ["x"], NAN, True]
NAME = [None, 1, b"x", [], True, NAN, ["x"]]
CHOICE = [None, 1, "AUTO", "auto ", b"auto", [], True, ["auto"]]
KEYS = [None, "ab", b"ab", 3, NAN, [1], [b"a"], ["a", "a"], [""], ["\ud800"], ["a\0"], [None],
        ["k" * 5000], [["a"]], ["a", 1.0]]  # fmt: skip
OBJECT = [1, True, "x", [], NAN, object()]
IDS = [None, "ab", 3, [True], [1.0], [NAN], [None], ["0"], [2**63], [2**64 - 1], [-2], [99], [[0]],
       [0, 0], [0, 1, 2], {0}, [np.True_], np.array([True]), np.array([0.0]),
       np.array([2**64 - 1], dtype=np.uint64), torch.tensor([[0]]), torch.tensor([0.5]),
       torch.empty(1, dtype=torch.int64, device="meta")]  # fmt: skip
BY_SPACE = [
    *IDS, {}, {"full": [0]}, {"full": [-1], "state": [0]}, {"full": [0], "state": [-1]},
    {"full": [-1], "state": [-1]}, {"swa": [0]}, {1: [0]}, [("full", [0])],
    *({"full": ids, "state": [0]} for ids in IDS),
]  # fmt: skip
SIZES = [None, 3, "ab", [True], [1.0], ["1"], [None], [0], [-1], [2**31], [2**63], [], [1, 1]]
DEVICE = [None, 1.5, "nowhere", b"cpu", [], NAN, True]
LAYERS = ["01", 3, NAN, [True], [1.0], [-1], [2], [1, 0], [0, 0], [None]]
PAIR = [None, 1, (0,), (0, 1, 2), (1, 1), (-1, 2), (0.0, 1), (True, 2), "01", (0, NAN)]


@dataclass(frozen=True)
class Case:
    """A callable: how it is called rightly, and what each of its parameters must not be.

    Attributes:
        call: with the world and the arguments by name.
        good: arguments that are right, from the world.
        bad: parameter to values; None for one that takes anything, or is not looked at.
    """

    call: Callable[[Any, dict[str, Any]], Any]
    good: Callable[[Any], dict[str, Any]]
    bad: dict[str, list[Any] | None]


def of(method: str, **bad: list[Any] | None) -> "Callable[..., Case]":
    """Return a maker of the case of a method of something in the world, such as `linker.save`."""
    owner, _, name = method.rpartition(".")

    def call(world: Any, given: dict[str, Any]) -> Any:
        return getattr(getattr(world, owner), name)(**given)

    return lambda **good: Case(call, lambda world: resolved(world, good), bad)


def made(target: Any, **bad: list[Any] | None) -> "Callable[..., Case]":
    """Return a maker of the case of a function or class."""
    return lambda **good: Case(
        lambda _, given: target(**given), lambda world: resolved(world, good), bad
    )


def resolved(world: Any, good: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with those that are made from the world."""
    return {name: value(world) if callable(value) else value for name, value in good.items()}


def world_of(name: str) -> Callable[[Any], Any]:
    return lambda world: getattr(world, name)


LAYOUT: dict[str, Any] = {
    "page_size": 4,
    "num_layers": 2,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [4], "dtype": "bfloat16",
         "layers": [0, 1]},
        {"name": "ssm", "index": "state", "rows": "page", "row_shape": [8], "dtype": "float32",
         "layers": [1]},
    ],
}  # fmt: skip


def changed(**entries: Any) -> list[Any]:
    """Return descriptions with other entries, each a list of values."""
    return [{**LAYOUT, name: value} for name, values in entries.items() for value in values]


def pool_with(**entries: Any) -> list[Any]:
    """Return descriptions with another entry in the first pool."""
    first, second = LAYOUT["pools"]
    return [
        {**LAYOUT, "pools": [{**first, name: value}, second]}
        for name, values in entries.items()
        for value in values
    ]


DESCRIPTIONS = [
    None, 1, [], "x", {},
    *changed(page_size=whole(1), num_layers=whole(1), window_tokens=or_none(whole(1)),
             pools=[None, [], "x", 3, {}, [1], ["k"]], order=["", 1, "POOL", True]),
    *pool_with(name=STRING, index=CHOICE, rows=CHOICE, dtype=["f32", 1, None],
               row_shape=[None, "4", 4, [0], [True], [4.0], [-1], [NAN]],
               layers=[None, "0", 0, [], [True], [0.0], [1, 0], [0, 0], [2], [-1]],
               token_planes=[3, "8", [True], [8.0], [-8], [0]],
               order=["01", 1, [0, 0], [True], [5]]),
]  # fmt: skip


def pool_of(tensors: dict[int, torch.Tensor], rows: str = "token") -> kvferry.PoolTensors:
    return kvferry.PoolTensors("k", "full", rows, tensors)


PAGE_IDS = [ids for ids in IDS if not isinstance(ids, list) or len(ids) == 1]
OBJECTS = [None, b"\0" * 64, [0] * 64, torch.zeros(4096), torch.zeros(8, dtype=torch.uint8),
           torch.zeros(4, 1024, dtype=torch.uint8),
           torch.zeros(4096, dtype=torch.uint8, device="meta")]  # fmt: skip
PACKED = {
    "page_ids": PAGE_IDS,
    "objects": OBJECTS,
    "stride_bytes": or_none(whole(0)),
    "layers": LAYERS,
    "origin_bytes": [*whole(0), 1],
    "sums": [1, [0, 0], torch.zeros(1, 2), torch.zeros(2, 2, dtype=torch.int64)],
    "backend": CHOICE,
}

CASES: dict[str, Case] = {
    "Linker": made(
        Linker, layout=[None, *OBJECT, CacheLayout.from_description(LAYOUT)], store=None,
        staging=[None, *OBJECT], config=OBJECT, trace=OBJECT, sharing=OBJECT,
    )(layout=world_of("layout"), store=world_of("store"), staging=world_of("other_staging")),
    "Linker.save": of("linker.save", keys=KEYS, page_ids=[*IDS, {}, {"swa": [0]}], layerwise=FLAG)(
        keys=["a"], page_ids={"full": [0]}),
    "Linker.load": of(
        "linker.load", keys=KEYS, page_ids=BY_SPACE, tail_tokens=or_none([*whole(0, 4), 2.5]),
        tail=CHOICE, partial=FLAG, layerwise=FLAG,
    )(keys=["a"], page_ids={"full": [0], "state": [0]}),
    "Linker.load_batch": of(
        "linker.load_batch", requests=[None, [], "x", [1], [None], 3],
        number=or_none(whole(0)),
    )(requests=lambda _: [LoadRequest(["a"], {"full": [0], "state": [0]})]),
    "Linker.skip_load": of("linker.skip_load", number=whole(0))(),
    "Linker.lookup": of("linker.lookup", keys=KEYS)(),
    "Linker.distrust": of("linker.distrust", keys=KEYS)(),
    "Linker.renew": of("linker.renew", generation=NAME)(),
    "Linker.close": of("linker.close", timeout_s=SECONDS)(),
    "LoadRequest": Case(
        lambda world, given: world.linker.load_batch([LoadRequest(**given)]),
        lambda _: {"keys": ["a"], "page_ids": {"full": [0], "state": [0]}},
        {"keys": KEYS, "page_ids": BY_SPACE, "tail_tokens": or_none([*whole(0, 4), 2.5]),
         "tail": CHOICE, "partial": FLAG}),
    "LinkerConfig": made(
        LinkerConfig,
        namespace=[*STRING, "a/b", "n" * 2000],
        replicated=[None, "full", 1, ["nowhere"], [None], [1]],
        part_bytes=or_none(whole(1)),
        transfer_timeout_s=POSITIVE, wait_timeout_s=POSITIVE,
        lookup_ttl_s=SECONDS, miss_ttl_s=SECONDS,
        max_queued=whole(1), wire_threads=whole(1), num_counters=whole(1),
        fetch_ahead=whole(0), max_programs=whole(0, 2**31 - 1), min_direct_bytes=whole(0),
        integrity=FLAG, direct=["AUTO", None, 1, True], wait=["HOST", None, 1, True],
        backend=["CUDA", None, 1, True],
        groups=[1, "01", [1], [(0,)], [(0, 1, 2)], [(0.0, 1)], [(True, 2)], ["01"], [None]],
        compute_us_per_layer=or_none(POSITIVE), wire_gb_per_s=or_none(POSITIVE),
    )(),
    "Transfer.result": of("transfer.result", timeout_s=or_none(SECONDS))(),
    "Transfer.wait": of("transfer.wait", timeout_s=SECONDS)(),
    "Transfer.wait_packed": of("transfer.wait_packed", timeout_s=or_none(SECONDS))(),
    "LayerSave.layer_written": of("layer_save.layer_written", layer=whole(0, 1))(),
    "LayerLoad.start": of("new_load.start", stream=OBJECT)(),
    "LayerLoad.wait_layer": of("layer_load.wait_layer", layer=whole(0, 1))(),
    "LayerLoad.result": of("layer_load.result", timeout_s=or_none(SECONDS))(),
    "StagingBuffer": made(
        StagingBuffer, num_bytes=[*whole(256), 2**63], device=DEVICE, memory=CHOICE,
    )(num_bytes=4096, device="cpu"),
    "StagingBuffer.register": of("staging.register", store=None)(),
    "StagingBuffer.acquire": of(
        "staging.acquire", num_bytes=[*whole(1), 2**40], timeout_s=SECONDS, is_wanted=None,
    )(num_bytes=256, timeout_s=0.0),
    "StagingBuffer.release": of("staging.release", span=[None, *OBJECT], after_s=SECONDS)(
        span=world_of("span")),
    "MooncakeConfig": made(
        kvferry.MooncakeConfig,
        master_address=[*STRING, " ", "host", "host:", ":1", "host:0", "host:65536", "host:1.5"],
        local_hostname=[*STRING, " "], metadata=[*STRING, " "], protocol=[*STRING, " "],
        device_name=[None, 1, b"x", "\ud800", [], True],
        segment_bytes=[*whole(0), 2**63], local_buffer_bytes=[*whole(0), 2**63],
        max_call_bytes=[*whole(1), 2**63], max_call_objects=[*whole(1), 2**63],
        lease_ttl_s=POSITIVE, put_start_discard_s=POSITIVE, put_start_release_s=POSITIVE,
        client_ttl_s=POSITIVE, session_max_age_s=[*(v for v in POSITIVE if v is not None), 10.5],
        rpc_timeout_s=[*POSITIVE, 2e6],
    )(master_address="127.0.0.1:1"),
    "MooncakeConfig.from_environment": made(
        kvferry.MooncakeConfig.from_environment,
        environment=[1, "x", [], {}, {"MOONCAKE_MASTER": 1}, {"MOONCAKE_MASTER": "host"}])(),
    "MooncakeStore": made(kvferry.MooncakeStore, config=[None, *OBJECT])(),
    "MooncakeStore.register": of("store.register", address=[*whole(1), 2**63],
                                 num_bytes=[*whole(1), 2**63])(address=4096, num_bytes=16),
    "MooncakeStore.unregister": of("store.unregister", address=[*whole(1), 2**63])(),
    "MooncakeStore.exists": of("store.exists", keys=KEYS)(),
    "MooncakeStore.put": of("store.put", keys=KEYS, addresses=SIZES, sizes=SIZES)(
        keys=["a"], addresses=lambda world: [world.staging.address], sizes=[16]),
    "MooncakeStore.get": of("store.get", keys=KEYS, addresses=SIZES, sizes=SIZES)(
        keys=["a"], addresses=lambda world: [world.staging.address], sizes=[16]),
    "MooncakeStore.remove": of("store.remove", keys=KEYS)(),
    "MooncakeStore.remove_under": of("store.remove_under", prefix=[*STRING, "k" * 5000])(),
    "MooncakeStore.put_session": of("store.put_session", keys=KEYS, sizes=SIZES)(
        keys=["a"], sizes=[16]),
    "MooncakeStore.get_session": of("store.get_session", keys=KEYS)(),
    "MooncakeStore.close": of("store.close", timeout_s=SECONDS)(),
    "LocalMaster": made(
        kvferry.LocalMaster, lease_ttl_s=POSITIVE, start_timeout_s=POSITIVE,
        extra_flags=[None, "--x", 1, [1], [""], [None], ["a\0"]])(),
    "LocalOwner": made(
        kvferry.LocalOwner, master_address=[*STRING, "host"],
        segment_bytes=[*whole(1 << 20), 2**63],
        warm=FLAG, protocol=STRING, device_name=[None, 1, "\ud800"], local_hostname=STRING,
        start_timeout_s=POSITIVE,
    )(master_address="127.0.0.1:1", segment_bytes=1 << 20),
    "CacheLayout.from_description": made(
        CacheLayout.from_description, description=DESCRIPTIONS, identity=OBJECT,
    )(description=LAYOUT),
    "CacheLayout.from_tensors": made(
        CacheLayout.from_tensors, pools=[None, [], "x", 1, [1], [None], {}], page_size=whole(1),
        num_layers=whole(1), window_tokens=or_none(whole(1)), identity=OBJECT,
        order=["", 1, "POOL", True, None],
    )(pools=lambda _: [pool_of({0: torch.zeros(8, 4)})], page_size=4, num_layers=1),
    "PoolTensors": Case(
        lambda _, given: CacheLayout.from_tensors(
            [kvferry.PoolTensors(**given)], page_size=4, num_layers=1),
        lambda _: vars(pool_of({0: torch.zeros(2, 4)}, rows="page")),
        {"name": STRING, "space": CHOICE, "rows": CHOICE,
         "tensors": [None, [], {}, 1, "x", {0: None}, {0: [1]}, {0: torch.tensor(1.0)},
                     {"0": torch.zeros(2, 4)}, {True: torch.zeros(2, 4)}, {5: torch.zeros(2, 4)},
                     {0: torch.zeros(2, 4, device="meta")}, {0: torch.zeros(1, 4).expand(2, 4)},
                     {0: torch.zeros(2, 4).to_sparse()}],
         "token_axis": ["0", True, 1.0, -1, 5, NAN],
         "token_planes": [3, "8", [True], [8.0], [-8], [0]],
         "shard_axis": ["0", True, 1.0, -1, 5, NAN],
         "shard_parts": [3, "4", [True], [4.0], [-4]],
         "shard_totals": [3, "4", [True], [4.0], [-4]],
         "head_group": [1, None, b"x", True]}),
    "CacheLayout.bind": of("plain.bind", tensors=[None, 1, [], {}, {"k": 1}, {"k": {}}, {1: {}}])(),
    "CacheLayout.of_rank": of("layout.of_rank", identity=[None, *OBJECT])(),
    "CacheLayout.alignment_bytes": of("layout.alignment_bytes", pool_name=[None, 1, "", [], "x"])(),
    "CacheLayout.segments": of("layout.segments", space=CHOICE, by_token=FLAG)(space="full"),
    "CacheLayout.num_ranges": of("layout.num_ranges", space=CHOICE)(),
    "ModelIdentity": made(
        kvferry.ModelIdentity, model=NAME, revision=NAME, kv_dtype=NAME, draft=NAME, config=NAME,
        generation=NAME, tp=PAIR, pp=PAIR, cp=PAIR, dcp=PAIR,
        layers=[(0, 2), 1, (0,), "01", (1, 1)])(),
    "Packer": made(
        kvferry.Packer, layout=[None, *OBJECT, CacheLayout.from_description(LAYOUT)], space=CHOICE,
        config=OBJECT, max_programs=[*whole(0), 2**31], segments=None, objects_of=OBJECT,
    )(layout=world_of("layout"), space="full"),
    "Packer.pack": of("packer.pack", **PACKED)(page_ids=[0], objects=world_of("objects")),
    "Packer.unpack": of(
        "packer.unpack", **PACKED, tail_tokens=or_none([*whole(0, 4), 2.5]), tail=CHOICE,
    )(page_ids=[0], objects=world_of("objects"), tail_tokens=1),
    "PageIds.check": made(
        kvferry.PageIds.check, layout=[None, *OBJECT, CacheLayout.from_description(LAYOUT)],
        space=[*CHOICE, "swa"], page_ids=[*PAGE_IDS, [0, 0]], unique=FLAG,
    )(layout=world_of("layout"), space="full", page_ids=[0], unique=True),
    "LayerCounters": made(
        LayerCounters, num_layers=whole(1), device=[*DEVICE, "meta"], scope=CHOICE, stream=OBJECT,
        backend=["AUTO", 1, None, True])(num_layers=2, device="cpu"),
    "LayerCounters.begin_step": of(
        "counters.begin_step", num_signals=[*whole(1), [1], [1, 0], [1, True], [1, 1.0], "11"])(),
    "Trace": made(kvferry.Trace, device=or_none(DEVICE), max_intervals=whole(1))(),
    "Trace.add": of("trace.add", lane=STRING, name=STRING, begin_s=[None, "1", NAN, INF, True],
                    end_s=[None, "1", NAN, INF, True], arguments=None)(
        lane="wire", name="x", begin_s=0.0, end_s=1.0),
    "Trace.add_fence": of("trace.add_fence", lane=STRING, name=STRING,
                          fence=[None, *OBJECT, Fence()], arguments=None)(
        lane="pack", name="x", fence=lambda _: Fence()),
    "SharedReads.skip": of("sharing.skip", number=whole(0))(),
    "Stats.prometheus": of("stats.prometheus", labels=[1, "x", ["a"], {1: "x"}, {"a": 1}])(),
    "audit": made(kvferry.audit, layouts=[None, 1, "x", [1], [None]],
                  tensors=[None, 1, [], {"a": 1}], excused=[1, "x", ["a"]])(
        layouts=lambda world: [world.layout], tensors={}),
    "config_digest": made(kvferry.config_digest, config=[None, 1, "x", [], {"a": object()}])(),
    "layout_for": made(kvferry.layout_for, layout=[None, *OBJECT], tp_size=whole(1),
                       dcp_size=whole(1), page_size=or_none(whole(1)))(
        layout=world_of("layout"), tp_size=1),
    "plan_reshard": made(kvferry.plan_reshard, writer=[None, *OBJECT], reader=[None, *OBJECT],
                         dcp_in_tp=FLAG, by_token=FLAG)(
        writer=world_of("layout"), reader=world_of("layout")),
    "restorable": made(kvferry.restorable,
                       exists=[None, {}, [], {"nowhere": np.ones(1, bool)}, {"full": 1},
                               {"full": np.ones((1, 1), bool)}, {"full": np.ones(2)},
                               {"full": np.ones(2, bool), "state": np.ones(1, bool)}],
                       window_pages=or_none([*whole(1)]))(
        exists={"full": np.ones(2, dtype=bool)}, window_pages=None),
}  # fmt: skip

NOT_FOR_USERS = {
    # Made by kvferry's own methods, or called by its threads.
    "Transfer", "Transfer.fail", "Transfer.give_up", "TransferResult",
    "LayerSave", "LayerSave.prepare", "LayerSave.wait_written",
    "LayerLoad", "LayerLoad.attach", "LayerLoad.fail", "LayerLoad.give_up",
    "CacheLayout", "CacheLayout.fingerprint_of_space",
    "Packer.launches", "Packer.describe", "PageIds", "PageIds.upload", "PageIds.check_space",
    "Stats.ended", "SharedReads", "SharedReads.begin", "SharedReads.call", "SharedReads.end",
    *(f"LayerCounters.{name}" for name in (
        "signal", "count_signals", "publish", "fail", "abandon", "arm", "wait_on_stream",
        "wait_launch", "address_of", "reached", "pause", "count_of", "expired")),
    # Names of what was recorded: unknown ones have recorded nothing.
    "Trace.intervals", "Trace.rows", "Trace.busy_us", "Trace.overlap_us", "Trace.write",
}  # fmt: skip


def public() -> Iterator[tuple[str, set[str]]]:
    """Yield every public callable that takes arguments, and their names."""
    named = {name: getattr(kvferry, name) for name in kvferry.__all__}
    named |= {"LayerCounters": LayerCounters, "SharedReads": SharedReads}
    for name, target in named.items():
        parts = {name: target}
        if inspect.isclass(target):
            parts |= {
                f"{name}.{inner}": getattr(target, inner)
                for inner, value in vars(target).items()
                if not inner.startswith("_")
                and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
            }
        for each, callable_ in parts.items():
            names = set(inspect.signature(callable_).parameters) - {"self"}
            if names:
                yield each, names


def test_every_public_parameter_has_rows() -> None:
    found = dict(public())
    assert found.keys() - NOT_FOR_USERS == CASES.keys()
    assert found.keys() >= NOT_FOR_USERS
    assert {name: set(case.bad) for name, case in CASES.items()} == {
        name: names for name, names in found.items() if name in CASES
    }


@pytest.fixture(scope="module")
def world(mooncake_store: Any) -> Iterator[Any]:
    """What the callables are called on; nothing of it may change."""
    plain = CacheLayout.from_description(LAYOUT)
    tensors = make_tensors(plain, 8)
    layout = plain.bind(tensors)
    staging, other = StagingBuffer(1 << 16, device="cpu"), StagingBuffer(4096, device="cpu")
    linker = Linker(layout, mooncake_store, staging, LinkerConfig(namespace="test-arguments"))
    transfer = linker.save(["good"], {"full": [0], "state": [0]})
    transfer.result()
    load = linker.load(["good"], {"full": [1], "state": [1]}, layerwise=True).start()
    load.result()
    sharing = SharedReads.__new__(SharedReads)  # without ranks; its arguments are looked at first
    own = StagingBuffer(1 << 16, device="cpu")
    yield SimpleNamespace(
        layout=layout, plain=plain, store=mooncake_store, staging=own, other_staging=other,
        linker=linker, transfer=transfer, layer_load=load, span=own.acquire(256, 0.0),
        layer_save=linker.save(["later"], {"full": [2]}, layerwise=True),
        new_load=linker.load(["good"], {"full": [1], "state": [1]}, layerwise=True),
        objects=torch.zeros(4096, dtype=torch.uint8), packer=kvferry.Packer(layout, "full"),
        counters=LayerCounters(2, "cpu"), trace=kvferry.Trace(), stats=linker.stats,
        sharing=sharing, linker_staging=staging,
    )  # fmt: skip
    linker.close(1.0)


ROWS = [
    pytest.param(name, parameter, value, id=f"{name}-{parameter}-{number}")
    for name, case in CASES.items()
    for parameter, values in case.bad.items()
    for number, value in enumerate(values or [])
]


@pytest.mark.mooncake
@pytest.mark.parametrize(("name", "parameter", "value"), ROWS)
def test_what_is_nearly_right_is_refused(world: Any, name: str, parameter: str, value: Any) -> None:
    case = CASES[name]
    given = {**case.good(world), parameter: value}
    before = world.stats.snapshot()
    with pytest.raises(KVFerryError) as caught:
        case.call(world, given)
    assert isinstance(caught.value, ArgumentError), repr(caught.value)
    message = str(caught.value)
    assert "wanted" in message
    assert len(message) < 600, "a message repeats what came"
    # Nothing was launched or written.
    assert world.stats.snapshot() == before
    untouched = not world.objects.any()
    world.objects.zero_()
    assert untouched
    assert len(world.trace.intervals()) == 0
    assert world.linker_staging.num_free_bytes == world.linker_staging.num_bytes


@pytest.mark.mooncake
def test_pools_were_left_alone(world: Any) -> None:
    for space in world.layout.spaces:
        check_poison(world.layout, space, [])


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)])
def test_integers_of_other_libraries_are_integers(value: Any) -> None:
    assert arguments.whole_number("n", value, 0, 3) == 3
    assert type(arguments.whole_number("n", value, 0, 3)) is int
    assert LinkerConfig(max_queued=value).max_queued == 3


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0)])
def test_numbers_of_other_libraries_are_seconds(value: Any) -> None:
    assert arguments.seconds("s", value, above=True) == 2.0
    assert type(LinkerConfig(transfer_timeout_s=value).transfer_timeout_s) is float


def test_devices_may_be_named() -> None:
    assert StagingBuffer(256, device="cpu").tensor.device == torch.device("cpu")
    assert kvferry.Trace("cpu").num_dropped == 0


def test_messages_say_little_of_what_is_long() -> None:
    assert arguments.shown("short") == "'short'"
    assert arguments.shown("k" * 4096) == f"'{'k' * 48}'...'{'k' * 48}' (4096 characters)"
    assert len(arguments.shown(list(range(9999)))) < 120
