"""What nobody closes: dropped linkers, stores, masters; processes that end with them open."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import LIMIT_S, end_of, forked
from linker_bed import Bed, ids, keys

from kvferry.errors import StoreClosed, TransferFailed
from kvferry.linker import crew
from kvferry.linker.config import LinkerConfig
from kvferry.linker.gate import Breaker
from kvferry.linker.linker import Linker
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.process import Child
from kvferry.linker.staging import StagingBuffer

pytestmark = pytest.mark.mooncake

SLACK_S = 3.0


def wait_until(condition: Callable[[], Any], timeout_s: float = LIMIT_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Setting:
    """A linker over a store of its own, and nothing else that refers to either."""

    def __init__(self, bed: Bed, master: LocalMaster) -> None:
        self.bed = bed
        self.before = set(threading.enumerate())
        self.store: MooncakeStore | None = MooncakeStore(MooncakeConfig(master.address))
        self.staging = StagingBuffer(1 << 20, device=torch.device("cpu"))
        self.linker: Linker | None = self.another()
        self.client = weakref.ref(self.store.client)

    def another(self) -> Linker:
        assert self.store is not None
        config = LinkerConfig(namespace=f"endings-{id(self)}", lookup_ttl_s=0.0)
        return Linker(self.bed.layout, self.store, self.staging, config)

    @property
    def threads(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self.before

    def check_gone(self) -> None:
        """Nothing of either is left once they were dropped."""
        wait_until(lambda: not self.threads)
        wait_until(lambda: self.client() is None)
        self.staging.unregister()  # does nothing: it is not registered any more
        assert self.staging.num_free_bytes == self.staging.num_bytes


@pytest.fixture
def setting(bed: Bed, local_master: LocalMaster, local_owner: LocalOwner) -> Iterator[Setting]:
    gc.disable()  # references alone: no ring may keep a linker or a connection
    yield Setting(bed, local_master)
    gc.enable()


def test_a_dropped_linker_ends_and_its_store_serves_another(setting: Setting) -> None:
    assert setting.linker is not None
    assert setting.linker.save(keys(2), setting.bed.fill(0, 2)).result(LIMIT_S).failures == {}
    setting.linker.load(keys(2), ids(setting.bed, 8, 2), layerwise=True).start().result(LIMIT_S)
    assert len(setting.threads) >= 4
    setting.linker = None
    wait_until(lambda: not setting.threads)
    with setting.another() as again:
        assert again.lookup(keys(2)) == [1, 2]
        del again


def test_a_dropped_store_and_linker_end(setting: Setting) -> None:
    assert setting.linker is not None
    load = setting.linker.load(keys(2), ids(setting.bed, 8, 2), layerwise=True).start()
    with contextlib.suppress(TransferFailed):
        load.result(LIMIT_S)
    setting.linker = setting.store = None
    setting.check_gone()
    assert load.done()


def test_a_store_that_is_dropped_first_stays_for_its_linker(setting: Setting) -> None:
    setting.store = None
    assert setting.linker is not None
    assert setting.linker.save(keys(2), setting.bed.fill(0, 2)).result(LIMIT_S).failures == {}
    setting.linker.close()
    setting.linker = None
    setting.check_gone()


def test_what_is_in_flight_ends_well_where_the_linker_is_dropped(setting: Setting) -> None:
    assert setting.linker is not None
    saves = [setting.linker.save([f"drop-{page}"], setting.bed.fill(page, 1)) for page in range(8)]
    by_layer = setting.linker.save(["by layer"], setting.bed.fill(9, 1), layerwise=True)
    unstarted = setting.linker.load(keys(1), ids(setting.bed, 10, 1), layerwise=True)
    setting.linker = setting.store = None
    by_layer.all_written()
    assert [save.result(LIMIT_S).failures for save in (*saves, by_layer)] == [{}] * 9
    with pytest.raises(TransferFailed, match="closed"):
        unstarted.start()
    del unstarted  # a ring with the error that it raised
    gc.collect()
    setting.check_gone()


def test_a_linker_in_a_ring_ends_when_that_is_collected(setting: Setting) -> None:
    assert setting.linker is not None
    setting.linker.ring = [setting.linker, setting.store]  # type: ignore[attr-defined]
    setting.linker = setting.store = None
    time.sleep(0.1)
    assert setting.threads
    gc.collect()
    setting.check_gone()


def test_a_linker_that_was_half_made_leaves_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setting.linker is not None
    setting.linker.close()
    made: list[str] = []

    class Third(crew.Worker):  # type: ignore[type-arg]
        def __init__(self, name: str, *others: Any) -> None:
            if len(made) == 2:
                raise RuntimeError("can't start new thread")
            made.append(name)
            super().__init__(name, *others)

    with monkeypatch.context() as patch:
        patch.setattr(crew, "Worker", Third)
        with pytest.raises(RuntimeError, match="can't start"):
            setting.another()
    wait_until(lambda: not setting.threads)
    setting.another().close()


def test_the_probe_of_a_dropped_breaker_ends() -> None:
    asked = []
    breaker = Breaker(lambda: asked.append(None) is not None, first_pause_s=0.01)
    breaker.open("away")
    wait_until(lambda: len(asked) > 1)
    (thread,) = [each for each in threading.enumerate() if each.name == "kvferry-probe"]
    del breaker
    thread.join(LIMIT_S)
    assert not thread.is_alive()


# ---- closing ----


def test_close_from_a_transfers_own_end(setting: Setting) -> None:
    """By the worker, whose thread cannot wait for itself, and by whoever cancels."""
    for end in ("result", "cancel"):
        linker = setting.another() if end == "cancel" else setting.linker
        assert linker is not None
        transfer = linker.save([end], setting.bed.fill(0, 1), layerwise=True)
        done = threading.Event()

        def close(*_: Any, linker: Linker = linker, done: threading.Event = done) -> None:
            linker.close(10.0)
            done.set()

        transfer.on_end.append(close)
        begin_s = time.monotonic()
        if end == "result":
            transfer.all_written()
            assert transfer.result(LIMIT_S).failures == {}
        else:
            transfer.cancel()
        assert done.wait(SLACK_S)
        wait_until(lambda: not setting.threads)
        assert time.monotonic() - begin_s < SLACK_S
        linker.close()


def test_close_twice_and_from_many_threads(setting: Setting) -> None:
    linker, errors = setting.linker, []
    assert linker is not None

    def close() -> None:
        try:
            linker.close()
        except Exception as error:  # noqa: BLE001  looked at below
            errors.append(error)

    linker.save(keys(4), setting.bed.fill(0, 4))
    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors
    with setting.another() as again:  # which has the staging now
        linker.close()
        assert again.save(["again"], setting.bed.fill(0, 1)).result(LIMIT_S).failures == {}


def test_close_does_not_wait_for_layers_that_nobody_writes(setting: Setting) -> None:
    linker = setting.linker
    assert linker is not None
    save = linker.save(["never"], setting.bed.fill(0, 1), layerwise=True)
    save.layer_written(0)
    written = linker.save(["written"], setting.bed.fill(1, 1), layerwise=True)
    written.all_written()
    begin_s = time.monotonic()
    linker.close()
    assert time.monotonic() - begin_s < crew._UNWRITTEN_S + SLACK_S
    with pytest.raises(TransferFailed, match="not all layers are written") as caught:
        save.result()
    assert caught.value.cause == "closed"
    assert written.result().failures == {}


def test_an_exception_through_the_block_waits_for_no_model(setting: Setting) -> None:
    linker = setting.linker
    assert linker is not None
    save = linker.save(["never"], setting.bed.fill(0, 1), layerwise=True)
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), linker:
        raise KeyboardInterrupt
    assert time.monotonic() - begin_s < 1.0
    with pytest.raises(TransferFailed, match="closed"):
        save.result()


def test_lookup_after_close_raises(setting: Setting) -> None:
    linker, store = setting.linker, setting.store
    assert linker is not None
    assert store is not None
    with setting.bed.linker() as under:
        del under
    linker.close()
    with pytest.raises(TransferFailed, match="lookup refused: the linker is closed") as caught:
        linker.lookup(keys(1))
    assert caught.value.cause == "closed"
    another = setting.another()
    store.close()
    with pytest.raises(StoreClosed):
        another.lookup(keys(1))
    another.close()


# ---- masters and owners ----


def test_dropped_masters_and_owners_end_with_their_logs() -> None:
    master = LocalMaster().start()
    owner = LocalOwner(master.address, 16 << 20).start()
    pids = [master.pid, owner.pid]
    logs = [master.log_path, owner.log_path]
    assert all(log.exists() for log in logs)
    del owner, master
    assert not any(log.exists() for log in logs)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_master_that_is_dropped_first_ends_behind_what_was_made_after_it() -> None:
    """So the variables of a function go."""
    master = LocalMaster().start()
    owner = LocalOwner(master.address, 16 << 20).start()
    store = MooncakeStore(MooncakeConfig(master.address))
    pid = master.pid
    del master, owner
    assert store.exists(["any"]) == [False]
    begin_s = time.monotonic()
    del store
    assert time.monotonic() - begin_s < 10.0  # 13 s where the master does not answer any more
    assert not Path(f"/proc/{pid}").exists()


def test_stop_is_heard_while_a_forked_child_has_the_pipe() -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"])
    wait_until(lambda: child.pid is not None)
    pid = forked(lambda: time.sleep(LIMIT_S))
    begin_s = time.monotonic()
    assert child.stop() == 128 + signal.SIGTERM
    assert time.monotonic() - begin_s < SLACK_S
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == -signal.SIGKILL


# ---- processes that end ----


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("open", 0), ("daemon", 0), ("in a step", -signal.SIGINT), ("in a block", -signal.SIGINT),
        ("in a finally", -signal.SIGINT), ("terminated", -signal.SIGTERM),
    ],
)  # fmt: skip
def test_a_process_that_ends_with_all_of_it_open(what: str, status: int, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("exit_program.py")), what],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert program.stdout is not None
    line = program.stdout.readline()
    begin_s = time.monotonic()
    assert line == "ready\n"
    if status:
        program.send_signal(-status)
    _, errors = program.communicate(timeout=60.0)
    took_s = time.monotonic() - begin_s
    assert program.returncode == status, errors[-3000:]
    assert took_s < 15.0  # 2 to 4 s on a quiet machine, 65 s if it waited for the model
    wait_until(lambda: not list(tmp_path.glob("kvferry-*")))  # by the supervisor, where killed
