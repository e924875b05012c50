"""Derived files of launch numbers: current, and picked by the rule that they state."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from kvferry.tuned import CONFIGS
from kvferry.tuning.derive import (
    CUDA_ARCHES,
    GPUS,
    Candidate,
    Figures,
    candidates,
    classes_of,
    loads_in_flight,
    pick,
    text_of,
    worst_of,
)

TEXTS = {path.stem: path.read_text() for path in CONFIGS.glob("*.json")}
FILES: dict[str, dict[str, Any]] = {stem: json.loads(text) for stem, text in TEXTS.items()}
DERIVED = {stem: plain for stem, plain in FILES.items() if plain["origin"] == "derived"}
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
FIGURES = tuple(Figures.__dataclass_fields__)


def rows_of(plain: dict[str, Any]) -> list[tuple[Candidate, Figures]]:
    """A file's candidates, as the rule takes them."""
    return [
        (
            Candidate(**{name: value for name, value in row.items() if name not in FIGURES}),
            Figures(**{name: row[name] for name in FIGURES}),
        )
        for row in plain["candidates"]
    ]


def derived_for(arch: str) -> dict[str, Any]:
    """The first derived file for an architecture: of some GPU of it nothing may be measured yet."""
    found = [plain for plain in DERIVED.values() if plain["architecture"] == arch]
    if not found:
        pytest.skip(f"every file for {arch} is measured")
    return found[0]


def test_every_gpu_has_a_file() -> None:
    assert set(GPUS) <= set(FILES)  # others were measured
    for stem, plain in DERIVED.items():
        arch, device_names = GPUS[stem]
        assert plain["device_names"] == list(device_names)
        assert plain["architecture"] == (arch if arch != "all" else ", ".join(CUDA_ARCHES))
        assert TEXTS[stem] == text_of(plain)


def test_files_hold_what_the_rule_picks() -> None:
    for stem, plain in DERIVED.items():
        if stem == "AMD_MI300X":
            assert plain["classes"] == FILES["default"]["classes"]
            assert plain["candidates"] == []
            continue
        rows = rows_of(plain)
        assert [candidate for candidate, _ in rows] == candidates()
        assert plain["classes"] == classes_of(rows), stem


def test_the_default_takes_the_worst_of_every_architecture() -> None:
    by_arch = [[figures for _, figures in rows_of(derived_for(arch))] for arch in CUDA_ARCHES]
    wanted = [worst_of(figures) for figures in zip(*by_arch, strict=True)]
    assert [figures for _, figures in rows_of(DERIVED["default"])] == wanted


def test_gpus_of_one_architecture_have_the_same_figures() -> None:
    for plain in DERIVED.values():
        if plain["architecture"] in CUDA_ARCHES:
            assert plain["candidates"] == derived_for(plain["architecture"])["candidates"]


RECOMPILE = """
import json, sys
from dataclasses import asdict
from kvferry.tuning.derive import Candidate, figures_of
for candidate, arch in json.load(sys.stdin):
    print(json.dumps(asdict(figures_of(Candidate(**candidate), arch))))
"""


def test_the_compiler_still_says_what_the_files_say() -> None:
    # What is launched, of one direction for each form; `derive --check` compiles all.
    wanted, jobs = [], []
    for arch in CUDA_ARCHES:
        plain = derived_for(arch)
        if plain["triton"] != triton.__version__:
            pytest.skip(f"{plain['gpu']}: derived with Triton {plain['triton']}, this is another")
        rows = rows_of(plain)
        for kernel in ("tiles", "units"):
            for direction, persistent in (("pack", False), ("unpack", True)):
                form = (kernel, direction, persistent)
                some = [row for row in rows if _form_of(row[0]) == form]
                chosen = pick(some)
                jobs.append((vars(chosen), arch))
                wanted.append(vars(dict(some)[chosen]))
    done = subprocess.run(
        [sys.executable, "-c", RECOMPILE],
        input=json.dumps(jobs), env=COMPILED, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted


def _form_of(candidate: Candidate) -> tuple[str, str, bool]:
    return candidate.kernel, candidate.direction, candidate.persistent


# ---- the rule ----


def test_the_rule_ranks_bytes_in_flight_then_size_then_instructions() -> None:
    def row(persistent: bool, size: int, warps: int, program: int, all_of_them: int, cost: float,
            spill: int = 0) -> tuple[Candidate, Figures]:  # fmt: skip
        return (
            Candidate("tiles", "pack", persistent, size, warps),
            Figures(40, spill, all_of_them // max(program, 1), program, all_of_them, cost),
        )

    rows = [
        (8192, 4, 8192, 131072, 19.0), (16384, 4, 16384, 163840, 14.0),
        (16384, 8, 16384, 163840, 13.0), (32768, 4, 32768, 163840, 12.0),
        (32768, 8, 16384, 163840, 11.0),
    ]  # fmt: skip
    picked = {}
    for persistent in (False, True):
        chosen = pick(row(persistent, *numbers) for numbers in rows)
        picked[persistent] = (chosen.size, chosen.num_warps)
    # All multiprocessors full, or one program on each: other bytes count.
    assert picked == {False: (16384, 8), True: (32768, 4)}
    spilled = [row(False, 65536, 4, 65536, 1 << 20, 9.0, spill=8)]
    narrow = [row(False, 1024, 4, 0, 0, 1.0)]
    assert pick([*spilled, *narrow, row(False, *rows[0])]).size == 8192


def test_loads_count_from_store_to_store() -> None:
    payload, narrow = "LDG.E.128", "LDG.E.64"
    assert loads_in_flight([]) == loads_in_flight([narrow, "STG.E.128"]) == 0
    names = [narrow, payload, "IADD3", payload, "STG.E.128", payload, narrow, payload, payload]
    assert loads_in_flight(names) == 3


def test_measured_files_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvferry.tuning import derive

    contents = {"a": {"origin": "derived", "is": 1}, "b": {"origin": "derived", "is": 2}}
    (tmp_path / "b.json").write_text(json.dumps({"origin": "measured"}))
    monkeypatch.setattr(derive, "CONFIGS", tmp_path)
    monkeypatch.setattr(derive, "GPUS", dict.fromkeys(contents))
    monkeypatch.setattr(derive, "content_of", contents.__getitem__)
    assert derive.main(["--check"]) == 1
    assert not (tmp_path / "a.json").exists()
    assert derive.main([]) == 0
    assert json.loads((tmp_path / "a.json").read_text()) == contents["a"]
    assert derive.main(["--check"]) == 0
    assert json.loads((tmp_path / "b.json").read_text()) == {"origin": "measured"}
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text() + "\n")
    assert derive.main(["--check"]) == 1
    assert derive.main(["--chek"]) == 2
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["a: stale", "b: measured, left alone"]
    assert told[-1] == "derive: got --chek, wanted nothing or --check"
