"""The GPU check's driver: bounds, crashes, going on, bars; and its parts as they run on a CPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import Part, run_all
from gpu_machine import commit_of, sources_digest
from gpu_part import Check
from gpu_report import passed, show

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "benchmarks" / "gpu_check.py"
MACHINE = {"device": "cpu", "torch": "2", "triton": "3", "sources": "a", "commit": "c", "date": "d"}
LIMIT_S = 30.0

FAKES = {
    "good": """
        check.step("work")
        with open(check.out / "runs", "a") as runs: runs.write("good ")
        check.bar("height", 3.0, 2.0, at_least=True)
        check.figure("number", 4)
        check.summary("did it")
    """,
    "crash": "check.figure('number', 4); raise ValueError('no such thing')",
    "dies": "check.step('near the end'); import os; os._exit(9)",
    "silent": "import os; check._write = None; os._exit(0)",
    "skips": "from gpu_part import Skipped; raise Skipped('this machine has no wings')",
    "hangs": """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        check.figure('child', child.pid)
        check.step('the deep')
        time.sleep(60)
    """,
    "leaves": """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        check.figure('child', child.pid)
    """,
}


@pytest.fixture
def fakes(tmp_path: Path) -> Callable[..., list[Part]]:
    """Make parts of the bodies above, by name."""

    def make(*names: str, limit_s: float = LIMIT_S) -> list[Part]:
        parts = []
        for name in names:
            path = tmp_path / f"fake_{name}.py"
            body = "\n".join(line.strip() if line[:8].isspace() else line
                             for line in FAKES[name].strip().splitlines())  # fmt: skip
            indented = "".join(f"    {line}\n" for line in body.splitlines())
            path.write_text(f"def run(check):\n{indented}")
            parts.append(Part(name, limit_s, path))
        return parts

    return make


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def is_gone(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet reaped; waits a while for it."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def on_disk(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def test_results_are_there_and_the_check_goes_on(
    fakes: Callable[..., list[Part]], out: Path
) -> None:
    results = run_all(fakes("crash", "dies", "silent", "skips", "good"), out, MACHINE)
    states = {name: (result["state"], result["why"]) for name, result in results.items()}
    assert states == {
        "crash": ("failed", "ValueError: no such thing"),
        "dies": ("failed", "exit status 9 at «near the end»"),
        "silent": ("failed", "exit status 0 at «start»"),
        "skips": ("skipped", "this machine has no wings"),
        "good": ("ok", ""),
    }
    for name, result in results.items():
        assert on_disk(out, name) == result
    # What a part that failed had found is not reported.
    assert results["crash"]["figures"] == {}
    assert results["good"]["figures"] == {"number": 4}
    report = json.loads((out / "report.json").read_text())
    assert report["parts"] == results
    assert not report["passed"]
    assert "ValueError: no such thing" in report["logs"]["crash"]
    text = show(MACHINE, results)
    assert text.endswith("FAIL: crash failed, dies failed, silent failed")
    assert "this machine has no wings" in text


def test_a_part_that_hangs_is_killed_with_all_it_started(
    fakes: Callable[..., list[Part]], out: Path
) -> None:
    begin = time.monotonic()
    hangs, good = [*fakes("hangs", limit_s=5 / gpu_check.CPU_PATIENCE), *fakes("good")]
    results = run_all([hangs, good], out, MACHINE)
    assert time.monotonic() - begin < 30
    assert results["hangs"]["state"] == "timed out"
    assert results["hangs"]["why"].endswith("at «the deep»")
    assert is_gone(results["hangs"]["figures"]["child"])
    assert results["good"]["state"] == "ok"
    # Where it hung stands in its log, and so in the report.
    log = json.loads((out / "report.json").read_text())["logs"]["hangs"]
    assert any("fake_hangs.py" in line for line in log)
    assert not passed(results)


def test_what_a_part_leaves_running_is_killed(fakes: Callable[..., list[Part]], out: Path) -> None:
    (result,) = run_all(fakes("leaves"), out, MACHINE).values()
    assert result["state"] == "ok"
    assert is_gone(result["figures"]["child"])


def test_done_parts_are_not_run_again(fakes: Callable[..., list[Part]], out: Path) -> None:
    parts = fakes("good", "crash")

    def runs(machine: Mapping[str, Any] = MACHINE, **more: Any) -> int:
        run_all(parts, out, machine, **more)
        return len((out / "runs").read_text().split())

    assert runs() == 1
    assert runs() == 1
    assert runs(again=["good"]) == 2
    assert runs({**MACHINE, "sources": "b"}) == 3
    assert runs({**MACHINE, "sources": "b", "date": "later", "commit": "other"}) == 3
    assert runs({**MACHINE, "sources": "b", "device": "NVIDIA H200"}) == 4
    (out / "good.json").write_text("{ half")  # as if the disk had been full
    assert runs({**MACHINE, "sources": "b", "device": "NVIDIA H200"}) == 5


def test_parts_that_were_not_asked_for_keep_their_results(
    fakes: Callable[..., list[Part]], out: Path
) -> None:
    parts = fakes("good", "skips")
    run_all(parts, out, MACHINE)
    assert list(run_all(parts, out, MACHINE, only=["skips"])) == ["good", "skips"]
    other = {**MACHINE, "sources": "b"}
    assert list(run_all(parts, out, other, only=["skips"])) == ["skips"]


def test_parts_without_time_are_not_run_and_do_not_pass(
    fakes: Callable[..., list[Part]], out: Path
) -> None:
    results = run_all(fakes("good"), out, MACHINE, total_s=1.0)
    assert results["good"]["state"] == "not run"
    assert "run again to go on" in results["good"]["why"]
    assert not passed(results)
    assert run_all(fakes("good"), out, MACHINE)["good"]["state"] == "ok"


def test_bars_judge_what_was_measured(tmp_path: Path) -> None:
    def judged(value: float | None, wanted: float, *, at_least: bool, device: str) -> Any:
        check = Check(tmp_path / "x.json", device)
        check.bar("b", value, wanted, at_least=at_least)
        check.timed("t", 5.0)
        check.row(a=1)
        check.end("ok")
        result = {**json.loads((tmp_path / "x.json").read_text()), "seconds": 1.0}
        text = show(MACHINE, {"x": result})
        line = next(line for line in text.splitlines() if line.startswith("bar "))
        return line, passed({"x": result}), bool(result["rows"]), "t" in result["figures"]

    gpu = "cuda:0"
    assert judged(0.96, 0.95, at_least=True, device=gpu) == (
        "bar x.b 0.960 >=0.95 ok", True, True, True,
    )  # fmt: skip
    assert judged(0.94, 0.95, at_least=True, device=gpu)[:2] == (
        "bar x.b 0.940 >=0.95 short", False,
    )  # fmt: skip
    assert judged(3.1, 3.0, at_least=False, device=gpu)[:2] == ("bar x.b 3.100 <=3 short", False)
    # A CPU's figures are none: nothing is short, and nothing looks measured.
    assert judged(0.1, 0.95, at_least=True, device="cpu") == (
        "bar x.b not-measured >=0.95 skipped", True, False, False,
    )  # fmt: skip


def test_a_short_bar_is_exit_status_1(
    fakes: Callable[..., list[Part]], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {**MACHINE, "device": "NVIDIA H200"}
    monkeypatch.setattr(gpu_check, "probe", lambda _: facts)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu_check, "PARTS", tuple(fakes("good")))
    assert gpu_check.main([str(out)]) == 0
    FAKES["low"] = FAKES["good"].replace("3.0, 2.0", "1.0, 2.0")
    monkeypatch.setattr(gpu_check, "PARTS", tuple(fakes("low")))
    assert gpu_check.main([str(out)]) == 1
    monkeypatch.setattr(gpu_check, "probe", lambda _: "no torch")
    assert gpu_check.main([str(out)]) == 2


def test_a_driver_that_is_told_to_end_leaves_nothing_running(
    fakes: Callable[..., list[Part]], out: Path
) -> None:
    (part,) = fakes("hangs")
    code = (
        f"import gpu_check, sys\nfrom pathlib import Path\n"
        f"gpu_check.probe = lambda _: {MACHINE!r}\n"
        f"gpu_check.PARTS = (gpu_check.Part('hangs', 60, Path({str(part.script)!r})),)\n"
        f"sys.exit(gpu_check.main([{str(out)!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}"}
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + LIMIT_S
        child = 0
        while not child and time.monotonic() < deadline:
            time.sleep(0.02)
            if (out / "hangs.json").exists():
                child = on_disk(out, "hangs")["figures"].get("child", 0)
        assert child
        driver.terminate()
        driver.wait(LIMIT_S)
        assert is_gone(child)
    finally:
        driver.kill()


def test_code_is_told_apart_without_git(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "unknown"
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(tmp_path) == "unknown"
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\n1234 refs/heads/main\n")
    assert commit_of(tmp_path) == "1234"
    for folder in ("kernels", "src"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "kernels" / "a.py"
    source.write_text("1")
    before = sources_digest(tmp_path)
    source.write_text("2")
    assert sources_digest(tmp_path) != before
    source.write_text("1")
    assert sources_digest(tmp_path) == before


BLOCK = """
from importlib.machinery import PathFinder

