"""Which GPU a sweep is for: this machine's, one that is compiled for alone, or none."""

import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import triton

import kvferry.launch
from kvferry.errors import ArgumentError
from kvferry.machine import nvidia_gpus, run
from kvferry.tuned import DEFAULT_NAME, begins
from kvferry.tuning.derive import GPUS

INTERPRETER = "CPU interpreter"
"""The «GPU» of figures that Triton's interpreter gave: they say nothing about any GPU."""

_CHECKOUT = Path(__file__).resolve().parent.parent
_PACKAGE = Path(kvferry.launch.__file__).parent


@dataclass(frozen=True)
class Target:
    """What is tuned.

    Attributes:
        gpu: its name, as files have it.
        device_names: beginnings of the names that torch reports for it; none for a CPU.
        architecture: `sm_90`, `gfx942`, `interpreter`.
        device: where it runs; None if it is compiled for alone.
        stem: the name of its files.
    """

    gpu: str
    device_names: tuple[str, ...]
    architecture: str
    device: torch.device | None
    stem: str

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run in the interpreter."""
        return self.gpu == INTERPRETER

    def about(self) -> dict[str, str]:
        """Return what figures must be read with: machine, driver, versions, commit, sources."""
        return {
            "gpu": self.gpu,
            "driver": "none" if self.is_cpu else _driver(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": _commit(),
            "sources": _sources(),
        }


def named(name: str) -> Target:
    """Return a GPU that nobody has to have.

    Raises:
        ArgumentError: it is not known.
    """
    known = [stem for stem in GPUS if stem != DEFAULT_NAME]
    if name not in known:
        raise ArgumentError(f"gpu is {name!r}, wanted one of {', '.join(known)}")
    arch, device_names = GPUS[name]
    return Target(device_names[0], device_names, arch, None, name)


def here() -> Target:
    """Return this machine's first GPU, or the interpreter if TRITON_INTERPRET is set.

    Raises:
        ArgumentError: there is neither.
    """
    if is_interpreter_wanted():
        cpu = torch.device("cpu")
        return Target(INTERPRETER, (), "interpreter", cpu, INTERPRETER.replace(" ", "_"))
    if not torch.cuda.is_available():
        raise ArgumentError(
            "torch finds no GPU here: --dry-run --gpu NAME plans for one that is elsewhere, "
            "TRITON_INTERPRET=1 tries the command out in Triton's interpreter"
        )
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    for stem, (arch, device_names) in GPUS.items():
        if any(begins(name, beginning) for beginning in device_names):
            return Target(device_names[0], device_names, arch, device, stem)
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    return Target(name, (name,), arch.partition(":")[0], device, name.replace(" ", "_"))


def is_interpreter_wanted() -> bool:
    """Whether TRITON_INTERPRET is set: kernels have no machine code then."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _driver() -> str:
    rows = nvidia_gpus()
    return rows[0].rpartition(",")[2].strip() if rows else "unknown"


def _sources() -> str:
    """Return a hash of the code that moves pages and that times it."""
    paths = [path for name in ("kernels", "tuning") for path in (_PACKAGE / name).glob("*.py")]
    texts = [path.read_bytes() for path in sorted([*paths, _PACKAGE / "launch.py"])]
    return blake2b(b"".join(texts), digest_size=6).hexdigest()


def _commit() -> str:
    """Return the commit of the checkout that this file is in, `-changed` behind it if it is."""
    git = ["git", "-C", str(_CHECKOUT)]
    code, top = run([*git, "rev-parse", "--show-toplevel"])
    if code or Path(top).resolve() != _CHECKOUT:
        return "unknown"
    _, commit = run([*git, "rev-parse", "--short", "HEAD"])
    _, changed = run([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-changed" if changed else commit
