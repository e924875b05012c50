"""An owner that does not answer is waited for once; what lies elsewhere is moved all the same."""

import time

import pytest

from kvferry.errors import StoreUnavailable
from kvferry.linker import hung_owners
from kvferry.linker.codes import TRANSFER_FAIL
from kvferry.linker.hung_owners import HungOwners

SLOW_S = 0.02
HOLD_S = 0.3
OWNERS = {"a0": "A", "a1": "A", "a2": "A", "b0": "B", "b1": "B"}


class Client:
    """Moves objects; whoever asks for one of an owner that hangs waits.

    Attributes:
        hanging: owners that do.
        calls: the keys of each call.
        asked: the keys whose owners were asked for.
    """

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.calls: list[list[str]] = []
        self.asked: list[list[str]] = []
        self.is_master_away = False

    def move(self, keys: list[str], sizes: list[int]) -> list[int]:
        self.calls.append(list(keys))
        hung = [OWNERS.get(key, "") in self.hanging for key in keys]
        if any(hung):
            time.sleep(2 * SLOW_S)
        return [TRANSFER_FAIL if h else size for h, size in zip(hung, sizes, strict=True)]

    def owners_of(self, keys: list[str]) -> dict[str, str]:
        self.asked.append(list(keys))
        if self.is_master_away:
            raise StoreUnavailable("the master is away")
        return {key: OWNERS[key] for key in keys if key in OWNERS}


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(hung_owners, "SLOW_S", SLOW_S)
    monkeypatch.setattr(hung_owners, "HOLD_S", HOLD_S)
    return Client()


KEYS = ["a0", "b0", "a1", "b1", "a2"]
SIZES = [1, 2, 3, 4, 5]
WITHOUT_A = [TRANSFER_FAIL, 2, TRANSFER_FAIL, 4, TRANSFER_FAIL]


def test_nothing_is_asked_while_all_is_well(client):
    hung = HungOwners(client.owners_of)
    assert hung.read(client.move, KEYS, SIZES) == SIZES
    assert hung.write(client.move, KEYS, SIZES) == SIZES
    assert client.asked == []
    assert client.calls == [KEYS, KEYS]


def test_reads_of_an_owner_that_hangs_fail_at_once_and_others_go_on(client):
    hung = HungOwners(client.owners_of)
    client.hanging = {"A"}
    assert hung.read(client.move, KEYS, SIZES) == WITHOUT_A
    assert client.asked == [["a0", "a1", "a2"]]
    assert hung.read(client.move, KEYS, SIZES) == WITHOUT_A
    assert hung.read(client.move, ["a1"], [3]) == [TRANSFER_FAIL]
    assert client.calls == [KEYS, ["b0", "b1"]]
    assert hung.write(client.move, KEYS[:1], SIZES[:1]) == [TRANSFER_FAIL]  # writes learn apart


def test_after_a_while_one_object_is_tried_and_the_others_if_it_came(client):
    hung = HungOwners(client.owners_of)
    client.hanging = {"A"}
    hung.read(client.move, KEYS, SIZES)
    time.sleep(HOLD_S)
    client.calls.clear()
    assert hung.read(client.move, KEYS, SIZES) == WITHOUT_A
    assert client.calls == [["a0"], ["b0", "b1"]]
    assert hung.read(client.move, ["a1"], [3]) == [TRANSFER_FAIL]  # held again
    client.hanging = set()
    time.sleep(HOLD_S)
    client.calls.clear()
    assert hung.read(client.move, KEYS, SIZES) == SIZES
    assert client.calls == [["a0"], KEYS[1:]]
    client.asked.clear()
    assert hung.read(client.move, KEYS, SIZES) == SIZES
    assert client.asked == []


def test_a_failure_that_came_at_once_holds_nobody(client):
    hung = HungOwners(client.owners_of)
    failing = [TRANSFER_FAIL] * len(KEYS)
    assert hung.read(lambda *_: failing, KEYS, SIZES) == failing
    assert hung.write(lambda *_: failing, KEYS, SIZES) == failing
    assert hung.read(client.move, KEYS, SIZES) == SIZES
    assert hung.write(client.move, KEYS, SIZES) == SIZES


def test_a_master_that_cannot_say_whose_objects_hang_changes_no_answer(client):
    hung = HungOwners(client.owners_of)
    client.hanging, client.is_master_away = {"A"}, True
    assert hung.read(client.move, KEYS, SIZES) == WITHOUT_A


def test_writes_wait_once_for_an_owner_that_nobody_knows(client):
    hung = HungOwners(client.owners_of)
    client.hanging = {"A"}
    assert hung.write(client.move, KEYS, SIZES) == WITHOUT_A
    assert hung.write(client.move, ["b0"], [2]) == [TRANSFER_FAIL]
    assert client.calls == [KEYS]
    time.sleep(HOLD_S)
    assert hung.write(client.move, KEYS, SIZES) == [TRANSFER_FAIL] * len(KEYS)
    assert client.calls == [KEYS, ["a0"]]
    time.sleep(HOLD_S)
    assert hung.write(client.move, KEYS[1:2] + KEYS[3:4], [2, 4]) == [2, 4]  # by one first
    assert client.calls[2:] == [["b0"], ["b1"]]
    client.hanging = set()
    assert hung.write(client.move, KEYS, SIZES) == SIZES
    assert client.calls[4:] == [KEYS]
    assert client.asked == []
