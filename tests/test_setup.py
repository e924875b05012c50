"""The set-up script, the Makefile and CI: that they agree, and that a broken set-up is mended."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE)
CONSTRAINTS = sorted(ROOT.glob("scripts/constraints-*.txt"))


def constraints(path: Path) -> dict[str, Version]:
    """The versions that a constraints file pins, by distribution."""
    pins = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[requirement.name] = Version(specifier.version)
    return pins


def test_scripts_parse_and_can_run() -> None:
    for name in ("scripts/setup.sh", "scripts/setup_engine.sh", ".ci/run"):
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True, timeout=20)
        assert os.access(ROOT / name, os.X_OK), name
        assert "set -euo pipefail" in (ROOT / name).read_text()


def test_every_target_is_phony_and_explained() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()) == sorted(TARGETS)
    shown = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, timeout=20).stdout
    for target in TARGETS:
        assert re.search(rf"make {target} +\w", shown), target


def test_targets_that_texts_name_exist() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    for path in texts:
        named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE)
        assert set(named) <= set(TARGETS), path.name
    ci = (ROOT / ".ci/run").read_text()
    (loop,) = re.findall(r"^for target in (.*); do$", ci, re.MULTILINE)
    assert set(loop.split()) <= set(TARGETS)


def test_files_that_targets_run_exist() -> None:
    paths = re.findall(r"[\w/*-]+\.(?:py|sh|txt)\b", MAKEFILE)
    assert "benchmarks/bench_host.py" in paths
    for path in paths:
        assert any(ROOT.glob(path)), path


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_fit_the_project(path: Path) -> None:
    if tomllib is None:
        pytest.skip("tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [Requirement(text) for text in project["dependencies"]]
    for extra in ("cpu", "cu12", "cu13"):
        ranges += map(Requirement, project["optional-dependencies"][extra])
    pins = constraints(path)
    assert "torch" in pins
    for requirement in ranges:
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_cpu_constraints_name_triton() -> None:
    """A CPU build of torch brings none; a CUDA build pins its own."""
    cpu, newest = (
        constraints(ROOT / f"scripts/constraints-{name}.txt") for name in ("cpu", "newest")
    )
    assert cpu["torch"] == newest["torch"]
    assert cpu["triton"] < newest["triton"]


# -- the script, with a Python that only pretends to install ---------------------------------------

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-m pip install"*) echo "$*" >>"$LOG"; [ ! -e "$BREAK" ] ;;
    *ensurepip*) [ ! -e "$NO_VENV" ] ;;
    *urlopen*) [ -e "$INDEX" ] ;;
    *) exec "$REAL" "$@" ;;
esac
"""


