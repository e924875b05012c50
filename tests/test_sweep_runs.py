"""Sweeps that run: in Triton's interpreter, as dry runs, on stand-ins for a GPU's streams."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kvferry.kernels.device import PACK
from kvferry.kernels.pack import Packer
from kvferry.launch import DEFAULT_LAUNCH
from kvferry.tuned import CONFIGS, for_device, read_file
from kvferry.tuning import beside, sweep, workload
from kvferry.tuning.ahead import FOUND_BY_LAUNCHES
from kvferry.tuning.beside import NotCoveredError, matmul_beside
from kvferry.tuning.plans import CPU, FULL, SHORT, TILES, UNITS, known_figures
from kvferry.tuning.target import INTERPRETER
from kvferry.tuning.workload import LAYOUTS, Workload, resized

TESTS = Path(__file__).resolve().parent
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
INTERPRETED = {**COMPILED, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
NUM_GROUPS = len(list(CPU.groups()))


def run(code: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, by `-m kvferry.tuning sweep` where there is no code."""
    command = ["-c", code] if code else ["-m", "kvferry.tuning", "sweep"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


# ---- pools and objects ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layouts_runs_take_the_kernel_that_they_are_for(name: str) -> None:
    small = Workload(LAYOUTS[name], 20_000, 1, torch.device("cpu"))
    packer = Packer(small.layout, "full", DEFAULT_LAUNCH)
    ids, objects = small._inputs[0]
    ranges = ((0, small.layout.num_layers),)
    move = packer.describe(PACK, ids, objects.data_ptr() & ~15, small._stride, ranges)
    (launch,) = packer.launches(move)  # one, so that a timed move is a launch
    plans = [
        plan for plan in (FULL, SHORT, CPU) for names in plan.layouts.values() if name in names
    ]
    assert plans
    kernels = {kernel for plan in plans for kernel in plan.layouts if name in plan.layouts[kernel]}
    kernel = launch.kernel.fn.__name__
    assert kernels == {TILES if kernel == "_move_tiles_kernel" else UNITS}


def test_moves_are_about_as_large_as_their_class() -> None:
    for plan in (FULL, SHORT):
        for names in plan.layouts.values():
            for name in names:
                for num_bytes in plan.class_bytes:
                    layout, num_pages = resized(LAYOUTS[name], num_bytes)
                    assert 0.95 < num_pages * layout.object_bytes["full"] / num_bytes < 1.05
                    assert num_pages * layout.page_size >= 256


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """Small pools and objects, moved by plain torch, so that nothing is compiled."""
    made = Workload(LAYOUTS["llama-3.1-8b head slices"], 1 << 17, 2, torch.device("cpu"))
    real = Workload.calls

    def calls(self: Workload, direction: str, config: Any) -> list[Callable[[], None]]:
        return [
            partial(call.func, *call.args, **{**call.keywords, "backend": "reference"})
            for call in real(self, direction, config)
            if isinstance(call, partial)
        ]

    monkeypatch.setattr(Workload, "calls", calls)
    return made


@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_every_byte_of_pools_and_objects_is_compared(
    tiny: Workload, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny.fault_of(direction, DEFAULT_LAUNCH) == ""
    plain = Workload.calls
    pools, objects = tiny._pools, tiny._objects
    places = {
        "an object's first byte": (objects, workload.GUARD_BYTES, "objects"),
        "the guard before the objects": (objects, workload.GUARD_BYTES - 1, "objects"),
        "the guard after them": (objects, len(objects) - 1, "objects"),
        "the guard before the pools": (pools, 0, "pools"),
        "another head": (pools, workload.GUARD_BYTES + 1, "pools"),
        "the last byte": (pools, len(pools) - 1, "pools"),
    }
    for what, (memory, place, name) in places.items():

        def broken(
            self: Workload, direction: str, config: Any,
            memory: torch.Tensor = memory, place: int = place,
        ) -> list[Callable[[], None]]:  # fmt: skip
            def also() -> None:
                memory[place] ^= 1

            return [*plain(self, direction, config), also]

        monkeypatch.setattr(Workload, "calls", broken)
        told = f"1 bytes of the {name} are wrong, the first at {place:,} of {len(memory):,}"
        assert tiny.fault_of(direction, DEFAULT_LAUNCH) == told, what
    # A move that is left out, of one input alone.
    monkeypatch.setattr(Workload, "calls", lambda self, *given: plain(self, *given)[:1])
    target = "objects" if direction == "pack" else "pools"
    assert f"bytes of the {target} are wrong" in tiny.fault_of(direction, DEFAULT_LAUNCH)


def test_a_copy_has_as_many_bytes_as_a_move(tiny: Workload) -> None:
    copies = tiny.copies()
    assert len(copies) == len(tiny.calls("pack", DEFAULT_LAUNCH)) == 2
    tiny._copied.zero_()
    copies[1]()
    assert len(tiny._copied) == tiny.num_bytes
    assert torch.equal(tiny._copied, tiny._inputs[1][1][: tiny.num_bytes])


# ---- beside a matmul, on stand-ins for a GPU's streams ----


class Gpu:
    """Two streams with clocks in ms; a matmul takes a fifth longer while a move runs beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, move_ms: float) -> None:
        self.main_ms = self.side_ms = 0.0
        self.on_side = False
        self.num_moves = 0
        self.move_ms = move_ms
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_ms = 0.0

            def record(self, stream: "Stream") -> None:
                self.at_ms = gpu.side_ms if stream.is_side else gpu.main_ms

            def elapsed_time(self, end: "Event") -> float:
                return end.at_ms - self.at_ms

        class Stream:
            def __init__(self, device: torch.device, is_side: bool = True) -> None:
                self.is_side = is_side

            def wait_stream(self, other: "Stream") -> None:
                gpu.side_ms = max(gpu.side_ms, gpu.main_ms)

            def synchronize(self) -> None:  # the host waits, and the streams with it
                gpu.main_ms = gpu.side_ms = max(gpu.main_ms, gpu.side_ms)

        @contextmanager
        def stream(side: Stream) -> Any:
            gpu.on_side = True
            yield
            gpu.on_side = False

        @contextmanager
        def on_device(device: torch.device) -> Any:
            yield

        def mm(left: Any, right: Any, out: Any) -> None:
            gpu.main_ms += 1.2 if gpu.side_ms > gpu.main_ms else 1.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, False))
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", on_device)
        monkeypatch.setattr(torch, "randn", lambda *shape, **named: None)
        monkeypatch.setattr(torch, "mm", mm)

    def move(self) -> None:
        assert self.on_side
        self.num_moves += 1
        self.side_ms += self.move_ms


def test_a_matmul_is_timed_while_moves_run_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, move_ms=0.5)
    found = matmul_beside([gpu.move], 500.0, torch.device("cuda", 0), num_rounds=5)
    assert found.slowdown == pytest.approx(1.2)
    assert found.matmul.median_us == pytest.approx(1000 * beside.NUM_MATMULS)
    assert found.matmul.num_samples == 5


def test_moves_that_end_too_early_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    # Said to take 4 ms, a move takes 0.5: so few would end before half of the matmuls.
    gpu = Gpu(monkeypatch, move_ms=0.5)
    found = matmul_beside([gpu.move], 4000.0, torch.device("cuda", 0), num_rounds=5)
    assert found.slowdown == pytest.approx(1.2)
    gpu = Gpu(monkeypatch, move_ms=0.0)
    with pytest.raises(NotCoveredError, match="moves ended before the matmuls"):
        matmul_beside([gpu.move], 4000.0, torch.device("cuda", 0), num_rounds=5)
    assert gpu.num_moves < 2000


# ---- what the command refuses ----


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--gpu", "H100", "--dry-run"], COMPILED, "gpu is 'H100', wanted one of NVIDIA_A100, N"),
        (["--gpu", "NVIDIA_H200", "--dry-run"], INTERPRETED, "TRITON_INTERPRET is set, wanted"),
        ([], INTERPRETED, "configs, wanted another folder: an interpreter's figures must not be"),
        (["--out", "CONFIGS"], INTERPRETED, "wanted another folder: an interpreter's figures"),
        (["--out", "OUT/file"], INTERPRETED, "file, wanted a folder: File exists"),
        (["--out", "OUT", "--limit-s", "0"], INTERPRETED, "limit-s is 0, wanted at least 1"),
        (["--out", "OUT", "--gpu", "NVIDIA_H200"], INTERPRETED, "this is CPU_interpreter: --dry"),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: list[str], env: dict[str, str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if env is INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    places = {"OUT": str(tmp_path), "OUT/file": str(tmp_path / "file"), "CONFIGS": str(CONFIGS)}
    given = [places.get(argument, argument) for argument in arguments]
    assert sweep.main(given) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- dry runs ----


@pytest.mark.skipif(
    not known_figures("sm_90", "NVIDIA_H200")[0],
    reason="no derived file by this version of Triton: 48 candidates would be compiled",
)
def test_a_dry_run_says_what_would_be_done() -> None:
    done = run("", "--dry-run", "--short", "--gpu", "NVIDIA_H200", env=COMPILED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NVIDIA H200, sm_90; plan short; ")
    lines = done.stdout.splitlines()
    out = [line for line in lines if " out: " in line]
    timed = [line for line in lines if line.endswith("  timed")]
    assert len(out) + len(timed) == len(SHORT.all_candidates()) == 48
    assert any("pack tiles persistent" in line and "in flight, the best 32" in line for line in out)
    # What a class is said to take adds up.
    num_moves = 0
    for direction in ("pack", "unpack"):
        for budget, form in (("no budget", ""), ("4 programs", " persistent")):
            (row,) = (line for line in lines if line.startswith(f"{direction}, {budget} "))
            tiles, units = (
                sum(line.startswith(f"{direction} {kernel}{form} ") for line in timed)
                - (sum(line.startswith(f"{direction} {kernel} persistent") for line in timed)
                   if not form else 0)
                for kernel in (TILES, UNITS)
            )  # fmt: skip
            moves = (tiles + 3 + units) * SHORT.num_rounds
            assert row.split()[-2:] == [str(tiles + 3 + units), str(moves)]
            num_moves += moves * (2 if form else 1) * len(SHORT.class_bytes)
    assert f"in all {num_moves:,} timed moves" in done.stdout
    assert "«not measured»" in done.stdout
    assert lines[-1].endswith("tuning/configs/NVIDIA_H200.json")

    if triton.__version__.startswith("3.6."):
        guide = (TESTS.parent / "docs" / "tuning.md").read_text(encoding="utf-8")
        command = "$ python -m kvferry.tuning sweep --dry-run --short --gpu NVIDIA_H200\n"
        quoted = guide.partition(command)[2].partition("\n```")[0].splitlines()
        assert len(quoted) > 20
        rest = iter(lines)
        for line in quoted:
            assert line == "..." or line in rest, f"docs/tuning.md quotes {line!r}"


AHEAD = """
import os, stub_driver
from kvferry.tuning.ahead import _compile
from kvferry.tuning.derive import Candidate

folder = os.environ["TRITON_CACHE_DIR"]
candidate = Candidate("tiles", "pack", True, 8192, 4)
for hint in (0, 1):
    _compile(candidate, hint, "sm_90")
for hint in (0, 1, 2):
    before = len(os.listdir(folder))
    constants = {**candidate.variant.constants, "CACHE": hint}
    kernel = candidate.variant.kernel
    arguments = [constants.get(param.name, 1 << 20) for param in kernel.params]
    kernel.warmup(*arguments, grid=(1,), num_warps=4)
    print(len(os.listdir(folder)) - before)
"""


@pytest.mark.skipif(
    not triton.__version__.startswith(FOUND_BY_LAUNCHES), reason="nothing is compiled ahead"
)
def test_what_is_compiled_ahead_is_found_by_a_launch(tmp_path: Path) -> None:
    env = {**COMPILED, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run(AHEAD, env={**env, "PYTHONPATH": f"{TESTS}{os.pathsep}{env['PYTHONPATH']}"})
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, new = (int(line) for line in done.stdout.split())
    assert (first, second) == (0, 0)
    assert new > 0  # a hint that was not compiled ahead is compiled by the launch


# ---- whole sweeps in the interpreter ----


def test_a_sweep_ends_at_its_limit_and_goes_on_later(tmp_path: Path) -> None:
    done = run("", "--out", str(tmp_path), "--limit-s", "2", env=INTERPRETED)
    assert "the limit of 2 s was reached; --resume goes on from here" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "no file: not one class of each direction is complete" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["CPU_interpreter.sweep.jsonl"]
    lines = (tmp_path / "CPU_interpreter.sweep.jsonl").read_text().splitlines()
    assert 1 <= len(lines) < NUM_GROUPS

    done = run("", "--out", str(tmp_path), "--resume", env=INTERPRETED)
    assert done.returncode == 0, done.stderr
    if len(lines) > 1:
        assert f"{len(lines) - 1} groups are in" in done.stdout
    again = (tmp_path / "CPU_interpreter.sweep.jsonl").read_text().splitlines()
    assert again[: len(lines)] == lines
    assert len(again) == 1 + NUM_GROUPS

    tuned = read_file(tmp_path / "CPU_interpreter.json")
    assert (tuned.gpu, tuned.origin, tuned.device_names) == (INTERPRETER, "measured", ())
    assert len(tuned.classes) == 2 * len(CPU.class_bytes) * len(CPU.budgets)
    if find_spec("matplotlib"):
        assert (tmp_path / "CPU_interpreter.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no picture: No module named 'matplotlib'" in done.stdout
    # No device takes it, whatever folder it is in.
    (tmp_path / "default.json").write_text((CONFIGS / "default.json").read_text())
    assert for_device("cpu", tmp_path).gpu == for_device(INTERPRETER, tmp_path).gpu == "default"


FAULTY = """
import sys
from dataclasses import replace
from kvferry.tuning import sweep, workload

class Faulty(workload.Packer):
    # Tiles of 8 KiB lose a byte, and those of 4 KiB do not compile under a budget.
    def pack(self, ids, objects, **options):
        config = self._config
        if config.tile_bytes == 4096 and config.max_programs:
            raise workload_error("no room")
        super().pack(ids, objects, **options)
        if config.tile_bytes == 8192:
            objects[100] ^= 1

from triton.errors import TritonError as workload_error
workload.Packer = Faulty
sweep.CPU = replace(sweep.CPU, class_bytes=(8192,), num_rounds=1)
sys.exit(sweep.main(sys.argv[1:]))
"""


def test_a_candidate_whose_bytes_are_wrong_is_named_and_not_chosen(tmp_path: Path) -> None:
    done = run(FAULTY, "--out", str(tmp_path), env=INTERPRETED)
    assert done.returncode == 1, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    told = (
        r"no budget, .*: 2 bytes of the objects are wrong, the first at 356 of [\d,]+",
        r"2 programs, .*: TritonError: no room",
        r"2 programs, .*: 2 bytes of the objects are wrong, the first at 356 of [\d,]+",
    )
    for line, tile_bytes, end in zip(failed, (8192, 4096, 8192), told, strict=True):
        assert re.fullmatch(rf"FAILED pack tiles {tile_bytes} x 4 warps, {end}", line)
    content = json.loads((tmp_path / "CPU_interpreter.json").read_text())
    chosen = {
        (one["direction"], one["max_programs"]): one["config"]["tile_bytes"]
        for one in content["classes"]
    }
    assert chosen[("pack", 0)] == 4096
    assert ("pack", 2) not in chosen
    assert "left out: pack, 8 KiB, 2 programs: every candidate for tiles failed" in done.stdout
    assert [f"FAILED {one}" for one in content["failed"]] == failed
