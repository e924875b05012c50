"""What a process tells NVTX: runs it with a listener of our own, and reads what it has heard."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvtx_listener.c"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler (cc, gcc or clang) for the listener to NVTX"
)


@dataclass
class Heard:
    """A range that a listener has heard of.

    Attributes:
        thread: that opened it.
        domain, name, category: category by its name.
        colour: ARGB.
        num_bytes, num_pages: its payload; -1 if it had none.
        parents: names of the ranges around it, the outermost first.
        is_closed: whether it ended.
    """

    thread: str
    domain: str
    name: str
    category: str
    colour: int
    num_bytes: int
    num_pages: int
    parents: list[str] = field(default_factory=list)
    is_closed: bool = False


def listener(folder: Path) -> Path:
    """Compile the listener, and return the library."""
    assert COMPILER is not None
    library = folder / "nvtx_listener.so"
    command = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return library


def listen(
    folder: Path, command: Sequence[str], **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[Heard]]:
    """Run a command with the listener; return what it printed, and the ranges in their order."""
    events = folder / "events"
    environment = {
        **os.environ,
        "NVTX_INJECTION64_PATH": str(listener(folder)),
        "NVTX_LISTENER_FILE": str(events),
        **variables,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    text = events.read_text(encoding="utf-8") if events.exists() else ""
    return done, ranges_of(text.splitlines())


def ranges_of(lines: Sequence[str]) -> list[Heard]:
    """Return the ranges that lines of the listener's file tell of, in the order of their begin."""
    found: list[Heard] = []
    categories: dict[tuple[str, str], str] = {}
    stacks: dict[tuple[str, str], list[Heard]] = {}
    for line in lines:
        thread, event, domain, *rest = line.split("\t")
        stack = stacks.setdefault((thread, domain), [])
        if event == "category":
            categories[domain, rest[0]] = rest[1]
        elif event == "push":
            name, category, colour, num_bytes, num_pages = rest
            found.append(
                Heard(
                    thread,
                    domain,
                    name,
                    categories.get((domain, category), ""),
                    int(colour, 16),
                    int(num_bytes),
                    int(num_pages),
                    [outer.name for outer in stack],
                )
            )
            stack.append(found[-1])
        elif event == "pop":
            assert stack, f"thread {thread} closed a range of {domain} that it had not opened"
            stack.pop().is_closed = True
        else:
            assert event == "string", f"{line!r} is of no kind that kvferry emits"
    return found
