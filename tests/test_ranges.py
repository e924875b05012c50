"""NVTX ranges as a tool hears them: one for each transfer, group and wait, nested and closed."""

import json
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvtx_listening import Heard, listen, needs_compiler, ranges_of

from kvferry.linker import ranges
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.mover import Mover
from kvferry.linker.ranges import COLOURS, Range, ranged

SCRIPT = Path(__file__).parent / "ranged_transfers.py"
TRANSFERS = ("save", "load", "save layers", "load layers")
GROUPS = ["layers 0..0", "layers 1..2", "layers 3..4"]
WHATS = [*GROUPS, "objects"]

Told = list[dict[str, Any]]
Both = tuple[Told, list[Heard]]


def on_heard(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of what is heard of real transfers."""
    return needs_compiler(pytest.mark.mooncake(test))


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """What the script says of its transfers, and what the listener heard of them."""
    done, found = listen(tmp_path_factory.mktemp("nvtx"), [sys.executable, str(SCRIPT)])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), found


def of_transfer(found: list[Heard], number: int, kind: str) -> list[Heard]:
    """The ranges of a kind that belong to the transfer of that number.

    Those in other threads too: transfers were carried out one after the other.
    """
    places = [place for place, one in enumerate(found) if one.name in TRANSFERS]
    end = places[number + 1] if number + 1 < len(places) else len(found)
    return [one for one in found[places[number] : end] if one.category == kind]


@on_heard
def test_one_for_each_transfer_with_its_bytes_and_pages(heard: Both) -> None:
    told, found = heard
    transfers = [one for one in found if one.name in TRANSFERS]
    assert [one.name for one in transfers] == [one["name"] for one in told]
    assert [one.num_bytes for one in transfers] == [one["plan_bytes"] for one in told]
    assert [one.num_pages for one in transfers] == [one["num_pages"] for one in told]
    # Of those that went well it is what their results say, but for what was stored before.
    went_well = [
        (one.num_bytes, result["num_bytes"])
        for number, (one, result) in enumerate(zip(transfers, told, strict=True))
        if result["num_bytes"] is not None and number != 2
    ]
    assert len(went_well) == 4
    assert all(heard_bytes == moved for heard_bytes, moved in went_well)


@on_heard
def test_every_one_is_closed_also_of_what_failed(heard: Both) -> None:
    told, found = heard
    assert [one.get("cause") for one in told] == [
        None, None, None, "missing", "cancelled", None, None, "missing", "cancelled"
    ]  # fmt: skip
    assert [one.name for one in found if not one.is_closed] == []


@on_heard
def test_domain_colours_and_categories(heard: Both) -> None:
    _, found = heard
    assert {one.domain for one in found} == {"kvferry"}
    assert {one.category for one in found} == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    # Tools keep every name for good: names tell layers, never sizes.
    moves = [f"{kind} {what}" for kind in ("pack", "unpack", "wire") for what in WHATS]
    waits = [f"wait {what}" for what in (*GROUPS, *(f"layer {layer}" for layer in range(5)))]
    assert {one.name for one in found} == {*TRANSFERS, *moves, *waits}
    for one in found:
        assert (one.num_bytes == -1) == (one.category == "wait")
        assert one.colour == COLOURS[one.category]
        assert one.name.split()[0] == one.category


@on_heard
def test_they_nest_in_their_thread(heard: Both) -> None:
    _, found = heard
    for one in found:
        if one.name in TRANSFERS or one.name.startswith("wait layer "):
            assert one.parents == []
        elif one.category == "wire" and one.parents == []:
            pass  # in a thread that does nothing else
        else:
            assert len(one.parents) == 1
            assert one.parents[0] in TRANSFERS
    threads = {one.thread for one in found if one.name in TRANSFERS}
    assert len(threads) == 4  # one for each form


@on_heard
@pytest.mark.parametrize(
    ("number", "kernel"), [(0, "pack"), (1, "unpack"), (2, "pack")], ids=["save", "load", "new"]
)
def test_parts_of_whole_objects(heard: Both, number: int, kernel: str) -> None:
    told, found = heard
    for kind in (kernel, "wire"):
        parts = of_transfer(found, number, kind)
        assert [one.name for one in parts] == [f"{kind} objects"] * 3  # one per index space
        assert sum(one.num_bytes for one in parts) == told[number]["num_bytes"]


@on_heard
@pytest.mark.parametrize(
    ("number", "kernel", "times"),
    # Two requests that share a key take two parts for each group, and a load's first group takes
    # several where it is long.
    [(5, "pack", (1, 1, 1)), (6, "unpack", (3, 2, 2))],
    ids=["save", "load"],
)
def test_layer_groups(heard: Both, number: int, kernel: str, times: tuple[int, ...]) -> None:
    told, found = heard
    wanted = told[number]["num_bytes"]
    if kernel == "pack":  # once all layers are packed, the objects leave whole
        (part,) = of_transfer(found, number, "wire")
        assert (part.name, part.num_bytes) == ("wire objects", wanted)
        assert part.num_pages == told[number]["num_pages"]
    else:
        wanted += told[number]["end_bytes"]
    for kind in ("pack",) if kernel == "pack" else (kernel, "wire"):
        parts = of_transfer(found, number, kind)
        names = [f"{kind} {group}" for group, count in zip(GROUPS, times, strict=True)
                 for _ in range(count)]  # fmt: skip
        assert sorted(one.name for one in parts) == names
        assert sum(one.num_bytes for one in parts) == wanted
        num_pages = sum(one.num_pages for one in parts)
        assert num_pages == told[number]["num_pages"] // 3 * 5  # of five layers' spaces


@on_heard
@pytest.mark.parametrize("number", [6, 7], ids=["good", "failed"])
def test_one_for_each_wait_for_a_layer(heard: Both, number: int) -> None:
    _, found = heard
    waits = [one for one in found if one.name.startswith("wait layer ")]
    mine = waits[(number - 6) * 5 : (number - 5) * 5]
    assert len(waits) == 10
    assert [one.name for one in mine] == [f"wait layer {layer}" for layer in range(5)]
    assert len({one.thread for one in waits}) == 1


@on_heard
def test_a_cancelled_save_stops_at_the_group_it_waited_for(heard: Both) -> None:
    _, found = heard
    assert [one.name for one in of_transfer(found, 8, "pack")] == ["pack layers 0..0"]
    assert [one.name for one in of_transfer(found, 8, "wait")] == [
        "wait layers 0..0", "wait layers 1..2"
    ]  # fmt: skip


PLAIN = """
from kvferry.linker.ranges import Range, is_heard, ranged
@ranged(lambda number: Range("pack", "x", number, 2))
def half(number):
    return 12 // number
print(is_heard, half(5))
try:
    half(0)
except ZeroDivisionError:
    print("raised")
"""


@needs_compiler
def test_values_and_errors_come_through(tmp_path: Path) -> None:
    done, found = listen(tmp_path, [sys.executable, "-c", PLAIN])
    assert done.stdout == "True 2\nraised\n", done.stderr
    assert [(one.name, one.num_bytes, one.num_pages) for one in found] == [
        ("pack x", 5, 2), ("pack x", 0, 2)
    ]  # fmt: skip
    assert all(one.is_closed for one in found)


@needs_compiler
def test_nvtx_can_be_switched_off(tmp_path: Path) -> None:
    done, found = listen(tmp_path, [sys.executable, "-c", PLAIN], NVTX_DISABLE="1")
    assert done.stdout == "False 2\nraised\n", done.stderr
    assert found == []


def test_what_was_not_opened_is_not_closed() -> None:
    push = "7\tpush\tkvferry\tsave\t1\tff000000\t5\t1"
    assert [one.is_closed for one in ranges_of([push])] == [False]
    assert [one.is_closed for one in ranges_of([push, "7\tpop\tkvferry"])] == [True]
    with pytest.raises(AssertionError, match="thread 8 closed a range"):
        ranges_of([push, "8\tpop\tkvferry"])


def plain(number: int) -> int:
    return number


def test_no_tool_no_cost() -> None:
    assert not ranges.is_heard, "a tool listens to this test run"
    with_range = ranged(lambda number: Range("pack", "", number))(plain)
    assert with_range is plain
    for method in (Mover.move, Mover._launch, Mover._call, LayerLoad.wait_layer):
        assert not hasattr(method, "__wrapped__")

    def best_us(call: Callable[[int], int]) -> float:
        return min(timeit.repeat(lambda: call(1), number=2000, repeat=5)) / 2000 * 1e6

    assert best_us(with_range) - best_us(plain) < 5
