"""What is stored is what was packed, or the load fails: trailers, and objects tampered with."""

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import TransferFailed
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.eviction import evict
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome
from kvferry.models import description
from kvferry.testing import check_poison, check_telling, make_tensors, poison, write_telling
from kvferry.trailer import TRAILER_BYTES, find_faults, make_ends, stored_bytes

_names = itertools.count()
NO_SUMS = np.zeros((1, 2), dtype=np.int64)


def test_an_end_has_fixed_places() -> None:
    ends = make_ends("00112233445566778899aabbccddeeff", 210, ["k"], np.array([[7, -2, 1]]))
    assert stored_bytes(210, 3) == 224 + 32 + 64
    assert ends.shape == (1, 14 + 32 + 64)
    raw = ends[0].tobytes()
    assert raw[:14] == bytes(14)
    assert struct.unpack_from("<qqqq", raw, 14) == (7, -2, 1, 0)
    magic, version, length, size = struct.unpack_from("<8sIIQ", raw, 46)
    assert (magic, version, length, size) == (b"KVFERRY\0", 2, 64, 210)
    assert raw[46 + 24 : 46 + 40].hex() == "00112233445566778899aabbccddeeff"
    assert struct.unpack_from("<Q", raw, 46 + 56)[0] == 6


@pytest.mark.parametrize("byte", range(14 + 16 + 64))
def test_no_byte_of_the_end_can_change_unseen(byte: int) -> None:
    fingerprint = "00" * 16
    ends = make_ends(fingerprint, 210, ["k"], NO_SUMS)
    assert find_faults(ends, fingerprint, 210, ["k"], NO_SUMS) == {}
    ends[0, byte] ^= 0x10
    assert list(find_faults(ends, fingerprint, 210, ["k"], NO_SUMS)) == ["k"]


def test_each_fault_has_its_own_reason() -> None:
    def reason(**changes: Any) -> str:
        made = {"fingerprint": "ab" * 16, "object_bytes": 64, "keys": ["k"], "checksums": NO_SUMS}
        ends = make_ends(**{**made, **changes})
        return find_faults(ends, "ab" * 16, 64, ["k"], NO_SUMS).get("k", "")

    assert reason() == ""
    assert "fingerprint cdcd" in reason(fingerprint="cd" * 16)
    assert reason(keys=["other"]) == "foreign: the object of another key"
    assert reason(checksums=np.array([[0, 5]])) == "corrupted: checksums of layers [1] differ"
    ends = make_ends("ab" * 16, 64, ["k"], NO_SUMS)
    ends[0, 16 + 8] = 0
    (older,) = find_faults(ends, "ab" * 16, 64, ["k"], NO_SUMS).values()
    assert older == "other format: format version 0, wanted 2"
    ends[:] = 0
    (foreign,) = find_faults(ends, "ab" * 16, 64, ["k"], NO_SUMS).values()
    assert foreign.startswith("foreign: no kvferry object")


