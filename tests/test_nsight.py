"""`make nsys` and `make ncu`: what they call, and what they say where there is nothing to call."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "nsight.sh"
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/}" "$@" > "$ARGUMENTS_FILE"
exit 7
"""

Run = Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the script with nothing in PATH but what it needs, and fakes of some tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "mkdir"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)

    def call(
        arguments: Sequence[str], *tools: str, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        for tool in tools:
            (folder / tool).write_text(FAKE, encoding="utf-8")
            (folder / tool).chmod(0o755)
        arguments_file = tmp_path / "arguments"
        environment = {"PATH": str(folder), "ARGUMENTS_FILE": str(arguments_file), **variables}
        done = subprocess.run(
            [str(SCRIPT), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
        given = arguments_file.read_text(encoding="utf-8") if arguments_file.exists() else ""
        return done, given.splitlines()

    return call


def test_nsys_records_the_whole_command(run: Run, tmp_path: Path) -> None:
    done, given = run(["nsys", "python", "-c", "a b"], "nsys")
    assert done.returncode == 7, done.stderr  # the tool's own
    assert given[:2] == ["nsys", "profile"]
    assert given[-3:] == ["python", "-c", "a b"]
    options = given[2:-3]
    assert {"--trace=cuda,nvtx,osrt", "--stats=true", "--output=nsight/kvferry"} < set(options)
    assert not any("capture" in option for option in options)
    assert (tmp_path / "nsight").is_dir()


def test_nsys_records_a_range(run: Run) -> None:
    _, given = run(["nsys", "true"], "nsys", RANGE="load layers", OUT="elsewhere")
    assert {"--capture-range=nvtx", "--nvtx-capture=load layers@kvferry"} < set(given)
    assert {"--capture-range-end=stop", "--output=elsewhere/kvferry"} < set(given)


def test_nsys_leaves_the_range_to_the_command(run: Run) -> None:
    _, given = run(["nsys", "true"], "nsys", RANGE="cuda")
    assert "--capture-range=cudaProfilerApi" in given
    assert not any("nvtx-capture" in one for one in given)


@pytest.mark.parametrize(
    ("variables", "wanted", "launches"),
    [
        ({}, "regex:kvferry@.+/", "20"),
        ({"RANGE": "pack objects", "LAUNCHES": "3"}, "regex:kvferry@pack objects/", "3"),
    ],
    ids=["all", "some"],
)
def test_ncu_profiles_kernels_inside_ranges(
    run: Run, variables: dict[str, str], wanted: str, launches: str
) -> None:
    done, given = run(["ncu", "python", "x.py"], "ncu", **variables)
    assert done.returncode == 7, done.stderr
    assert given[0] == "ncu"
    assert given[-2:] == ["python", "x.py"]
    assert given[1] == "--nvtx"

    def after(option: str) -> str:
        return given[given.index(option) + 1]

    assert after("--nvtx-include") == wanted
    assert after("--kernel-name") == "regex:_move_(tiles|units)_kernel"
    assert after("--launch-count") == launches
    assert after("--set") == "full"
    assert after("--target-processes") == "all"
    assert after("--export") == "nsight/kvferry"


def test_ncu_names_kernels_that_there_are() -> None:
    for name in ("tiles", "units"):
        text = (ROOT / "kernels" / f"{name}.py").read_text(encoding="utf-8")
        assert f"def _move_{name}_kernel(" in text


@pytest.mark.parametrize(
    ("tool", "other", "page"),
    [
        ("nsys", "ncu", "https://developer.nvidia.com/nsight-systems"),
        ("ncu", "nsys", "https://developer.nvidia.com/nsight-compute"),
    ],
)
def test_a_tool_that_is_missing(run: Run, tmp_path: Path, tool: str, other: str, page: str) -> None:
    done, given = run([tool, "true"], other)
    assert done.returncode == 1
    assert given == []
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nsight: {tool} is not in PATH")
    assert page in line
    assert not (tmp_path / "nsight").exists()


@pytest.mark.parametrize("arguments", [[], ["perf", "true"], ["nsys"]])
def test_wrong_arguments(run: Run, arguments: list[str]) -> None:
    done, given = run(arguments, "nsys", "ncu")
    assert done.returncode == 1
    assert given == []
    assert "scripts/nsight.sh" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", ["nsys", "ncu"])
def test_make_wraps_the_demo_or_any_command(target: str) -> None:
    def recipe(*settings: str) -> str:
        done = subprocess.run(
            ["make", "--dry-run", target, *settings],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"scripts/nsight.sh {target} python -m kvferry demo" in recipe()
    other = recipe("CMD=python x.py --out y", "RANGE=load", "OUT=z")
    assert f"scripts/nsight.sh {target} python x.py --out y" in other
    assert 'RANGE="load"' in other
    assert 'OUT="z"' in other