class Clone:
    """A checkout with the real Makefile and script, and a Python that logs its installs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ready = root / ".venv/.kvferry-ready"
        self.log, self.broken, self.index = root / "log", root / "broken", root / "index"
        self.no_venv = root / "no-venv"
        (root / "scripts").mkdir()
        for name in ("Makefile", "pyproject.toml", "scripts/setup.sh"):
            self.copy(name)
        for path in CONSTRAINTS:
            self.copy(f"scripts/{path.name}")
        self.python = root / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.env = {
            **os.environ,
            "PYTHON": str(self.python),
            "REAL": sys.executable,
            "LOG": str(self.log),
            "BREAK": str(self.broken),
            "INDEX": str(self.index),
            "NO_VENV": str(self.no_venv),
        }

    def copy(self, name: str) -> None:
        (self.root / name).write_bytes((ROOT / name).read_bytes())
        (self.root / name).chmod((ROOT / name).stat().st_mode)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=60
        )

    def setup(self, *extras: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/setup.sh", ".venv", *extras)

    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_setup_runs_once(clone: Clone) -> None:
    assert clone.run("make", ".venv/.kvferry-ready").returncode == 0
    assert clone.run("make", ".venv/.kvferry-ready").returncode == 0
    assert len(clone.installs()) == 1
    after = clone.ready.stat().st_mtime_ns + 1_000_000
    os.utime(clone.root / "pyproject.toml", ns=(after, after))
    assert clone.run("make", ".venv/.kvferry-ready").returncode == 0
    assert len(clone.installs()) == 2


def test_setup_takes_the_cpu_build_where_the_index_answers(clone: Clone) -> None:
    assert clone.setup("cpu", "dev").returncode == 0
    clone.index.touch()
    assert clone.setup("cpu", "dev").returncode == 0
    without, with_index = clone.installs()
    assert "-c scripts/constraints-cpu.txt" in without
    assert "-e .[cpu,dev]" in without
    assert "+cpu" not in without
    assert "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu" in with_index


def test_setup_by_name_of_a_cuda_build(clone: Clone) -> None:
    ldconfig = clone.root / "ldconfig"
    ldconfig.write_text("#!/bin/sh\nprintf ' lib%s ' ibverbs.so.1 numa.so.1 curl.so.4 mlx5.so.1\n")
    ldconfig.chmod(0o755)
    clone.env["PATH"] = f"{clone.root}:{clone.env['PATH']}"
    assert clone.setup("cu13").returncode == 0
    (line,) = clone.installs()
    assert "-c scripts/constraints-cu13.txt" in line
    assert "-e .[cu13]" in line
    assert "torch==" not in line


def test_change_during_setup_is_seen(clone: Clone) -> None:
    editing = FAKE_PYTHON.replace('echo "$*"', 'sleep 0.05; touch pyproject.toml; echo "$*"')
    clone.python.write_text(editing)
    assert clone.run("make", ".venv/.kvferry-ready").returncode == 0
    assert clone.run("make", "--question", ".venv/.kvferry-ready").returncode == 1


def test_interrupted_setup_is_made_anew(clone: Clone) -> None:
    clone.broken.touch()
    assert clone.setup().returncode != 0
    assert not clone.ready.exists()
    half = clone.root / ".venv/half-written"
    half.touch()
    clone.broken.unlink()
    assert clone.setup().returncode == 0
    assert clone.ready.exists()
    assert not half.exists()


def test_interrupted_update_is_not_trusted(clone: Clone) -> None:
    assert clone.setup().returncode == 0
    clone.broken.touch()
    assert clone.setup().returncode != 0
    assert not clone.ready.exists()


def test_someone_elses_environment_is_kept(clone: Clone) -> None:
    subprocess.run(
        [clone.python, "-m", "venv", clone.root / ".venv"], check=True, timeout=20, env=clone.env
    )
    theirs = clone.root / ".venv/theirs"
    theirs.touch()
    clone.broken.touch()
    assert clone.setup().returncode != 0
    clone.broken.unlink()
    assert clone.setup().returncode == 0
    assert theirs.exists()


def test_setup_says_what_is_missing(clone: Clone) -> None:
    clone.env["PYTHON"] = "no-such-python"
    done = clone.setup()
    assert done.returncode != 0
    assert "no Python 3.10 to 3.13" in done.stderr

    clone.env["PYTHON"] = str(clone.python)
    clone.no_venv.touch()
    done = clone.setup()
    assert done.returncode != 0
    assert "sudo apt-get install -y python3-venv" in done.stderr

    clone.no_venv.unlink()
    for name, text in (("ldconfig", "echo ' libnuma.so.1 '"), ("id", "echo 1000")):
        (clone.root / name).write_text(f"#!/bin/sh\n{text}\n")
        (clone.root / name).chmod(0o755)
    clone.env["PATH"] = f"{clone.root}:{clone.env['PATH']}"
    done = clone.setup("cpu")
    assert done.returncode != 0
    assert "sudo apt-get install -y --no-install-recommends libibverbs1 libcurl4" in done.stderr
    assert not (clone.root / ".venv").exists()
