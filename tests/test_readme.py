"""README: its example runs as it stands, and what it names is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def code(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.mooncake
def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = code("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    path = tmp_path / "example.py"
    path.write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_linked_files_are_there() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for text in texts:
        for link in re.findall(r"\]\(([^)#]+)", text.read_text()):
            if "://" not in link:
                assert (text.parent / link).exists(), f"{text.name} links {link}"


def test_figures_in_the_texts_are_those_recorded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CURRENT], cwd=ROOT / "benchmarks", capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


CURRENT = """
import figures
readme, measured = figures.ROOT / "README.md", figures.ROOT / "docs" / "measured.md"
assert readme.read_text() == figures.readme(readme.read_text()), "README.md: run make figures"
assert measured.read_text() == figures.measured(), "docs/measured.md: run make figures"
"""
