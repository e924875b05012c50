"""Every kernel variant that the launchers use, and its compilation for GPUs that aren't here."""

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.bulk import _move_bulk_kernel, num_stages
from kvferry.kernels.device import KEEP_TAIL, PACK, SUM_ONLY, UNPACK, WHOLE, ZERO_TAIL
from kvferry.kernels.pairs import NUM_WARPS, PAIRS_PER_PROGRAM, _sum_pairs_kernel
from kvferry.kernels.signals import _signal_kernel, _wait_kernel
from kvferry.kernels.tables import SUMMED_BYTES
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.kernels.units import _move_units_kernel
from kvferry.launch import CACHE_HINTS, DEFAULT_LAUNCH, LaunchConfig
from kvferry.tuned import CONFIGS, read_folder


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time constants.

    Attributes:
        name: as it is reported.
        kernel: the `@triton.jit` function.
        constants: its compile-time arguments.
        num_warps: warps per program.
        payload_bytes: what each program moves; 0 for one that moves none.
        access_bytes: width of one payload access.
        writes: whether it writes what it reads.
        signature: types of the run-time arguments by name, where the kernel annotates none.
        aligned: names of those that are known to be multiples of 16.
        cache: the hint that its payload's accesses should carry, of `launch.CACHE_HINTS`.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    payload_bytes: int
    access_bytes: int
    writes: bool = True
    signature: Mapping[str, str] = field(default_factory=dict)
    aligned: Collection[str] = ()
    cache: str = "none"


def variants(launch: LaunchConfig = DEFAULT_LAUNCH) -> Iterator[Variant]:
    """Yield every variant that the launchers use with a launch configuration, of both forms.

    Names end in `_id4` where page ids have 32 bits, as those of transfers have on a GPU; how wide
    ids are makes a difference only where payload moves by 16 bytes.
    """
    moves = (("pack", PACK, WHOLE), ("unpack", UNPACK, WHOLE), ("unpack_zero", UNPACK, ZERO_TAIL),
             ("unpack_keep", UNPACK, KEEP_TAIL), ("sum", SUM_ONLY, WHOLE))  # fmt: skip
    forms = itertools.product((8, 4), moves, (False, True), (False, True))
    for id_bytes, (way, kind, tail), with_sums, is_persistent in forms:
        if kind == SUM_ONLY and (not with_sums or id_bytes == 4):
            continue
        name = f"{way}_summed" if with_sums and kind != SUM_ONLY else way
        end = ("_persistent" if is_persistent else "") + ("_id4" if id_bytes == 4 else "")
        yield _tiles(launch, f"{name}_tiles{end}", kind, id_bytes, tail, with_sums, is_persistent)
        for unit_bytes in (16, 8, 4, 2, 1) if id_bytes == 8 else (16,):
            if with_sums and unit_bytes < SUMMED_BYTES:
                continue
            for few in (False, True) if with_sums else (False,):
                few_pages = "_few" if few else ""
                yield _units(
                    launch, f"{name}_units{unit_bytes}{few_pages}{end}", unit_bytes, kind,
                    id_bytes, tail, with_sums, few, is_persistent,
                )  # fmt: skip


def tuned_variants(folder: Path = CONFIGS) -> Iterator[Variant]:
    """Yield what the launches of `tuning/configs` use beyond the default's variants, the wide ones.

    Names end in the size and the warps of a program: `pack_tiles_persistent_id4@32768x4`.
    """
    default = {(each.name, *_form(each)) for each in variants()}
    seen: set[tuple[str, int, int, str]] = set()
    rows = (row for tuned in read_folder(folder).values() for row in tuned.classes)
    for config, direction in {(row.config, row.direction): None for row in rows}:
        for variant in variants(config):
            name, form = variant.name, _form(variant)
            if (
                name.startswith(direction)
                and ("_persistent" in name) == bool(config.max_programs)
                and name.endswith("_id4")
                and (name, *form) not in default | seen
            ):
                seen.add((name, *form))
                hint = "" if variant.cache == "none" else f"+{variant.cache}"
                yield replace(variant, name=f"{name}@{form[0]}x{form[1]}{hint}")


