"""One share of the check's matrix: moves so chosen that every variant of the move kernels runs.

`python gpu_matrix.py NUMBER COUNT DEVICE` does cases NUMBER, NUMBER + COUNT and so on, and prints
what was wrong and which variants ran. Several processes at once, since compiling takes the time.
"""

import itertools
import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_moves import Way, guarded, guarded_layout, round_trip

from kvferry.kernels.checksum import ObjectSums, layer_sums_reference
from kvferry.kernels.device import PACK, UNPACK, WHOLE
from kvferry.kernels.handles import Launch
from kvferry.kernels.pack import TAILS, Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import CACHE_HINTS, DEFAULT_LAUNCH, LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.testing import telling_bytes

WIDTHS = (16, 8, 4, 2, 1)
FEW, MANY = 200, 36
"""Units of a page: from 128 on few pages share a program, and those are summed one by one."""

POOL_PAGES = 7
PAGE_TOKENS = 4
PERSISTENT = replace(DEFAULT_LAUNCH, max_programs=1)


@dataclass(frozen=True)
class Case:
    """One round trip of the matrix, or one reading of checksums if `way` is None.

    Attributes:
        width: of an access, 0 for the page kernel.
        units: of a page, for the short-run kernel.
        config: of the launches.
        way: how.
    """

    width: int
    units: int
    config: LaunchConfig
    way: Way | None

    @property
    def name(self) -> str:
        """The case in words."""
        path = f"units of {self.width}, {self.units} a page" if self.width else "tiles"
        return f"{path}, {self.config.max_programs} programs, cache {self.config.cache}, {self.way}"


def cases(on_gpu: bool) -> Iterator[Case]:
    """Yield the matrix: path x budget x width of ids x checksums x tail, and cache hints.

    Hints other than none with the 32-bit ids that transfers have on a GPU. The interpreter takes
    no hint, so on a CPU they come with whole pages alone.
    """
    paths = [(0, 0), *itertools.product(WIDTHS, (MANY, FEW))]
    every = itertools.product(
        CACHE_HINTS, paths, (DEFAULT_LAUNCH, PERSISTENT), (4, 8), (False, True),
        ("", "zero", "keep"),
    )  # fmt: skip
    for hint, (width, units), config, id_bytes, with_sums, tail in every:
        if units == FEW and not with_sums:
            continue  # the same variant as with many
        if hint != "none" and (id_bytes == 8 or (not on_gpu and tail)):
            continue
        way = Way(3, id_bytes, with_sums=with_sums, tail=tail, stride_slack_bytes=16)
        yield Case(width, units, replace(config, cache=hint), way)
    for (width, units), config in itertools.product(paths, (DEFAULT_LAUNCH, PERSISTENT)):
        yield Case(width, units, config, None)


def case_count(on_gpu: bool) -> int:
    """Return how many cases the matrix has."""
    return sum(1 for _ in cases(on_gpu))


def run_case(case: Case, device: torch.device) -> int:
    """Run one case; return how many moves it was.

    Raises:
        AssertionError: something is wrong.
    """
    if case.way is None:
        _sum_objects(case, device)
        return 1
    layout, wholes = _layout(case, device)
    round_trip(layout, "full", case.config, case.way, wholes)
    return 2


def planned(case: Case) -> set[str]:
    """Return the variants by which a case moves pages, without moving any."""
    assert case.way is not None
    layout, _ = _layout(case, torch.device("cpu"))
    packer = Packer(layout, "full", case.config)
    dtype = torch.int32 if case.way.id_bytes == 4 else torch.int64
    ids = PageIds(torch.arange(case.way.num_pages, dtype=dtype), unique=True)
    sums = torch.zeros(1) if case.way.with_sums else None
    stride = layout.object_bytes["full"] + case.way.stride_slack_bytes
    tail = TAILS[case.way.tail] if case.way.tail else WHOLE
    return {
        _key(launch.kernel, launch.constants)
        for kind, end in ((PACK, WHOLE), (UNPACK, tail))
        for launch in packer.launches(
            packer.describe(kind, ids, 1 << 20, stride, ((0, 3),), 0, sums, end, 2)
        )
    }