class Bed:
    """A linker over a real store, and a way to rewrite what is stored."""

    def __init__(self, store: MooncakeStore, device: torch.device, model: str) -> None:
        plain = CacheLayout.from_description(
            description(model), identity=ModelIdentity(f"integrity-{next(_names)}")
        )
        self.layout = plain.bind(make_tensors(plain, 8, device))
        self.store = store
        self.linkers: list[Linker] = []
        self.scratch = StagingBuffer(8 << 20, device=torch.device("cpu"))
        self.scratch.register(store)

    def linker(self, **settings: Any) -> Linker:
        assert self.layout.device is not None
        memory = "cpu" if self.layout.device.type == "cpu" else "pinned"
        staging = StagingBuffer(8 << 20, device=self.layout.device, memory=memory)
        config = LinkerConfig(lookup_ttl_s=0.0, miss_ttl_s=0.0, **settings)
        self.linkers.append(Linker(self.layout, self.store, staging, config))
        return self.linkers[-1]

    def rewrite(self, key: str, change: Callable[[bytearray], bytearray | None]) -> None:
        """Replace a stored object by what `change` makes of its bytes."""
        size = stored_bytes(self.layout.object_bytes["full"], self.layout.num_layers)
        address = self.scratch.address
        (got,) = self.store.get([key], [address], [size])
        assert got.outcome is Outcome.FETCHED
        data = bytearray(self.scratch.tensor[:size].numpy().tobytes())
        data = change(data) or data
        evict(self.store, [key])
        self.scratch.tensor[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        (put,) = self.store.put([key], [address], [len(data)])
        assert put.outcome is Outcome.STORED


@pytest.fixture
def make_bed(mooncake_store: MooncakeStore, device: torch.device) -> Iterator[Callable[..., Bed]]:
    beds: list[Bed] = []

    def make(model: str = "odd-bytes") -> Bed:
        beds.append(Bed(mooncake_store, device, model))
        return beds[-1]

    yield make
    for bed in beds:
        for linker in bed.linkers:
            linker.close(20)
        bed.scratch.unregister()


def flip(place: int) -> Callable[[bytearray], bytearray | None]:
    def change(data: bytearray) -> None:
        data[place] ^= 0x40

    return change


def add_to_words(first: int, *numbers: int) -> Callable[[bytearray], bytearray | None]:
    """Change words in a way that a sum of words, each times its odd place, does not see."""

    def change(data: bytearray) -> None:
        words = range(first, first + len(numbers))
        for word, number in zip(words, numbers, strict=True):
            (old,) = struct.unpack_from("<I", data, 4 * word)
            assert 0 <= old + number < 2**32
            struct.pack_into("<I", data, 4 * word, old + number)
        assert sum(n * (2 * word + 1) for n, word in zip(numbers, words, strict=True)) == 0

    return change


def of_version_1(data: bytearray) -> None:
    """Make of an object what the first format made of its payload."""
    num_layers, sums, total = 2, 224, 0
    for layer_id, start in enumerate((0, 105)):
        payload = bytes(start) + bytes(data[start : start + 105])
        words = (payload[at : at + 4] for at in range(0, len(payload), 4))
        sum_1 = sum(int.from_bytes(word, "little") * (2 * i + 1) for i, word in enumerate(words))
        struct.pack_into("<Q", data, sums + 8 * layer_id, sum_1 % 2**64)
        total += sum_1
    struct.pack_into("<I", data, len(data) - TRAILER_BYTES + 8, 1)
    struct.pack_into("<Q", data, len(data) - 8, total % 2**64)
    assert sums + 8 * num_layers + TRAILER_BYTES == len(data)


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip(0), "corrupted: checksums of layers [0]"),
        (flip(209), "corrupted: checksums of layers [1]"),
        (flip(215), "corrupted: the checksums do not add up"),
        (flip(224), "corrupted: checksums of layers [0]"),
        (flip(-TRAILER_BYTES), "foreign: no kvferry object"),
        (flip(-TRAILER_BYTES + 8), "other format: format version 66, wanted 2"),
        (add_to_words(0, 1, -2, 1), "corrupted: checksums of layers [0]"),
        (add_to_words(1, 1, -1, -1, 1), "corrupted: checksums of layers [0]"),
        (of_version_1, "other format: format version 1, wanted 2"),
        (flip(-TRAILER_BYTES + 24), "foreign: fingerprint"),
        (flip(-TRAILER_BYTES + 40), "foreign: the object of another key"),
        (flip(-1), "corrupted: the checksums do not add up"),
        (lambda data: data[:-TRAILER_BYTES], "wrong size"),
        (lambda data: data[:210], "wrong size"),
        (lambda data: data + bytes(16), "wrong size"),
        (lambda data: bytearray(len(data)), "foreign: no kvferry object"),
    ],
)
def test_a_tampered_object_fails_the_load_and_reaches_no_pool(
    make_bed: Callable[..., Bed], change: Callable[[bytearray], bytearray | None], reason: str
) -> None:
    bed = make_bed()
    linker = bed.linker()
    write_telling(bed.layout, "full", [0, 1, 2], [0, 1, 2])
    linker.save(["a", "b", "c"], [0, 1, 2]).result()
    victim = linker.keys.object_keys(["b"], "full")[0]
    bed.rewrite(victim, change)
    poison(bed.layout)
    with pytest.raises(TransferFailed, match="1 of 3 objects") as caught:
        linker.load(["a", "b", "c"], [5, 6, 7]).result()
    assert caught.value.causes[victim].startswith(reason)
    check_poison(bed.layout, "full", [])
    linker.load(["a", "c"], [5, 7]).result()
    check_telling(bed.layout, "full", [5, 7], [0, 2])


