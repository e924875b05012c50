"""Old generations deleted from a real store: others' stay, and so does what a reader has leased."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvferry.errors import ArgumentError
from kvferry.forget import chosen, main
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.mooncake_config import MooncakeConfig
from kvferry.linker.owner import LocalOwner
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome
from kvferry.models import description
from kvferry.testing import make_tensors, write_telling

LEASE_TTL_S = 1.0
KEYS = ["a", "b", "c"]


class Fleet:
    """A store of its own, filled by linkers of several models, generations and ranks."""

    def __init__(self, master: LocalMaster, store: MooncakeStore) -> None:
        self.master, self.store = master, store
        self.identity = ModelIdentity("org/m")

    def linker(self, namespace: str, **identity: object) -> Linker:
        plain = CacheLayout.from_description(
            description("odd-bytes"),
            identity=replace(self.identity, **identity),  # type: ignore[arg-type]
        )
        layout = plain.bind(make_tensors(plain, 4, torch.device("cpu")))
        write_telling(layout, "full", [0, 1, 2], [0, 1, 2])
        staging = StagingBuffer(1 << 20, device=torch.device("cpu"))
        return Linker(layout, self.store, staging, LinkerConfig(namespace=namespace))

    def save(self, namespace: str, **identity: object) -> list[str]:
        """Store three pages; return their keys."""
        with self.linker(namespace, **identity) as linker:
            assert linker.save(KEYS, [0, 1, 2]).result().num_objects == 3
            return linker.keys.object_keys(KEYS, "full")

    def forget(self, *arguments: str) -> int:
        metrics = self.master.metrics_url.removeprefix("http://")
        return main(["--master", self.master.address, "--metrics", metrics, *arguments])


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[LocalMaster, MooncakeStore]]:
    """A master whose leases a test can outwait."""
    with (
        LocalMaster(lease_ttl_s=LEASE_TTL_S) as master,
        LocalOwner(master.address, 16 << 20),
        MooncakeStore(MooncakeConfig(master.address, lease_ttl_s=LEASE_TTL_S)) as store,
    ):
        yield master, store


@pytest.fixture
def fleet(cluster: tuple[LocalMaster, MooncakeStore]) -> Fleet:
    return Fleet(*cluster)


@pytest.mark.mooncake
def test_a_generation_goes_on_all_ranks_and_nothing_else_does(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [
        key for rank in range(2) for key in fleet.save("prod", generation="step 1", tp=(rank, 2))
    ]
    others = [
        *fleet.save("prod", generation="step 10"),
        *fleet.save("prod"),
        *fleet.save("prod", model="org/n", generation="step 1"),
        *fleet.save("prod2", generation="step 1"),
    ]
    assert fleet.forget("--namespace", "prod") == 0
    told = capsys.readouterr().out
    assert "nothing deleted" in told
    assert [line.split()[-1] for line in told.splitlines()[1:-1]] == ["3", "6", "3", "3"]
    chosen_by = ["--namespace", "prod", "--model", "org/m", "--generation", "step 1"]
    assert fleet.forget(*chosen_by, "--dry-run") == 0
    assert capsys.readouterr().out.count("would be deleted") == 1
    time.sleep(LEASE_TTL_S + 0.1)  # of the saves' own lookups
    assert fleet.forget(*chosen_by) == 0
    assert "6 deleted" in capsys.readouterr().out
    assert not any(fleet.store.exists(old))
    assert all(fleet.store.exists(others))
    assert fleet.forget(*chosen_by) == 0, "there is nothing of it any more"


@pytest.mark.mooncake
def test_what_a_reader_has_leased_is_left_until_it_is_let_go(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = fleet.save("leased", generation="1")
    fleet.save("leased", generation="2")
    time.sleep(LEASE_TTL_S + 0.1)
    staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
    staging.register(fleet.store)
    before, after = staging.tensor[:210], staging.tensor[4096 : 4096 + 210]
    with fleet.store.get_session(keys[:1]) as reader:
        assert reader.read(keys[:1], [before.data_ptr()], [210], [0])[0].outcome is Outcome.FETCHED
        assert fleet.forget("--namespace", "leased", "--keep", "2") == 1
        assert "2 deleted, 1 left: leased" in capsys.readouterr().out
        assert reader.read(keys[:1], [after.data_ptr()], [210], [0])[0].outcome is Outcome.FETCHED
        assert torch.equal(before, after)
        assert before.any()
    staging.unregister()
    begin_s = time.monotonic()
    assert fleet.forget("--namespace", "leased", "--keep", "2", "--wait", "10") == 0
    assert time.monotonic() - begin_s < 2 * LEASE_TTL_S + 2
    told = capsys.readouterr().out
    assert "1 deleted" in told
    assert "left" not in told
    assert not any(fleet.store.exists(keys))


@pytest.mark.mooncake
def test_by_the_command_line(fleet: Fleet) -> None:
    fleet.save("line", generation="1")
    metrics = fleet.master.metrics_url.removeprefix("http://")
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry", "forget", "--master", fleet.master.address,
         "--metrics", metrics, "--namespace", "line", "--generation", "1", "--wait", "5"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "org/m" in ran.stdout
    assert "3 deleted" in ran.stdout


THERE = Counter({("org%2Fm", "1"): 3, ("org%2Fm", "-"): 2, ("n", "1"): 1})


def test_which_generations_are_chosen() -> None:
    assert chosen(THERE, "org/m", ["1", "7"], []) == [("org%2Fm", "1")]
    assert chosen(THERE, "org/m", [""], []) == [("org%2Fm", "-")]
    assert chosen(THERE, "org/m", [], ["1"]) == [("org%2Fm", "-")]
    assert chosen(THERE, "n", [], ["1"]) == []
    only = Counter({("n", "1"): 1, ("n", "2"): 1})
    assert chosen(only, None, [], ["2"]) == [("n", "1")]
    with pytest.raises(ArgumentError, match=r"--model is not given, wanted one of \['n', 'org/m'"):
        chosen(THERE, None, ["1"], [])
    # A mistyped one would delete the one that was to be kept.
    with pytest.raises(ArgumentError, match=r"--keep is 'l', of which there is nothing, wanted on"):
        chosen(THERE, "n", [], ["l"])


@pytest.mark.mooncake
def test_what_cannot_be_done_is_said(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--master", "", "--namespace", "x"]) == 2
    assert "--master is not given" in capsys.readouterr().out
    assert main(["--master", fleet.master.address, "--metrics", "127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/get_all_keys does not answer" in capsys.readouterr().out
    assert fleet.forget("--namespace", "a/b") == 2
    assert "namespace is 'a/b'" in capsys.readouterr().out
