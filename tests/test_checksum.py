"""Checksums: kernels, reference and plain Python agree, and corruption shows."""

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.kernels.checksum import ObjectSums, checksums_reference
from kvferry.kernels.device import PACK
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.testing import make_tensors, object_bytes_of, write_telling

NARROW = LaunchConfig(tile_bytes=1024, units_per_program=32, page_run_bytes=64)
NUM_CORRUPTIONS = 10_000


def by_hand(payload: bytes) -> int:
    """The definition, in plain Python: a signed 64-bit number."""
    return signed(sum(term(payload, pair) for pair in range(-(-len(payload) // 8))))


def term(payload: bytes, pair: int) -> int:
    """What one pair of words adds; bytes behind the payload's end are zeros."""
    words = [int.from_bytes(payload[8 * pair :][4 * i :][:4][:4], "little") for i in range(2)]
    places = pair * 0x9E3779B1 % 2**32, (pair * 0x85EBCA6A + 0xC2B2AE35) % 2**32
    upper = places[0] * places[1] >> 32
    low, high = (
        (word ^ place ^ upper) * 0x9E3779B1 % 2**32
        for word, place in zip(words, places, strict=True)
    )
    product = (low * high + low + (high << 32)) % 2**64
    return product ^ (product >> 32)


def of_layer(payload: bytes, start: int) -> int:
    """The checksum of a layer that begins at a byte of an object: of the pairs that it touches."""
    shifted = bytes(start % 8) + payload
    first = start // 8
    pairs = range(first, first - (-len(shifted) // 8)) if payload else ()
    return signed(sum(term(bytes(8 * first) + shifted, pair) for pair in pairs))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 17))
def test_the_reference_is_the_definition(payload: bytes, position: int) -> None:
    objects = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sums = checksums_reference(objects, 1, len(payload), len(payload), position=position)
    assert int(sums[0]) == of_layer(payload, position)


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("object_bytes", [1, 15, 16, 105, 210, 4096, 4100, 40_000])
def test_sums_of_objects(object_bytes: int, backend: str, device: torch.device) -> None:
    stride = object_bytes + 19
    memory = torch.randint(0, 256, (3 * stride + 1,), dtype=torch.uint8)
    cut = object_bytes // 3  # two layers of bytes around one without
    offsets = [0, cut, cut, object_bytes]
    wanted = [
        [
            of_layer(memory[1 + i * stride :][start:end].numpy().tobytes(), start)
            for start, end in itertools.pairwise(offsets)
        ]
        for i in range(3)
    ]
    starts = torch.tensor([[5, 0, 0], [0, 0, 0], [0, 0, -7]])
    sums = starts.to(device, copy=True)
    config = NARROW if object_bytes < 1000 else LaunchConfig()
    checker = ObjectSums(offsets, device, config)
    checker.add(memory.to(device)[1:], 3, stride, sums, backend=backend)
    assert (sums.cpu() - starts).tolist() == wanted
    assert sums[:, 1].tolist() == [0, 0, 0]


def signed(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


LAYOUT = {
    "page_size": 4,
    "num_layers": 3,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [4, 72], "dtype": "bfloat16",
         "layers": [0, 1, 2]},
        {"name": "scale", "index": "full", "rows": "token", "row_shape": [3], "dtype": "uint8",
         "layers": [0, 2]},
        {"name": "tiny", "index": "full", "rows": "token", "row_shape": [1], "dtype": "int16",
         "layers": [1]},
    ],
}  # fmt: skip


# Every layer's bytes go by the wide path, which the odd lengths above keep to the first layer.
ALIGNED = {
    "page_size": 4,
    "num_layers": 3,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [4, 160],
         "dtype": "bfloat16", "layers": [0, 1, 2]},
    ],
}  # fmt: skip


# Rows by 8, 4, 2 and 1 bytes beside one another in a layer; layers begin at 0, 309 and 342.
NARROW_POOLS = {
    "page_size": 3,
    "num_layers": 3,
    "pools": [
        {"name": "wide", "index": "full", "rows": "token", "row_shape": [20], "dtype": "float32",
         "layers": [0, 2]},
        {"name": "scale", "index": "full", "rows": "token", "row_shape": [3], "dtype": "int32",
         "layers": [0, 2]},
        {"name": "odd", "index": "full", "rows": "token", "row_shape": [11], "dtype": "uint8",
         "layers": [0, 1, 2]},
        {"name": "half", "index": "full", "rows": "token", "row_shape": [4], "dtype": "int16",
         "layers": [2]},
    ],
}  # fmt: skip


@pytest.mark.interpreter
def test_ids_outside_the_pools_add_nothing_by_narrow_units_either(device: torch.device) -> None:
    plain = CacheLayout.from_description(NARROW_POOLS)
    layout = plain.bind(make_tensors(plain, 4, device))
    packer = Packer(layout, "full")
    size = layout.object_bytes["full"]
    objects = torch.full((3 * size,), 7, dtype=torch.uint8, device=device)
    sums = torch.zeros(3, 3, dtype=torch.int64, device=device)
    ids = PageIds(torch.tensor([2, 4, -1], device=device), unique=True)
    move = packer.describe(PACK, ids, objects.data_ptr(), size, ((0, 3),), sums=sums)
    for launch in packer.launches(move):
        launch.start(device)
    assert sums[0, 0] != 0
    assert sums[1:].count_nonzero() == 0
    assert bool((objects[size:] == 7).all())


@pytest.mark.parametrize(
    "description", [LAYOUT, ALIGNED, NARROW_POOLS], ids=["odd", "aligned", "narrow"]
)
@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("splits", [[None], [[0], [1, 2]], [[1], [0, 2]]])
@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(),
        NARROW,
        LaunchConfig(units_per_program=8192),
        LaunchConfig(tile_bytes=1024, units_per_program=32, page_run_bytes=64, max_programs=3),
    ],
)
def test_pack_and_unpack_sum_what_they_move(
    backend: str,
    splits: list[list[int] | None],
    config: LaunchConfig,
    description: dict[str, Any],
    device: torch.device,
) -> None:
    plain = CacheLayout.from_description(description)
    layout = plain.bind(make_tensors(plain, 12, device))
    pages = [5, 0, 3, 9, 7]
    write_telling(layout, "full", pages, pages)
    packer = Packer(layout, "full", config)
    stride = -(-layout.object_bytes["full"] // 16) * 16
    offsets = layout.layer_offsets["full"]
    wanted = [
        [
            of_layer(row[start:end].cpu().numpy().tobytes(), start)
            for start, end in itertools.pairwise(offsets)
        ]
        for row in object_bytes_of(layout, "full", pages)
    ]
    objects = torch.zeros(5 * stride, dtype=torch.uint8, device=device)
    for move in (packer.pack, packer.unpack):
        sums = torch.zeros(5, layout.num_layers, dtype=torch.int64, device=device)
        for layers in splits:
            move(pages, objects, stride_bytes=stride, layers=layers, sums=sums, backend=backend)
        assert sums.tolist() == wanted


def corrupted(payload: bytes, rng: random.Random) -> bytes:
    """A payload with one bit, byte pair or word pair changed, or a stretch of words shifted."""
    kind = rng.choice(["bit", "bytes", "words", "shift"])
    changed = bytearray(payload)
    if kind == "bit":
        place = rng.randrange(len(changed))
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        one, other = rng.sample(range(len(changed)), 2)
        changed[one], changed[other] = changed[other], changed[one]
    elif kind == "words":
        one, other = (4 * place for place in rng.sample(range(len(changed) // 4), 2))
        changed[one : one + 4], changed[other : other + 4] = (
            changed[other : other + 4], changed[one : one + 4],
        )  # fmt: skip
    else:
        first, last = sorted(4 * place for place in rng.sample(range(len(changed) // 4), 2))
        changed[first:last] = changed[first + 4 : last] + changed[first : first + 4]
    return bytes(changed)


def test_ten_thousand_corruptions_all_show() -> None:
    rng = random.Random(1)
    plain = CacheLayout.from_description(LAYOUT)
    layout = plain.bind(make_tensors(plain, 4))
    payloads = [row.numpy().tobytes() for row in object_bytes_of(layout, "full", list(range(8)))]
    # Real caches have long stretches of equal words: half of the objects are mostly zeros.
    payloads += [bytes(len(p) - 64) + p[:64] for p in payloads]
    wrong = right = 0
    while wrong < NUM_CORRUPTIONS:
        batch = []
        for _ in range(250):
            number = rng.randrange(len(payloads))
            changed = corrupted(payloads[number], rng)
            if changed != payloads[number]:
                batch.append((number, changed))
        size = len(payloads[0])
        memory = torch.frombuffer(bytearray(b"".join(c for _, c in batch)), dtype=torch.uint8)
        sums = checksums_reference(memory, len(batch), size, size).tolist()
        for (number, _), total in zip(batch, sums, strict=True):
            wrong += 1
            right += total != by_hand_once(payloads, number)
    assert right == wrong


_known: dict[int, int] = {}


def by_hand_once(payloads: list[bytes], number: int) -> int:
    if number not in _known:
        _known[number] = by_hand(payloads[number])
    return _known[number]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    plain = CacheLayout.from_description(LAYOUT)
    layout = plain.bind(make_tensors(plain, 4, device))
    packer = Packer(layout, "full")
    objects = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    for sums, words in (
        (torch.zeros(2, 3, dtype=torch.int32), "torch.int32"),
        (torch.zeros(2, dtype=torch.int64), "wanted contiguous int64"),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), "sums are on meta"),
    ):
        with pytest.raises(ArgumentError, match=words):
            packer.pack([0, 1], objects, sums=sums)
    with pytest.raises(ArgumentError, match="objects have 10 bytes, wanted at least 16"):
        ObjectSums([0, 8], device).add(objects[:10], 2, 8, torch.zeros(2, 1, dtype=torch.int64))
