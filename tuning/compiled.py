"""Kernels compiled for GPUs that aren't here: what was generated, read without running it."""

import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.device import KEEP_TAIL, PACK, SUM_ONLY, UNPACK, WHOLE, ZERO_TAIL
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.kernels.units import _move_units_kernel
from kvferry.launch import DEFAULT_LAUNCH, LaunchConfig
from kvferry.tuning.sass import Sass, read_sass

CUDA_ARCHES = (80, 90, 100, 120)
AMD_ARCHES = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time constants, and what it may do at most.

    Attributes:
        name: as it is reported.
        kernel: the `@triton.jit` function.
        constants: its compile-time arguments.
        num_warps: warps per program.
        payload_bytes: what each program moves.
        access_bytes: width of one payload access.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    payload_bytes: int
    access_bytes: int


@dataclass(frozen=True)
class Compiled:
    """What came of one variant on one CUDA target.

    Attributes:
        name, target: which.
        sass: its machine code.
        payload_bytes_per_thread: what a thread should load, and store.
        access_bytes: width that the payload should have.
        instructions_per_16_bytes: of payload.
    """

    name: str
    target: str
    sass: Sass
    payload_bytes_per_thread: int
    access_bytes: int
    instructions_per_16_bytes: float


def variants(launch: LaunchConfig = DEFAULT_LAUNCH) -> Iterator[Variant]:
    """Yield every variant that the launchers use with a launch configuration, of both forms."""
    moves = (("pack", PACK, WHOLE), ("unpack", UNPACK, WHOLE), ("unpack_zero", UNPACK, ZERO_TAIL),
             ("unpack_keep", UNPACK, KEEP_TAIL), ("sum", SUM_ONLY, WHOLE))  # fmt: skip
    forms = itertools.product(moves, (False, True), (False, True))
    for (way, kind, tail), with_sums, is_persistent in forms:
        if kind == SUM_ONLY and not with_sums:
            continue
        name = f"{way}_summed" if with_sums and kind != SUM_ONLY else way
        end = "_persistent" if is_persistent else ""
        yield _tiles(launch, f"{name}_tiles{end}", kind, 8, tail, with_sums, is_persistent)
        for unit_bytes in (16, 8, 4, 2, 1):
            for few in (False, True) if with_sums else (False,):
                few_pages = "_few" if few else ""
                yield _units(
                    launch, f"{name}_units{unit_bytes}{few_pages}{end}", unit_bytes, kind, 8, tail,
                    with_sums, few, is_persistent,
                )  # fmt: skip
    # What transfers use on a GPU: their ids have 32 bits.
    for way, kind, tail in moves[:2]:
        yield _tiles(launch, f"{way}_tiles_id4", kind, 4, tail, False, False)
        yield _units(launch, f"{way}_units16_id4", 16, kind, 4, tail, False, False, False)


def _units(
    launch: LaunchConfig,
    name: str,
    unit_bytes: int,
    kind: int,
    id_bytes: int,
    tail: int,
    with_sums: bool,
    few_pages: bool,
    is_persistent: bool,
) -> Variant:
    return Variant(
        name,
        _move_units_kernel,
        {
            "UNITS": launch.units_per_program, "UNIT_BYTES": unit_bytes, "MOVE": kind,
            "ID_BYTES": id_bytes, "TAIL": tail, "SUM": with_sums, "FEW_PAGES": few_pages,
            "PERSISTENT": is_persistent,
        },
        launch.unit_warps,
        launch.units_per_program * unit_bytes,
        unit_bytes,
    )  # fmt: skip


def _tiles(
    launch: LaunchConfig,
    name: str,
    kind: int,
    id_bytes: int,
    tail: int,
    with_sums: bool,
    is_persistent: bool,
) -> Variant:
    return Variant(
        name,
        _move_tiles_kernel,
        {
            "TILE_BYTES": launch.tile_bytes, "MOVE": kind, "ID_BYTES": id_bytes, "TAIL": tail,
            "SUM": with_sums, "PERSISTENT": is_persistent,
        },
        launch.tile_warps,
        launch.tile_bytes,
        16,
    )  # fmt: skip


def compile_for(variant: Variant, target: GPUTarget) -> Any:
    """Compile a variant; needs no GPU, and no TRITON_INTERPRET in the environment.

    Returns:
        Triton's compiled kernel; `asm` holds the generated code.
    """
    signature = {
        param.name: "constexpr" if param.name in variant.constants else param.annotation
        for param in variant.kernel.params
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=target, options={"num_warps": variant.num_warps})


def inspect(variant: Variant, arch: int) -> Compiled:
    """Compile for a CUDA architecture and read the machine code."""
    compiled = compile_for(variant, GPUTarget("cuda", arch, 32))
    sass = read_sass(compiled.asm["cubin"])
    payload_bytes = variant.payload_bytes // (32 * variant.num_warps)
    return Compiled(
        variant.name,
        f"sm_{arch}",
        sass,
        payload_bytes,
        variant.access_bytes,
        sass.instructions * 16 / payload_bytes,
    )


def row_of(name: str, target: str) -> dict[str, Any]:
    """Compile one variant for `90` (an sm number) or `gfx942`, and return what came of it."""
    variant = next(one for one in variants() if one.name == name)
    if target.startswith("gfx"):
        compile_for(variant, GPUTarget("hip", target, 64))
        return {"name": name, "target": target}
    return asdict(inspect(variant, int(target)))


def main(arguments: Sequence[str]) -> int:
    """Compile for `arguments`, sm numbers or gfx names; print one JSON list.

    `90` compiles everything, `90:tiles,units16` what has one of these words in its name. As many at
    once as there are processors.
    """
    wanted = []
    for argument in arguments:
        target, _, words = argument.partition(":")
        wanted += [
            (variant.name, target)
            for variant in variants()
            if not words or any(word in variant.name for word in words.split(","))
        ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(row_of, *zip(*wanted, strict=True), chunksize=4))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
