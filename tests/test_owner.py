"""LocalOwner: objects that outlive clients, warm memory, and a clean end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kvferry.errors
from kvferry.errors import ArgumentError, StoreError
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.store import Outcome

SOURCE = Path(kvferry.errors.__file__).parents[1]
MIB = 1 << 20


def start_program(address, *extra, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.linker.owner", f"--master={address}", *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        **options,
    )


@pytest.mark.mooncake
def test_objects_outlive_the_client(local_master, local_owner, make_memory, unique):
    key = unique("a")
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        memory = make_memory(store, MIB)
        memory.fill(1)
        expected = memory.bytes.copy()
        assert store.put([key], [memory.address(0)], [MIB])[0].outcome is Outcome.STORED
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        memory = make_memory(store, MIB)
        assert store.get([key], [memory.address(0)], [MIB])[0].outcome is Outcome.FETCHED
        np.testing.assert_array_equal(memory.bytes, expected)


@pytest.mark.mooncake
def test_warm_segment_is_resident(local_master):
    with LocalOwner(local_master.address, 64 * MIB) as owner:
        assert owner.running
        assert owner.warm_bytes == 64 * MIB
        address = local_master.address
        assert Path(f"/proc/{owner.pid}/status").exists()
    assert not owner.running
    assert owner.pid is None
    assert not owner.log_path.exists()
    resident = {}
    for name, extra in (("warm", []), ("cold", ["--cold"])):
        program = start_program(
            address, f"--segment-bytes={256 * MIB}", *extra, stdin=subprocess.PIPE
        )
        try:
            line = json.loads(program.stdout.readline())
            status = Path(f"/proc/{program.pid}/status").read_text()
            resident[name] = int(status.partition("VmRSS:")[2].split()[0]) << 10
            assert line["warm_bytes"] == (256 * MIB if name == "warm" else 0)
            program.stdin.close()
            assert program.wait(10.0) == 0  # ends when its standard input does
        finally:
            program.kill()
            program.stdout.close()
    assert resident["warm"] > 256 * MIB > resident["cold"] + 100 * MIB


@pytest.mark.mooncake
def test_program_ends_clean_on_sigterm(local_master):
    program = start_program(
        local_master.address, f"--segment-bytes={16 * MIB}", stdin=subprocess.DEVNULL
    )
    try:
        assert json.loads(program.stdout.readline())["segment_bytes"] == 16 * MIB
        time.sleep(0.2)
        assert program.poll() is None  # an empty standard input is no order to end
        program.send_signal(signal.SIGTERM)
        assert program.wait(10.0) == 0
    finally:
        program.kill()
        program.stdout.close()


@pytest.mark.mooncake
def test_owner_without_master_says_why():
    owner = LocalOwner("127.0.0.1:1", 16 * MIB)
    with pytest.raises(StoreError, match=r"nobody listens at master_address '127.0.0.1:1'"):
        owner.start()
    assert owner.log_path.exists()
    owner.stop()
    assert not owner.log_path.exists()


def test_segment_must_not_be_tiny():
    with pytest.raises(ArgumentError, match="segment_bytes is 5, wanted 1048576 "):
        LocalOwner("127.0.0.1:1", 5)


def test_owner_does_not_import_torch():
    program = "import sys, kvferry.linker.owner; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
