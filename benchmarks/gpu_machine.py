"""The machine that the GPU check runs on, as facts to read its figures with; prints them as JSON.

Run in a process of its own: a broken driver can hang or crash whoever asks it first.
"""

import hashlib
import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("kernels", "linker", "tuning", "src", "benchmarks")


def sources_digest(root: Path = ROOT) -> str:
    """Return a digest of the code that the check runs, committed or not."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and "results" not in path.parts and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit_of(root: Path = ROOT) -> str:
    """Return the checkout's commit, read without git; `unknown` where there is none to read."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text(encoding="utf-8").strip()
        for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
            commit, _, found = line.partition(" ")
            if found == name:
                return commit
    except OSError:
        return "unknown"
    return "unknown"


def facts() -> dict[str, Any]:
    """Return device, versions, commit and date; `device` is `cpu` where torch sees no GPU."""
    import torch
    import triton

    from kvferry.machine import nvidia_gpus

    found: dict[str, Any] = {
        "device": "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": commit_of(),
        "sources": sources_digest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        listed = nvidia_gpus()
        found |= {
            "device": torch.cuda.get_device_name(0),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", 0),  # AMD's may name none
            "driver": listed[0].rpartition(", ")[2] if listed else "unknown",
        }
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
    sys.exit(0)
