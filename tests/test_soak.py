"""The soak, for a few seconds: it runs, finds nothing, and would find what it looks for."""

import subprocess
import sys
from pathlib import Path

import pytest
import soak_victims
import torch
from soak_bare import BareObjects
from soak_cluster import CHAIN_PAGES, Cluster
from soak_tally import Tally

from kvferry import LocalMaster, LocalOwner, MooncakeConfig, MooncakeStore
from kvferry.linker.eviction import evict

pytestmark = pytest.mark.mooncake

ROOT = Path(__file__).resolve().parent.parent


def soak(*options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--seed", "3", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr[-4000:]


def counts_of(output: str) -> dict[str, str]:
    """Return what the table's lines count, and the values of the bars."""
    lines = output.splitlines()
    table = dict(line.rsplit(maxsplit=1) for line in lines if len(line.split()) > 1)
    bars = {f"bar {line.split()[1]}": line.split()[2] for line in lines if line[:4] == "bar "}
    return {**{what.strip(): count for what, count in table.items()}, **bars}


def test_a_short_soak_finds_nothing() -> None:
    status, output = soak("--minutes", "0.15")
    assert status == 0, output[-4000:]
    counts = counts_of(output)
    for name in ("wrong_bytes", "wrong_results", "hangs", "held_staging_bytes", "threads_left"):
        assert float(counts[f"bar {name}"]) == 0, name
    forms = ("save whole", "save layers", "load whole", "load layers", "load batch")
    assert [form for form in forms if f"{form}, done" not in counts] == []


def test_what_others_store_behind_a_fault_that_nobody_noticed_keeps_its_bytes() -> None:
    status, output = soak("--minutes", "0.4", "--faults", "unnoticed")
    assert status == 0, output[-4000:]
    counts = counts_of(output)
    assert any(what.startswith("fault: ") for what in counts), "no fault was injected"
    assert int(counts["victims compared"].replace(",", "")) > 500
    assert float(counts["bar overwritten_victims"]) == 0


def test_an_overwritten_victim_is_found(
    monkeypatch: pytest.MonkeyPatch, local_master: LocalMaster, local_owner: LocalOwner
) -> None:
    monkeypatch.setattr(soak_victims, "NUM_VICTIMS", 100)
    tally = Tally()
    with MooncakeStore(MooncakeConfig(local_master.address)) as store:
        victims = soak_victims.Victims(store, tally)
        assert victims.store_many()
        victims.compare("nothing")
        assert tally.wrong["victims"] == 0
        wrong, gone = victims._keys[60], victims._keys[61]
        evict(store, [wrong, gone])
        memory = torch.zeros(soak_victims.VICTIM_BYTES, dtype=torch.uint8)
        store.register(memory.data_ptr(), memory.numel())
        store.put([wrong], [memory.data_ptr()], [memory.numel()])
        victims.compare("a fault")
        assert tally.wrong["victims"] == 1
        assert wrong in tally.reports[0]
        assert len(victims._keys) == 98
        victims.let_go()


def test_an_overwritten_object_without_checksum_is_found() -> None:
    cluster = Cluster(Tally())
    try:
        bare = BareObjects(cluster.bare)
        num_stored = bare.store()
        assert num_stored > CHAIN_PAGES
        assert bare.compare() == (num_stored, [])
        (wrong, content), (gone, _), *_ = bare._contents.items()
        evict(cluster.bare.store, [wrong, gone])
        memory = torch.zeros_like(content)
        cluster.bare.store.register(memory.data_ptr(), len(memory))
        cluster.bare.store.put([wrong], [memory.data_ptr()], [len(memory)])
        assert bare.compare() == (num_stored - 1, [wrong])
    finally:
        cluster.close()
