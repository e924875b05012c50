"""Static inspection: occupancy by hand, the gate on rows made up, and a kernel of others."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.tuning.amd import read_amd
from kvferry.tuning.functions import load_function, parse_constants
from kvferry.tuning.gate import FOLDER, Threshold, faults, load_thresholds
from kvferry.tuning.inspection import TARGETS, Inspected
from kvferry.tuning.occupancy import bytes_in_flight, occupancy, programs_per_multiprocessor
from kvferry.tuning.sass import NoInstructionsError, read_sass

HERE = Path(__file__).parent
GATHER = HERE.parent / "benchmarks" / "scalar_gather.py"
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

# ---- occupancy ----


@pytest.mark.parametrize(
    ("arch", "registers", "num_warps", "shared_bytes", "programs"),
    [
        (90, 46, 4, 0, 10),  # 48 registers are allocated: 42 warps, 40 in fours
        (90, 64, 4, 0, 8),
        (90, 65, 4, 0, 7),  # 72 are: 28 warps
        (90, 66, 8, 0, 3),
        (90, 72, 1, 0, 28),
        (90, 40, 1, 0, 32),  # the limit of programs
        (90, 22, 4, 0, 16),  # the limit of warps
        (80, 22, 4, 40 * 1024, 4),  # 41 KiB each of 164
        (90, 22, 4, 40 * 1024, 5),
        (100, 128, 4, 0, 4),
        (120, 22, 4, 0, 12),
        (120, 22, 1, 0, 24),
        (120, 22, 4, 99 * 1024, 1),
        (120, 22, 4, 100 * 1024, 0),
    ],
)
def test_programs_per_multiprocessor(
    arch: int, registers: int, num_warps: int, shared_bytes: int, programs: int
) -> None:
    found = programs_per_multiprocessor(arch, registers, num_warps, shared_bytes)
    assert found == programs


def test_occupancy_and_bytes_in_flight() -> None:
    assert occupancy(90, 10, 4) == 0.625
    assert occupancy(120, 12, 4) == 1
    assert bytes_in_flight(10, 4, 8, 16) == 160 * 1024


def test_limits_of_an_unknown_gpu_are_not_guessed() -> None:
    with pytest.raises(ValueError, match="arch is sm_75, wanted one of sm_80, sm_90"):
        programs_per_multiprocessor(75, 32, 4)


# ---- the gate ----

LONG = Threshold("long runs", "pack_tiles", "sm_90|sm_100", 48, 114, 19.0, 131072)
SIGNALS = Threshold("signals", "signal_.*|wait", "sm_.*", 32)
GOOD = Inspected(
    "pack_tiles", "sm_90", 4, 112, 45, 0, 0, 0, 16, {16: 8, 8: 7}, {16: 8}, 14.0, 1.0, 10, 0.625,
    163840,
)  # fmt: skip
SIGNAL = Inspected(
    "signal_add_gpu", "sm_90", 1, 32, 12, 0, 0, 0, 8,
    ordering=("BAR.SYNC.DEFER_BLOCKING", "MEMBAR.ALL.GPU", "ATOMG.E.ADD.64.STRONG.GPU",
              "MEMBAR.ALL.SYS", "STG.E.64.STRONG.SYS"),
)  # fmt: skip
WAIT = replace(
    SIGNAL, name="wait", ordering=("LDG.E.64.STRONG.SYS", "CCTL.IVALL", "BAR.SYNC", "STG.E.64")
)


@pytest.mark.parametrize("row", [GOOD, SIGNAL, WAIT])
def test_good_rows_pass(row: Inspected) -> None:
    assert faults(row, [LONG, SIGNALS]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"instructions": 0, "unread": "too old"},
         "pack_tiles on sm_90: 0 instructions were read: too old"),
        ({"spills": 2}, "pack_tiles on sm_90: spills is 2, allowed 0"),
        ({"spill_bytes": 8}, "pack_tiles on sm_90: spill_bytes is 8, allowed 0"),
        ({"registers": 49}, "registers is 49, allowed for long runs at most 48"),
        ({"instructions": 115}, "instructions is 115, allowed for long runs at most 114"),
        ({"instructions_per_16_bytes": 19.125},
         "instructions_per_16_bytes is 19.125, allowed for long runs at most 19"),
        ({"instructions_per_16_bytes": None}, "instructions_per_16_bytes is not known, allowed"),
        ({"in_flight_bytes": 131071},
         "in_flight_bytes is 131071, allowed for long runs at least 131072"),
        ({"in_flight_bytes": None}, "in_flight_bytes is not known, allowed"),
        ({"payload_share": 0.5}, "payload_share at 16 bytes is 0.500, allowed at least 1"),
        ({"name": "new"}, "new on sm_90: no class of thresholds has it"),
        ({"target": "sm_120"}, "pack_tiles on sm_120: no class of thresholds has it"),
    ],
)  # fmt: skip
def test_each_fault_is_named(change: dict[str, Any], fault: str) -> None:
    (found,) = faults(replace(GOOD, **change), [LONG, SIGNALS])
    assert fault in found


@pytest.mark.parametrize(
    ("row", "ordering", "fault"),
    [
        (SIGNAL, SIGNAL.ordering[1:], "wanted a barrier before the fence"),
        (SIGNAL, ("STG.E.64", *SIGNAL.ordering[1:]), "wanted a barrier before the fence"),
        (SIGNAL, (SIGNAL.ordering[0], *SIGNAL.ordering[2:]), "wanted a barrier before the fence"),
        (SIGNAL, SIGNAL.ordering[:2], "wanted a barrier before the fence"),
        (replace(SIGNAL, name="signal_add_sys"), SIGNAL.ordering, "signal of scope SYS"),
        (SIGNAL, (*SIGNAL.ordering[:2], "ATOMG.E.ADD.64.STRONG.SYS"), "signal of scope GPU"),
        (SIGNAL, (SIGNAL.ordering[0], "MEMBAR.ALL.CTA", SIGNAL.ordering[2]), "of scope GPU"),
        (WAIT, ("LDG.E.64.STRONG.SYS", "BAR.SYNC"), "wanted LDG of scope SYS"),
        (WAIT, ("LDG.E.64.STRONG.GPU", "CCTL.IVALL"), "wanted LDG of scope SYS"),
        (WAIT, (), "wanted LDG of scope SYS"),
        (WAIT, (*WAIT.ordering, "ATOMG.E.ADD.64.STRONG.SYS"), "wanted no atomic operation"),
    ],
)
def test_faults_of_order_are_named(row: Inspected, ordering: tuple[str, ...], fault: str) -> None:
    (found,) = faults(replace(row, ordering=ordering), [LONG, SIGNALS])
    assert found.startswith(f"{row.name} on sm_90: ")
    assert fault in found


def test_a_version_takes_its_own_thresholds_then_those_before_it(tmp_path: Path) -> None:
    for name, registers in (("triton_3_6", 6), ("triton_3_10", 10)):
        one = {"name": name, "variants": ".*", "targets": ".*", "registers": registers}
        (tmp_path / f"{name}.json").write_text(json.dumps({"classes": [one]}))
    taken = {version: load_thresholds(version, tmp_path) for version in ("3.6.0", "3.9.1", "3.10")}
    assert [taken[version][0] for version in taken] == ["3.6", "3.6", "3.10"]
    registers = [[one.registers for one in taken[version][1]] for version in taken]
    assert registers == [[6], [6], [10, 6]]
    with pytest.raises(ValueError, match=r"Triton is 3\.5\.1, wanted 3\.6 or newer"):
        load_thresholds("3.5.1", tmp_path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_thresholds_hold_the_bars(path: Path) -> None:
    """Numbers of a file may grow with a compiler, but not past what the kernels are to reach."""
    _, classes = load_thresholds(path.stem.removeprefix("triton_").replace("_", "."))
    for target in ("sm_90", "sm_100"):
        for name, most in (("pack_tiles", 19), ("pack_tiles_id4", 19), ("unpack_tiles", 19),
                           ("unpack_tiles_id4", 19), ("pack_units16_id4", 43),
                           ("unpack_units16_id4", 43)):  # fmt: skip
            bounds = next(one for one in classes if one.holds(replace(GOOD, name=name,
                                                                      target=target)))  # fmt: skip
            assert bounds.instructions_per_16_bytes is not None
            assert bounds.instructions_per_16_bytes <= most
            assert (bounds.in_flight_bytes or 0) >= 128 * 1024
    assert {target for target in TARGETS if any(
        one.holds(replace(GOOD, target=target)) for one in classes
    )} == set(TARGETS)  # fmt: skip


def test_what_cannot_be_read_is_no_empty_reading() -> None:
    with pytest.raises(NoInstructionsError, match="cuobjdump"):
        read_sass(b"no cubin")


# ---- AMD's assembly ----

ASSEMBLY = """
_kernel:                                ; @_kernel
	s_load_dwordx4 s[4:7], s[0:1], 0x0
	s_nop 0
	global_load_dwordx4 v[2:5], v[0:1], off
	global_load_ushort v6, v[0:1], off
	buffer_load_dwordx2 v[8:9], v0, s[4:7], 0 offen
	global_store_dwordx4 v[0:1], v[2:5], off
	global_store_byte_d16_hi v[0:1], v6, off
	s_endpgm
	.set _kernel.num_vgpr, 20
  - .agpr_count:     0
    .private_segment_fixed_size: 24
    .sgpr_count:     34
    .sgpr_spill_count: 1
    .vgpr_count:     20
    .vgpr_spill_count: 5
