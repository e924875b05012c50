"""Forked children: what was made before the fork refuses to work in them, and comes to no harm."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import AT_ONCE_S, LIMIT_S, end_of, forked, held_elsewhere
from linker_bed import Bed, ids, keys

from kvferry.errors import ForkedProcess
from kvferry.linker.home import Home, stays_home
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import STORED
from kvferry.linker.transfer import Transfer

pytestmark = pytest.mark.mooncake

Calls = dict[str, Callable[[], Any]]

FOR_THE_WORKER = {
    "age_us", "attach", "check_going", "counter_set", "fail", "finish", "give_up", "going",
    "is_over", "is_wanted", "is_written", "let_through", "mark_packed", "prepare", "restart_clock",
    "touching_pages", "wait_written",
}  # fmt: skip
HARMLESS = {
    "address", "available", "client", "closed", "index", "left_s", "metrics_url", "pid",
    "start_results",
}  # fmt: skip
"""They look at what the child has a copy of: no lock, no thread, no wire."""


def handle_calls(transfer: Transfer) -> Calls:
    return {
        "done": transfer.done,
        "result": transfer.result,
        "wait": lambda: transfer.wait(1.0),
        "wait_packed": transfer.wait_packed,
        "cancel": transfer.cancel,
    }


def load_calls(load: LayerLoad) -> Calls:
    return {
        "start": load.start,
        "arm": load.arm,
        "wait_layer": lambda: load.wait_layer(0),
        "done": load.done,
        "result": load.result,
        "cancel": load.cancel,
    }


class Family:
    """One of each thing that a process makes, and a call of every public method of each."""

    def __init__(self, bed: Bed, master: LocalMaster, owner: LocalOwner) -> None:
        self.bed, self.store = bed, bed.store.store
        self.linker = bed.linker()
        self.staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
        self.staging.register(self.store)
        self.whole = self.linker.save(keys(4), bed.fill(0, 4))
        self.whole.result(LIMIT_S)
        self.layers = self.linker.save(["new"], ids(bed, 5, 1), layerwise=True)
        self.load = self.linker.load(keys(2), ids(bed, 8, 2), layerwise=True)
        self.unstarted = self.linker.load(keys(2), ids(bed, 10, 2), layerwise=True)
        self.load.start().result(LIMIT_S)
        self.put = self.store.put_session(["forks/session"], [64])
        self.get = self.store.get_session(self.linker.keys.object_keys(keys(1), "full"))
        self.owner, self.master = owner, master

    def close(self) -> None:
        """End what the bed does not."""
        self.layers.cancel()
        self.put.abort()
        self.get.close()
        self.staging.unregister()

    @property
    def calls(self) -> dict[Any, Calls]:
        one, ids_of, address = ["page-0"], ids(self.bed, 0, 1), [self.staging.address]
        return {
            self.linker: {
                "save": lambda: self.linker.save(one, ids_of),
                "save by layer": lambda: self.linker.save(one, ids_of, layerwise=True),
                "load": lambda: self.linker.load(one, ids_of),
                "load by layer": lambda: self.linker.load(one, ids_of, layerwise=True),
                "load_batch": lambda: self.linker.load_batch([]),
                "skip_load": lambda: self.linker.skip_load(0),
                "lookup": lambda: self.linker.lookup(one),
                "distrust": lambda: self.linker.distrust(one),
                "renew": lambda: self.linker.renew("another"),
                "close": self.linker.close,
            },
            self.linker.stats: {
                "snapshot": self.linker.stats.snapshot,
                "prometheus": self.linker.stats.prometheus,
            },
            self.whole: handle_calls(self.whole),
            self.layers: {
                **handle_calls(self.layers),
                "layer_written": lambda: self.layers.layer_written(0),
                "all_written": self.layers.all_written,
            },
            self.load: load_calls(self.load),
            self.unstarted: load_calls(self.unstarted),
            self.store: {
                "register": lambda: self.store.register(1 << 12, 64),
                "unregister": lambda: self.store.unregister(address[0]),
                "exists": lambda: self.store.exists(one),
                "put": lambda: self.store.put(one, address, [64]),
                "get": lambda: self.store.get(one, address, [64]),
                "remove": lambda: self.store.remove(one),
                "remove_under": lambda: self.store.remove_under("forks/none"),
                "put_session": lambda: self.store.put_session(one, [64]),
                "get_session": lambda: self.store.get_session(one),
                "num_open_puts": lambda: self.store.num_open_puts,
                "num_open_gets": lambda: self.store.num_open_gets,
                "close": self.store.close,
            },
            self.put: {
                "write": lambda: self.put.write(["forks/session"], address, [64], [0]),
                "finish": self.put.finish,
                "abort": self.put.abort,
            },
            self.get: {
                "read": lambda: self.get.read(
                    self.linker.keys.object_keys(keys(1), "full"), address, [64], [0]
                ),
                "longer": lambda: self.get.longer(
                    self.linker.keys.object_keys(keys(1), "full"), [64]
                ),
                "close": self.get.close,
            },
            self.staging: {
                "register": lambda: self.staging.register(self.store),
                "unregister": self.staging.unregister,
                "acquire": lambda: self.staging.acquire(256, 1.0),
                "release": lambda: self.staging.release(None),  # type: ignore[arg-type]
                "num_free_bytes": lambda: self.staging.num_free_bytes,
                "largest_free_bytes": lambda: self.staging.largest_free_bytes,
                "num_held_bytes": lambda: self.staging.num_held_bytes,
            },
            self.master: {
                "running": lambda: self.master.running,
                "start": self.master.start,
                "kill": self.master.kill,
                "stop": self.master.stop,
            },
            self.owner: {
                "running": lambda: self.owner.running,
                "start": self.owner.start,
                "kill": self.owner.kill,
                "stop": self.owner.stop,
            },
        }

    def check_refused(self) -> None:
        """In a child: every call raises, at once, and says whose it is."""
        for made, calls in self.calls.items():
            for name, call in calls.items():
                begin_s = time.monotonic()
                with pytest.raises(ForkedProcess) as caught:
                    call()
                assert f"belongs to process {os.getppid()}, this is {os.getpid()}" in str(
                    caught.value
                ), (made, name)
                assert time.monotonic() - begin_s < AT_ONCE_S, (made, name)

    def check_whole(self) -> None:
        """In the parent: all of it works."""
        bed = self.bed
        assert self.linker.lookup(keys(4)) == [1, 2, 3, 4]
        self.linker.load(keys(4), ids(bed, 20, 4)).result(LIMIT_S)
        bed.check(20, range(4))
        self.linker.load(keys(4), ids(bed, 30, 4), layerwise=True).start().result(LIMIT_S)
        bed.check(30, range(4))
        assert self.linker.save(["after"], bed.fill(6, 1)).result(LIMIT_S).failures == {}
        self.layers.all_written()
        assert self.layers.result(LIMIT_S).failures == {}
        assert self.put.start_results() == [STORED]
        assert self.master.running
        assert self.owner.running


@pytest.fixture
def family(bed: Bed, local_master: LocalMaster, local_owner: LocalOwner) -> Iterator[Family]:
    family = Family(bed, local_master, local_owner)
    yield family
    family.close()


def test_every_public_call_is_tried(family: Family) -> None:
    for made, calls in family.calls.items():
        public = {name for name in dir(type(made)) if not name.startswith("_")}
        public = {
            name for name in public if callable(found := getattr(type(made), name))
            or isinstance(found, property)
        }  # fmt: skip
        named = {name.partition(" by ")[0] for name in calls}
        missing = public - named - FOR_THE_WORKER - HARMLESS
        if made is family.linker.stats:
            missing -= {"ended"}
        assert not missing, type(made)


def test_a_child_is_refused_everything_and_the_parent_goes_on(family: Family) -> None:
    child = multiprocessing.get_context("fork").Process(target=family.check_refused)
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == 0
    family.check_whole()


def test_locks_that_were_held_at_the_fork_do_not_matter(family: Family) -> None:
    with held_elsewhere([family.bed, vars(family)]) as num_locks:
        assert num_locks > 20
        pid = forked(family.check_refused)
        assert end_of(pid) == 0
    family.check_whole()


def test_a_fork_in_another_thread(family: Family) -> None:
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(end_of(forked(family.check_refused))))
    thread.start()
    thread.join(2 * LIMIT_S)
    assert ends == [0]
    family.check_whole()


def test_forks_while_transfers_are_in_flight(family: Family) -> None:
    bed, linker = family.bed, family.linker
    bed.poison()
    bed.fill(0, 4)
    pids = []
    for round_ in range(8):
        by_layer = linker.load(keys(4), ids(bed, 20, 4), layerwise=True).start()
        pids.append(forked(lambda: (family.check_refused(), time.sleep(0.1))))
        whole = linker.load(keys(4), ids(bed, 30, 4))
        save = linker.save([f"flight-{round_}"], ids(bed, 3, 1))
        pids.append(forked(family.check_refused))
        by_layer.result(LIMIT_S)
        whole.result(LIMIT_S)
        assert save.result(LIMIT_S).failures == {}
        bed.check(20, range(4))
        bed.check(30, range(4))
    assert [end_of(pid) for pid in pids] == [0] * len(pids)


def test_leaving_with_blocks_in_a_child_does_nothing(family: Family) -> None:
    span = family.staging.acquire(256, 0.0)

    def leave_span() -> None:
        with ExitStack() as stack:
            stack.push(span.__exit__)
            for made in (
                family.master, family.owner, family.store, family.linker, family.put, family.get,
            ):  # fmt: skip
                stack.push(made.__exit__)

    assert end_of(forked(leave_span)) == 0
    span.release()
    family.check_whole()


@stays_home
class Adapter:
    """As the engines' are."""

    made = 0

    def __init__(self) -> None:
        self._home = Home("the adapter")

    def count(self, more: int = 1) -> int:
        return self._add(more)

    def _add(self, more: int) -> int:
        self.made += more
        return self.made

    @classmethod
    def of_the_class(cls) -> str:
        return cls.__name__

    @property
    def of_the_type(self) -> bool:
        return True


def test_a_whole_class_stays_home() -> None:
    adapter = Adapter()

    def check() -> None:
        with pytest.raises(ForkedProcess, match="the adapter belongs to process"):
            adapter.count()
        assert adapter.of_the_type
        assert adapter.of_the_class() == Adapter().of_the_class() == "Adapter"
        assert Adapter().count() == 1

    assert adapter.count(more=2) == 2
    assert end_of(forked(check)) == 0
    assert adapter.count() == 3


@pytest.mark.parametrize("what", ["own", "refused", "spawn", "leaving"])
def test_a_program_that_forks(
    what: str, local_master: LocalMaster, local_owner: LocalOwner
) -> None:
    program = Path(__file__).with_name("fork_program.py")
    ran = subprocess.run(
        [sys.executable, str(program), local_master.address, what],
        capture_output=True, text=True, timeout=300.0,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.endswith("right\n")
    if what == "leaving":
        assert ran.stdout.count("the child's last words") == 2
        assert ran.stdout.count("the parent's last words") == 2