MISSING = ("nvtx", "mooncake", "matplotlib", "pytest", "hypothesis")
find_spec = PathFinder.find_spec

def find(name, path=None, target=None):
    return None if name.partition(".")[0] in MISSING else find_spec(name, path, target)

PathFinder.find_spec = find
"""
"""A `sitecustomize.py`, for every process that finds it: these modules are not installed."""


def test_cheap_parts_run_on_a_cpu_without_what_a_bare_machine_lacks(
    tmp_path: Path, out: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    blocked = subprocess.run(
        [sys.executable, "-c", "import nvtx"], env=environment, capture_output=True, text=True
    )
    assert "No module named 'nvtx'" in blocked.stderr
    command = [sys.executable, str(DRIVER), str(out)]
    for part in ("doctor", "graph"):
        command += ["--only", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert {part["state"] for part in report["parts"].values()} == {"ok"}
    assert list(report["parts"]) == ["doctor", "graph"]
    assert report["machine"]["device"] == "cpu"
    assert report["parts"]["doctor"]["figures"]["nvtx"] == "none"
    assert any("mooncake" in text for text in report["parts"]["doctor"]["left_out"])
    assert "no speed is reported" in done.stdout


def test_every_module_of_kernels_imports_on_a_bare_machine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    modules = [f"kvferry.kernels.{path.stem}" for path in sorted((ROOT / "kernels").glob("*.py"))]
    modules += ["kvferry.linker.waits", "kvferry.tuning.timing", "kvferry.tuning.compiled"]
    code = "import importlib\nfor name in " + repr(modules) + ": importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