"""


def test_amd_assembly() -> None:
    found = read_amd(ASSEMBLY)
    assert found.instructions == 7
    assert (found.registers, found.scalar_registers) == (20, 34)
    assert (found.spills, found.spill_bytes) == (6, 24)
    assert found.loads == {16: 1, 2: 1, 8: 1}
    assert found.stores == {16: 1, 1: 1}


# ---- functions of others ----

SCALAR = f"{GATHER}:gather_kernel"
ASKED = ("--function", SCALAR, "--signature", "*i16:16,*i64:16,*i16:16,i64,i32",
         "--constants", "ROW=128,BLOCK=1024", "--payload-bytes", "2048",
         "--target", "sm_90")  # fmt: skip


def command(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.tuning", *arguments],
        env=COMPILED, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_kernel_of_others_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    status, text = command("inspect", *ASKED, "--json", str(path))
    assert status == 0, text
    (row,) = json.loads(path.read_text())["rows"]
    # 1,024 elements of 2 bytes by 128 threads: 8 loads each of what 16 bytes would be one.
    assert row["loads"]["2"] == 8
    assert "16" not in row["loads"]
    assert row["payload_share"] == 0
    assert row["instructions_per_16_bytes"] == row["instructions"]
    assert 30 < row["instructions"] < 200
    assert "8 x 2 B" in text


def test_what_cannot_be_inspected_is_said() -> None:
    status, text = command("inspect", "--only", "no_such_variant")
    assert status == 2
    assert "no variant has this name" in text
    status, text = command("no_such_command")
    assert status == 2
    assert "inspect" in text


@pytest.mark.parametrize(
    ("path", "signature", "constants", "message"),
    [
        (f"{GATHER}:nothing", "", "", "wanted FILE.py:NAME of a @triton.jit"),
        ("gather_kernel", "", "", "wanted FILE.py:NAME of a @triton.jit"),
    ],
)
def test_functions_are_checked(path: str, signature: str, constants: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_function(path, signature, parse_constants(constants), 4, 0, 16)


def test_constants_are_parsed() -> None:
    assert parse_constants("A=1,B=True,C=gpu,D='x',E=None") == {
        "A": 1, "B": True, "C": "gpu", "D": "x", "E": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="constants have 'A', wanted NAME=VALUE"):
        parse_constants("A")
