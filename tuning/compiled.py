"""Kernels compiled for GPUs that aren't here: what was generated, read without running it."""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.device import KEEP_TAIL, PACK, SUM_ONLY, UNPACK, WHOLE, ZERO_TAIL
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.kernels.units import _move_units_kernel
from kvferry.launch import DEFAULT_LAUNCH
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


def variants() -> Iterator[Variant]:
    """Yield every variant that the launchers use, with the default launch configuration."""
    launch = DEFAULT_LAUNCH
    moves = (("pack", PACK, WHOLE), ("unpack", UNPACK, WHOLE), ("unpack_zero", UNPACK, ZERO_TAIL),
             ("unpack_keep", UNPACK, KEEP_TAIL), ("sum", SUM_ONLY, WHOLE))  # fmt: skip
    for way, kind, tail in moves:
        for with_sums in (True,) if kind == SUM_ONLY else (False, True):
            name = f"{way}_summed" if with_sums and kind != SUM_ONLY else way
            yield Variant(
                f"{name}_tiles",
                _move_tiles_kernel,
                {
                    "TILE_BYTES": launch.tile_bytes, "MOVE": kind, "ID_BYTES": 8, "TAIL": tail,
                    "SUM": with_sums,
                },
                launch.tile_warps,
                launch.tile_bytes,
                16,
            )  # fmt: skip
            for unit_bytes in (16, 8, 4, 2, 1):
                for few in (False, True) if with_sums else (False,):
                    yield Variant(
                        f"{name}_units{unit_bytes}" + ("_few" if few else ""),
                        _move_units_kernel,
                        {
                            "UNITS": launch.units_per_program, "UNIT_BYTES": unit_bytes,
                            "MOVE": kind, "ID_BYTES": 8, "TAIL": tail, "SUM": with_sums,
                            "FEW_PAGES": few,
                        },
                        launch.unit_warps,
                        launch.units_per_program * unit_bytes,
                        unit_bytes,
                    )  # fmt: skip
    yield Variant(
        "pack_tiles_id4",
        _move_tiles_kernel,
        {"TILE_BYTES": launch.tile_bytes, "MOVE": PACK, "ID_BYTES": 4, "TAIL": WHOLE, "SUM": False},
        launch.tile_warps,
        launch.tile_bytes,
        16,
    )


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


def main(arguments: Sequence[str]) -> int:
    """Compile everything for `arguments` (sm numbers, or gfx names); print one JSON list."""
    rows = []
    for name in arguments:
        for variant in variants():
            if name.startswith("gfx"):
                compile_for(variant, GPUTarget("hip", name, 64))
                rows.append({"name": variant.name, "target": name})
            else:
                rows.append(asdict(inspect(variant, int(name))))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
