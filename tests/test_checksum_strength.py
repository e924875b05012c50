"""What the checksum sees: exchanged, moved, repeated and lost bytes, in data of few values."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvferry.kernels.checksum import checksums_reference

NUM_EXCHANGES = 20_000
BATCH = 2_500
PIECE_BYTES = 4096
POSITIONS = (0, 4096, 37_888, 1 << 20, 77_777_776, 1 << 29, (1 << 31) - 8192, 656 * 64)
Bytes = NDArray[np.uint8]


def bf16(values: NDArray[np.float64]) -> Bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def mostly_zero(rng: np.random.Generator) -> Bytes:
    """bf16 with 2 % of ones and 3 % of negative zeros."""
    drawn = rng.random(PIECE_BYTES // 2)
    return bf16(np.where(drawn < 0.02, 1.0, np.where(drawn < 0.05, -0.0, 0.0)))


def of_few(values: list[int], dtype: type) -> Callable[[np.random.Generator], Bytes]:
    def make(rng: np.random.Generator) -> Bytes:
        size = PIECE_BYTES // np.dtype(dtype).itemsize
        return rng.choice(np.array(values, dtype=dtype), size).view(np.uint8)

    return make


DATA: dict[str, Callable[[np.random.Generator], Bytes]] = {
    "normal bf16": lambda rng: bf16(rng.standard_normal(PIECE_BYTES // 2)),
    "ue8m0 scales of four exponents": of_few([120, 121, 122, 123], np.uint8),
    "e4m3 scales of 0.20 to 0.22": of_few([0x25, 0x26], np.uint8),
    "bf16, mostly zero": mostly_zero,
    "int8 of few values": of_few([-1, 0, 1], np.int8),
    "signs of bf16 zeros": of_few([0, 0x8000], np.uint16),
    "signs of 32-bit zeros": of_few([0, 1 << 31], np.uint32),
    "signs of 64-bit zeros": of_few([0, 1 << 63], np.uint64),
    "one bit in some bytes": of_few([0, 0, 0, 0, *(1 << bit for bit in range(8))], np.uint8),
}


def sums_of(pieces: Bytes, position: int) -> NDArray[np.uint64]:
    flat = torch.from_numpy(np.ascontiguousarray(pieces).reshape(-1))
    num_bytes = pieces.shape[1]
    found = checksums_reference(flat, len(pieces), num_bytes, num_bytes, position=position)
    return found.numpy().view(np.uint64)


def exchanged(data: Bytes, block: int, rng: np.random.Generator) -> Bytes:
    """Copies of a piece, in each of which two blocks have changed places."""
    one, other = (
        rng.integers(0, PIECE_BYTES // block, BATCH)[:, None] * block + np.arange(block)
        for _ in range(2)
    )
    pieces = np.repeat(data[None], BATCH, axis=0)
    rows = np.arange(BATCH)[:, None]
    pieces[rows, one], pieces[rows, other] = data[other], data[one]
    return pieces


@pytest.mark.parametrize("name", DATA)
def test_no_exchange_of_blocks_goes_unseen(name: str) -> None:
    rng = np.random.default_rng(13)
    num_changed, windows = 0, np.zeros(4, dtype=np.int64)
    for block in (1, 2, 4, 8, 16, 32, 256):
        num_seen = 0
        for position in itertools.cycle(POSITIONS):
            data = DATA[name](rng)
            pieces = exchanged(data, block, rng)
            changed = (pieces != data).any(axis=1)
            delta = sums_of(pieces[changed], position) - sums_of(data[None], position)
            assert np.count_nonzero(delta == 0) == 0, f"{name}, blocks of {block}"
            num_seen += len(delta)
            for place in range(4):
                windows[place] += np.count_nonzero(delta >> np.uint64(16 * place) & 0xFFFF == 0)
            if num_seen >= NUM_EXCHANGES:
                break
        num_changed += num_seen
    # Any 16 bits of the sum see as much as 16 random bits would: no part of it is a weak one.
    assert (windows < 8 + 3 * num_changed / 65536).all(), windows


def test_a_moved_bit_is_seen_wherever_it_comes_from() -> None:
    # In words of any width: all places of one set bit among zeros have sums of their own.
    bits = np.arange(8 * PIECE_BYTES)
    for position in (0, 1 << 30):
        sums = []
        for few in np.split(bits, 8):
            pieces = np.zeros((len(few), PIECE_BYTES), dtype=np.uint8)
            pieces[np.arange(len(few)), few // 8] = 1 << (few % 8)
            sums.append(sums_of(pieces, position))
        every = np.concatenate([*sums, sums_of(np.zeros((1, PIECE_BYTES), np.uint8), position)])
        assert len(np.unique(every)) == len(bits) + 1


def test_every_change_within_a_word_is_seen() -> None:
    rng = np.random.default_rng(5)
    for name, position in itertools.product(DATA, POSITIONS):
        data = DATA[name](rng)
        pieces = np.repeat(data[None], BATCH, axis=0).view(np.uint32)
        rows, words = np.arange(BATCH), rng.integers(0, PIECE_BYTES // 4, BATCH)
        flips = rng.integers(1, 1 << 32, BATCH, dtype=np.uint32)
        flips[: BATCH // 2] = 1 << rng.integers(0, 32, BATCH // 2).astype(np.uint32)
        pieces[rows, words] ^= flips
        assert (sums_of(pieces.view(np.uint8), position) != sums_of(data[None], position)).all()


def variants_of(data: Bytes, rng: np.random.Generator) -> dict[str, list[Bytes]]:
    """What comes of a piece by ways in which memory goes wrong."""
    steps = (1, 2, 4, 8, 16, 32, 64, 128, 256, 656, 1024, 2048)
    halves = [(start, size) for size in (4, 16, 64, 256, 1024) for start in range(0, 2048, size)]

    def filled(start: int, size: int, value: int) -> Bytes:
        copy = data.copy()
        copy[start : start + size] = value
        return copy

    def repeated(start: int, size: int) -> Bytes:
        copy = data.copy()
        copy[start + size : start + 2 * size] = data[start : start + size]
        return copy

    def shifted(start: int, size: int, step: int) -> Bytes:
        copy = data.copy()
        copy[start : start + size] = np.roll(data[start : start + size], step)
        return copy

    def permuted(size: int, order: tuple[int, ...]) -> Bytes:
        start = 4 * size * int(rng.integers(0, PIECE_BYTES // (4 * size)))
        copy = data.copy()
        copy[start : start + 4 * size].reshape(4, size)[:] = data[start : start + 4 * size].reshape(
            4, size
        )[list(order)]
        return copy

    def three_words(start: int, pitch: int) -> Bytes:
        copy = data.copy()
        words = copy.view(np.uint32)
        words[start : start + 3 * pitch : pitch] += np.array([1, 2**32 - 2, 1], dtype=np.uint32)
        return copy

    return {
        "rotations": [np.roll(data, step * way) for step in steps for way in (1, -1)],
        "shifts": [shifted(start, size, way * min(step, size // 2))
                   for start, size in halves if size >= 16
                   for step in (1, 4, 8) for way in (1, -1)],
        "repeats": [repeated(start, size) for start, size in halves],
        "fills": [filled(start, size, value) for start, size in halves for value in (0, 255)],
        "+1 -2 +1": [three_words(start, pitch) for start in range(900) for pitch in (1, 2, 4, 32)],
        "permutations": [permuted(size, order) for size in (1, 2, 4, 8, 16, 64)
                         for order in itertools.permutations(range(4)) for _ in range(20)],
    }  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_what_goes_wrong_with_memory_is_seen(name: str) -> None:
    rng = np.random.default_rng(7)
    data = DATA[name](rng)
    for kind, pieces in variants_of(data, rng).items():
        changed = np.stack(pieces)
        changed = changed[(changed != data).any(axis=1)]
        for position in POSITIONS[:4]:
            sums = sums_of(changed, position)
            assert (sums != sums_of(data[None], position)).all(), f"{kind} of {name}"