def hinted_variants() -> Iterator[Variant]:
    """Yield the wide moves of whole pages with each cache hint: `pack_tiles_id4+stream`."""
    plain = {f"{way}_{form}_id4" for way in ("pack", "unpack") for form in ("tiles", "units16")}
    for hint in CACHE_HINTS[1:]:
        for variant in variants(replace(DEFAULT_LAUNCH, cache=hint)):
            if variant.name in plain:
                yield replace(variant, name=f"{variant.name}+{hint}")


def bulk_variants() -> Iterator[Variant]:
    """Yield the moves by bulk copies, for tiles that leave the ring 5 and 2 stages."""
    ways = (("pack", PACK), ("unpack", UNPACK))
    for tile_bytes, (way, kind) in itertools.product((8192, 16384), ways):
        constants = {"TILE_BYTES": tile_bytes, "MOVE": kind, "STAGES": num_stages(tile_bytes)}
        yield Variant(f"{way}_bulk_id4_{tile_bytes}", _move_bulk_kernel, constants, 1, 0, 16)


def pair_variants() -> Iterator[Variant]:
    """Yield the kernel that sums what moves by narrow units, in any object or in moved pages'."""
    for name, checked, id_bytes in (
        ("sum_pairs", False, 8), ("sum_pairs_moved", True, 8), ("sum_pairs_moved_id4", True, 4)
    ):  # fmt: skip
        constants = {"PAIRS": PAIRS_PER_PROGRAM, "CHECKED": checked, "ID_BYTES": id_bytes}
        num_bytes = PAIRS_PER_PROGRAM * SUMMED_BYTES
        yield Variant(name, _sum_pairs_kernel, constants, NUM_WARPS, num_bytes, 1, writes=False)


def _form(variant: Variant) -> tuple[int, int, str]:
    constants = variant.constants
    size = constants.get("TILE_BYTES") or constants["UNITS"]
    return size, variant.num_warps, variant.cache


def signal_variants(asm: bool = True) -> Iterator[Variant]:
    """Yield the kernels that raise layer counters and wait for them, as they are used on a GPU.

    Args:
        asm: with NVIDIA's inline assembly; without, as on AMD's GPUs.
    """
    for scope, (way, by_limits) in itertools.product(
        ("gpu", "sys"), (("add", False), ("raise", True))
    ):
        constants = {"RAISE": by_limits, "SYS": scope == "sys", "MIRROR": True, "ASM": asm}
        yield Variant(f"signal_{way}_{scope}", _signal_kernel, constants, 1, 0, 8)
    yield Variant("wait", _wait_kernel, {"ASM": asm}, 1, 0, 8)


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
            "PERSISTENT": is_persistent, "CACHE": CACHE_HINTS.index(launch.cache),
        },
        launch.unit_warps,
        launch.units_per_program * unit_bytes,
        unit_bytes,
        kind != SUM_ONLY,
        cache=launch.cache,
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
            "CACHE": CACHE_HINTS.index(launch.cache),
        },
        launch.tile_warps,
        launch.tile_bytes,
        16,
        kind != SUM_ONLY,
        cache=launch.cache,
    )  # fmt: skip


def compile_for(variant: Variant, target: GPUTarget) -> Any:
    """Compile a variant; needs no GPU, and no TRITON_INTERPRET in the environment.

    Returns:
        Triton's compiled kernel; `asm` holds the generated code.
    """
    signature, aligned = {}, {}
    for place, param in enumerate(variant.kernel.params):
        given = variant.signature.get(param.name, param.annotation)
        signature[param.name] = "constexpr" if param.name in variant.constants else given
        if param.name in variant.aligned:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=target, options={"num_warps": variant.num_warps})