@pytest.mark.mooncake
def test_objects_under_each_others_keys_are_refused(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    linker = bed.linker()
    write_telling(bed.layout, "full", [0, 1], [0, 1])
    linker.save(["a", "b"], [0, 1]).result()
    keys = linker.keys.object_keys(["a", "b"], "full")
    data: list[bytearray] = []
    for key in keys:
        bed.rewrite(key, data.append)
    for key, other in zip(keys, reversed(data), strict=True):
        bed.rewrite(key, lambda _, other=other: other)
    poison(bed.layout)
    with pytest.raises(TransferFailed) as caught:
        linker.load(["a", "b"], [5, 6]).result()
    assert caught.value.causes == dict.fromkeys(keys, "foreign: the object of another key")
    check_poison(bed.layout, "full", [])


@pytest.mark.mooncake
def test_without_integrity_there_is_no_trailer(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed()
    linker = bed.linker(integrity=False, namespace="plain")
    write_telling(bed.layout, "full", [0, 1], [0, 1])
    saved = linker.save(["a", "b"], [0, 1]).result()
    assert saved.timings.seal_us == 0
    (key,) = linker.keys.object_keys(["a"], "full")
    (result,) = bed.store.get([key], [bed.scratch.address], [210])
    assert result.outcome is Outcome.FETCHED
    linker.load(["a", "b"], [5, 6]).result()
    check_telling(bed.layout, "full", [5, 6], [0, 1])


@pytest.mark.mooncake
@pytest.mark.parametrize("layerwise", [False, True])
def test_with_and_without_trailers_nothing_is_shared(
    make_bed: Callable[..., Bed], layerwise: bool
) -> None:
    """Neither finds what the other stored: what one looks up it can load."""
    bed = make_bed()
    write_telling(bed.layout, "full", [0, 1], [0, 1])
    linkers = [bed.linker(integrity=on, namespace=f"both-{layerwise}") for on in (True, False)]
    for writer, reader in (linkers, linkers[::-1]):
        name = f"of-{writer.config.integrity}"
        save = writer.save([name], [0], layerwise=layerwise)
        if isinstance(save, LayerSave):
            save.all_written()
        assert save.result().num_objects == 1
        assert writer.lookup([name]) == [1]
        assert reader.lookup([name]) == []
        with pytest.raises(TransferFailed) as caught:
            reader.load([name], [7]).result()
        assert caught.value.cause == "missing"
        assert reader.save([name], [0]).result().num_existing == 0


@pytest.mark.mooncake
@pytest.mark.parametrize("tail", ["zero", "keep"])
def test_a_load_may_want_some_tokens_of_the_last_page(
    make_bed: Callable[..., Bed], tail: str
) -> None:
    bed = make_bed()
    linker = bed.linker()
    write_telling(bed.layout, "full", [0, 1], [0, 1])
    linker.save(["a", "b"], [0, 1]).result()
    poison(bed.layout)
    linker.load(["a", "b"], [5, 6], tail_tokens=2, tail=tail).result()
    check_telling(bed.layout, "full", [5], [0])
    for buffer in bed.layout.buffers["full"]:
        assert buffer.tensor is not None
        page = buffer.tensor.cpu().view(8, 3, 35)[6]
        first = page[:2].clone()
        assert bool((page[2] == (0 if tail == "zero" else 0xA5)).all())
        write_telling(bed.layout, "full", [6], [1])
        assert torch.equal(first, buffer.tensor.cpu().view(8, 3, 35)[6, :2])
        poison(bed.layout)
        linker.load(["a", "b"], [5, 6], tail_tokens=2, tail=tail).result()
    check_poison(bed.layout, "full", [5, 6])
