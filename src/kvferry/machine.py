"""What this machine has, as plain facts: GPUs, network cards, Mooncake's wheel, its libraries.

Nothing that may be missing or broken is imported at module level, and Mooncake is never imported:
a wheel whose libraries do not resolve is found by asking the linker, not by loading it.
"""

import ctypes
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

MOONCAKE_PREFIX = "mooncake-transfer-engine"
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


class Port(NamedTuple):
    """One port of an RDMA device, as the kernel describes it."""

    device: str
    number: str
    state: str
    link_layer: str
    rate: str

    @property
    def active(self) -> bool:
        """Whether the port can carry traffic now."""
        return self.state == "ACTIVE"


def run(command: Sequence[str], seconds: float = 20) -> tuple[int, str]:
    """Run a command; its exit code and output, or 127 and why it did not start or end."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return 127, f"{command[0]}: no answer in {seconds:.0f} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return done.returncode, done.stdout.strip()


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `3.6.0+git1` is (3, 6, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def read(path: Path) -> str:
    """Return a small file's text, or nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvidia_gpus(command: str = "nvidia-smi") -> list[str]:
    """Return name, memory and driver version of each GPU that the driver lists."""
    query = "--query-gpu=name,memory.total,driver_version"
    code, output = run([command, query, "--format=csv,noheader"])
    return [line.strip() for line in output.splitlines() if line.strip()] if code == 0 else []


def usable_gpus() -> list[str]:
    """Return the names of the GPUs that torch can use; none without a torch that imports."""
    try:
        import torch
    except (ImportError, OSError):
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def rdma_ports(root: Path = Path("/")) -> list[Port]:
    """Return every port of every RDMA device under `/sys/class/infiniband`."""
    ports = []
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = read(path / "state").rpartition(": ")[2]  # the file says `4: ACTIVE`
        layer, rate = read(path / "link_layer"), read(path / "rate")
        ports.append(Port(path.parent.parent.name, path.name, state, layer, rate))
    return ports


def dma_buf() -> bool:
    """Tell whether the first GPU's driver exports its memory as DMA-BUF."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, value = ctypes.c_int(), ctypes.c_int()
    return (
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(value), DMA_BUF_SUPPORTED, device) == 0
        and value.value == 1
    )


def mooncake_wheels(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return every installed distribution of Mooncake's transfer engine, with its version."""
    where = sys.path if path is None else path
    wheels: dict[str, str] = {}
    for found in importlib.metadata.distributions(path=list(where)):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
        if name.startswith(MOONCAKE_PREFIX):
            wheels.setdefault(name, found.version)
    return wheels


def mooncake_folder() -> Path | None:
    """Find the module `mooncake`; a top-level module is found without being imported."""
    try:
        spec = importlib.util.find_spec("mooncake")
    except ValueError:  # a module that something put into sys.modules by hand
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def mooncake_binaries(folder: Path) -> list[Path]:
    """Return what kvferry loads or starts of the wheel; the rest needs torch loaded first."""
    patterns = ("store*.so", "_store*.so", "engine*.so", "_engine*.so", "mooncake_master")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def unresolved(binary: Path, ldd: str = "ldd") -> set[str]:
    """Return the libraries that a binary needs and the dynamic linker does not find."""
    code, output = run([ldd, str(binary)])
    if code == 127 and binary.suffix == ".so":
        try:  # no ldd: load it; the error names the first library only
            ctypes.CDLL(str(binary))
        except OSError as error:
            output = re.sub(r"^(\S+): cannot open shared object.*", r"\1 => not found", str(error))
    missing = set(re.findall(r"^\s*(\S+) => not found", output, flags=re.MULTILINE))
    return missing | set(re.findall(r"version `(\S+)' not found", output))


def brought_by_torch(libraries: Iterable[str], path: Sequence[str] | None = None) -> set[str]:
    """Return those that NVIDIA's wheels beside torch hold: importing torch loads them."""
    folders = [Path(entry) / "nvidia" for entry in (sys.path if path is None else path)]
    return {
        library
        for library in libraries
        if any(True for folder in folders for _ in folder.glob(f"*/lib/{library}"))
    }
