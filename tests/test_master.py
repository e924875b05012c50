"""LocalMaster, and the process that keeps programs from outliving their parent."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import kvferry.errors
from kvferry.errors import ArgumentError, StoreError
from kvferry.linker import master as master_module
from kvferry.linker.master import LocalMaster
from kvferry.linker.process import Child

SOURCE = Path(kvferry.errors.__file__).parents[1]


def alive(pid):
    """Whether a process runs; one that ended and was not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, timeout_s=8.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def connects(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def pid_writer(path, then="time.sleep(60)"):
    return [
        sys.executable,
        "-c",
        f"import os, signal, time; open({str(path)!r}, 'w').write(str(os.getpid())); {then}",
    ]


def read_pid(path):
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


# ---- process ----


def test_child_exit_status():
    child = Child([sys.executable, "-c", "raise SystemExit(7)"])
    wait_until(lambda: child.poll() is not None)
    assert child.poll() == 7
    assert child.stop() == 7


def test_child_that_cannot_start():
    child = Child(["/nonexistent/program"], stderr=subprocess.DEVNULL)
    wait_until(lambda: child.poll() is not None)
    assert child.stop() == 127


def test_stop_terminates(tmp_path):
    child = Child(pid_writer(tmp_path / "pid"))
    pid = read_pid(tmp_path / "pid")
    assert child.stop() == 128 + signal.SIGTERM
    assert not alive(pid)
    assert child.stop() == 128 + signal.SIGTERM


def test_kill_is_sigkill(tmp_path):
    then = "signal.signal(15, signal.SIG_IGN); open(__import__('sys').argv[1], 'w'); time.sleep(60)"
    child = Child([*pid_writer(tmp_path / "pid", then), str(tmp_path / "ready")])
    pid = read_pid(tmp_path / "pid")
    wait_until((tmp_path / "ready").exists)
    assert child.kill() == 128 + signal.SIGKILL
    assert not alive(pid)


def test_child_that_ignores_sigterm_is_killed(tmp_path):
    then = "signal.signal(15, signal.SIG_IGN); open(__import__('sys').argv[1], 'w'); time.sleep(60)"
    child = Child([*pid_writer(tmp_path / "pid", then), str(tmp_path / "ready")])
    wait_until((tmp_path / "ready").exists)
    begin_s = time.monotonic()
    assert child.stop() == 128 + signal.SIGKILL
    assert 4.0 < time.monotonic() - begin_s < 8.0


def test_child_outlives_the_thread_that_started_it(tmp_path):
    children = []
    thread = threading.Thread(target=lambda: children.append(Child(pid_writer(tmp_path / "pid"))))
    thread.start()
    thread.join(5.0)
    pid = read_pid(tmp_path / "pid")
    time.sleep(0.3)
    assert alive(pid)
    children[0].stop()


def test_child_dies_with_its_supervisor(tmp_path):
    child = Child(pid_writer(tmp_path / "pid"))
    pid = read_pid(tmp_path / "pid")
    os.kill(child._popen.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    child.stop()


# ---- master ----


@pytest.mark.mooncake
def test_master_serves_on_loopback_and_ends_clean():
    master = LocalMaster()
    with pytest.raises(StoreError, match="not started"):
        _ = master.address
    with master:
        assert master.start() is master  # running already
        assert master.running
        assert master.address.startswith("127.0.0.1:")
        assert connects(master.address)
        with urllib.request.urlopen(f"{master.metrics_url}/metrics", timeout=5) as reply:
            assert b"master_key_count" in reply.read()
        port = int(master.address.rpartition(":")[2])
        listening = Path("/proc/net/tcp").read_text().upper()
        assert f" 0100007F:{port:04X} " in listening
        assert f" 00000000:{port:04X} " not in listening
        assert master.log_path.stat().st_size > 0
    assert not master.running
    assert not connects(master.address)
    assert not master.log_path.exists()
    master.stop()


@pytest.mark.mooncake
def test_master_restarts_at_its_address():
    with LocalMaster() as master:
        address, pid = master.address, master.pid
        assert alive(pid)
        master.kill()
        assert not master.running
        assert master.pid is None
        master.start()
        assert master.pid not in (None, pid)
        assert master.address == address
        assert connects(address)


@pytest.mark.mooncake
@pytest.mark.parametrize("taken", [0, 1])
def test_master_takes_other_ports_where_one_is_taken(monkeypatch, taken):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free = master_module._free_ports()
        bad = list(free)
        bad[taken] = other.getsockname()[1]
        offers = [tuple(bad)]
        real = master_module._free_ports
        monkeypatch.setattr(
            master_module, "_free_ports", lambda: offers.pop() if offers else real()
        )
        with LocalMaster() as master:
            assert not offers
            assert int(master.address.rpartition(":")[2]) != other.getsockname()[1]
            assert connects(master.address)


@pytest.mark.mooncake
def test_a_failed_start_shows_the_end_of_its_log():
    master = LocalMaster(extra_flags=["--no_such_flag=1"])
    with pytest.raises(StoreError, match="no_such_flag") as caught:
        master.start()
    assert "its log ends:" in str(caught.value)
    assert not master.running
    assert master.log_path.exists()
    log_path = master.log_path
    del master
    caught.value.__traceback__ = None
    del caught
    assert not log_path.exists()


def test_lease_must_be_positive():
    with pytest.raises(ArgumentError, match="lease_ttl_s"):
        LocalMaster(lease_ttl_s=0)


@pytest.mark.mooncake
def test_master_does_not_outlive_a_killed_parent():
    program = """
        import threading, time
        from kvferry.linker.master import LocalMaster
        master = LocalMaster()
        starter = threading.Thread(target=master.start)
        starter.start(); starter.join()
        print(master.address, master.log_path, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    address, log_path = parent.stdout.readline().split()
    try:
        time.sleep(0.3)
        assert connects(address)  # the thread that started it is gone
        parent.kill()
        parent.wait(5.0)
        wait_until(lambda: not connects(address))
    finally:
        parent.kill()
        parent.stdout.close()
    wait_until(lambda: not Path(log_path).exists())


def test_free_ports_are_free():
    random.seed()
    first, second = master_module._free_ports()
    assert first != second
    for port in (first, second):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