def _layout(case: Case, device: torch.device) -> tuple[CacheLayout, list[torch.Tensor]]:
    """Return guarded pools whose pages take the case's path."""
    # Rows of uint8: so the pool's memory can be as far from a multiple of 16 as the width asks.
    row_bytes = case.units * case.width // PAGE_TOKENS if case.width else 5136
    plain = CacheLayout.from_description({
        "page_size": PAGE_TOKENS, "num_layers": 3,
        "pools": [{"name": "k", "index": "full", "rows": "token", "row_shape": [row_bytes],
                   "dtype": "uint8", "layers": [0, 2]}],
    })  # fmt: skip
    return guarded_layout(plain, POOL_PAGES, device, case.width % 16)


def _sum_objects(case: Case, device: torch.device) -> None:
    """Read objects for their checksums alone."""
    layer_bytes = -(-case.units * case.width // 16) * 16 if case.width else 20544
    offsets, count = (0, layer_bytes, layer_bytes, 2 * layer_bytes), 3
    objects, _ = guarded(count * offsets[-1], device, case.width % 16)
    tags = torch.arange(count, device=device)
    objects.view(count, -1).copy_(telling_bytes(1, tags, offsets[-1]))
    sums = torch.zeros(count, 3, dtype=torch.int64, device=device)
    ObjectSums(offsets, device, case.config).add(
        objects, count, offsets[-1], sums, backend="triton"
    )
    wanted = torch.zeros(count, 3, dtype=torch.int64)
    layer_sums_reference(objects.cpu(), count, offsets, ((0, 3),), offsets[-1], 0, wanted)
    assert torch.equal(sums.cpu(), wanted), f"checksums are {sums.tolist()}, not {wanted.tolist()}"


def wanted_variants(on_gpu: bool) -> set[str]:
    """Return what must have run: all variants that `make inspect` knows of, by their constants."""
    from kvferry.tuning.compiled import pair_variants, variants

    wanted = {_key(each.kernel, tuple(each.constants.values())) for each in pair_variants()}
    for hint in CACHE_HINTS:
        for variant in variants(replace(DEFAULT_LAUNCH, cache=hint)):
            constants = variant.constants
            if hint != "none" and (
                constants["ID_BYTES"] == 8 or (not on_gpu and constants["TAIL"])
            ):
                continue
            wanted.add(_key(variant.kernel, tuple(constants.values())))
    return wanted


def _key(kernel: Any, constants: tuple[Any, ...]) -> str:
    # `True` and 1 are the same constant.
    return f"{kernel.fn.__name__} {[int(constant) for constant in constants]}"


def run_cases(chosen: Iterable[Case], device: torch.device) -> dict[str, Any]:
    """Run cases; return failures, the variants that ran, and how many moves it was."""
    seen: set[str] = set()
    start = Launch.start

    def noted(launch: Launch, device: torch.device) -> None:
        seen.add(_key(launch.kernel, launch.constants))
        start(launch, device)

    Launch.start = noted  # type: ignore[method-assign, assignment]
    failures, moves = [], 0
    try:
        for case in chosen:
            print(case.name, file=sys.stderr, flush=True)
            try:
                moves += run_case(case, device)
            except AssertionError as error:
                traceback.print_exc()
                failures.append(f"{case.name}: {error}")
    finally:
        Launch.start = start  # type: ignore[method-assign]
    return {"failures": failures, "seen": sorted(seen), "moves": moves}


def main(arguments: list[str]) -> int:
    """`gpu_matrix.py NUMBER COUNT DEVICE`."""
    number, count, device = int(arguments[0]), int(arguments[1]), torch.device(arguments[2])
    share = itertools.islice(cases(device.type == "cuda"), number, None, count)
    print(json.dumps(run_cases(share, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
