"""`python -m kvferry doctor`: what this machine has for kvferry, and what to do about the rest.

Each check takes plain facts, which `kvferry.machine` finds, and returns findings.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from kvferry.machine import (
    Port,
    brought_by_torch,
    dma_buf,
    mooncake_binaries,
    mooncake_folder,
    mooncake_wheels,
    nvidia_gpus,
    rdma_ports,
    read,
    run,
    unresolved,
    usable_gpus,
    version_of,
)

State = Literal["ok", "warn", "miss"]

PYTHONS = ((3, 10), (3, 13))
TRITONS = ((3, 6), (3, 9))
MOONCAKES = ((0, 3, 13), (0, 4, 0))

# The Debian and Ubuntu packages of the libraries that Mooncake's wheels link to and do not carry.
APT_PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libefa.so.1": "libefa1",
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        state: `ok`, `warn` (kvferry runs, something is worse than it could be) or `miss`
            (kvferry cannot run here until it is mended).
        text: what was found.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: State
    text: str
    advice: str = ""


def load(name: str) -> tuple[ModuleType | None, str]:
    """Import a module, or say the reason why it does not import."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == name else str(error)
    except (ImportError, OSError) as error:
        return None, str(error).splitlines()[0]


# -- checks ----------------------------------------------------------------------------------------


def check_system(system: str, python: tuple[int, ...], root: Path = Path("/")) -> Finding:
    """Judge the operating system and Python."""
    match = re.search(r'^PRETTY_NAME="?(.*?)"?$', read(root / "etc/os-release"), re.MULTILINE)
    text = f"{match.group(1) if match else system}, Python {'.'.join(map(str, python[:3]))}"
    if system != "Linux":
        return Finding("system", "miss", text, "use Linux: Mooncake has no build for others")
    if not PYTHONS[0] <= python[:2] <= PYTHONS[1]:
        return Finding("system", "miss", text, "use Python 3.10 to 3.13")
    return Finding("system", "ok", text)


def check_gpu(listed: Sequence[str], usable: Sequence[str]) -> Finding:
    """Compare the GPUs that the driver lists with those that torch can use."""
    text = "; ".join(listed or usable)
    if usable:
        return Finding("gpu", "ok", text)
    if listed:
        advice = "install a CUDA build of torch that fits the driver"
        return Finding("gpu", "warn", f"{text}; torch cannot use it", advice)
    return Finding("gpu", "ok", "none: pages are packed by plain torch on the CPU")


def check_torch(torch: ModuleType | None, reason: str) -> Finding:
    """Name the version of torch and what it was built for."""
    if torch is None:
        return Finding("torch", "miss", reason, "pip install 'torch>=2.8'")
    hip = getattr(torch.version, "hip", None)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    return Finding("torch", "ok", f"{torch.__version__}, {build} build")


def check_triton(triton: ModuleType | None, reason: str) -> Finding:
    """Judge the version of Triton against those that the kernels are known to work with."""
    if triton is None:
        advice = "pip install triton==3.6.0; a CPU build of torch brings none"
        return Finding("triton", "miss", reason, advice)
    text = str(triton.__version__)
    if not TRITONS[0] <= version_of(text)[:2] <= TRITONS[1]:
        return Finding("triton", "warn", text, "known to work: 3.6 to 3.9")
    return Finding("triton", "ok", text)


def check_package(name: str, module: ModuleType | None, reason: str) -> Finding:
    """Look for a dependency of which any version will do."""
    if module is None:
        return Finding(name, "miss", reason, f"pip install {name}")
    return Finding(name, "ok", importlib.metadata.version(name))


def cpu_wheel(wheels: Iterable[str]) -> bool:
    """Tell whether Mooncake was built without CUDA."""
    return any(name.endswith("-non-cuda") for name in wheels)


def check_mooncake(
    wheels: Mapping[str, str], folder: Path | None, usable: Sequence[str]
) -> Finding:
    """Judge Mooncake's wheel: exactly one must be there, of a known version, for this machine."""
    text = ", ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
    if not wheels and folder is None:
        advice = "pip install 'kvferry[cpu]', or [cu12] or [cu13] on a GPU machine"
        return Finding("mooncake", "miss", "not installed", advice)
    if not wheels:
        return Finding("mooncake", "warn", f"{folder}, not from a wheel", "known to work: 0.3.13")
    if len(wheels) > 1:
        advice = f"they overwrite each other: pip uninstall {' '.join(sorted(wheels))}, install one"
        return Finding("mooncake", "miss", text, advice)
    if folder is None:  # as after removing one of two wheels: they share the module's files
        advice = f"pip install --force-reinstall --no-deps {next(iter(wheels))}"
        return Finding("mooncake", "miss", f"{text}, but its module is gone", advice)
    version = version_of(next(iter(wheels.values())))
    if not MOONCAKES[0] <= version < MOONCAKES[1]:
        return Finding("mooncake", "warn", text, "known to work: 0.3.13 and newer of 0.3")
    if usable and cpu_wheel(wheels):
        advice = "install kvferry[cu12] or [cu13] in its place to send device memory"
        return Finding("mooncake", "warn", f"{text}, which cannot read GPU memory", advice)
    return Finding("mooncake", "ok", text)


def check_libraries(missing: Iterable[str], from_torch: Iterable[str] = ()) -> list[Finding]:
    """Name each shared library of the wheel that does not resolve, one line for each."""
    findings = []
    provided = set(from_torch)
    for library in sorted(set(missing) - provided):
        if library in APT_PACKAGES:
            advice = f"sudo apt-get install -y --no-install-recommends {APT_PACKAGES[library]}"
        elif library.startswith(("libcuda.", "libcudart.")):
            advice = "a CUDA wheel; without that CUDA, install the non-cuda wheel in its place"
        elif re.search(r"-[0-9a-f]{8}\.so", library):  # so named by the tool that packs wheels
            advice = "the wheel carries it: pip install --force-reinstall --no-deps that wheel"
        elif re.match(r"[A-Z]+_", library):
            advice = "the wheel was built for a newer distribution; use a newer one"
        else:
            advice = f"install the package that holds {library}"
        findings.append(Finding("mooncake libs", "miss", f"{library} not found", advice))
    if not findings:
        text = "all resolve"
        if provided:
            text += f"; {', '.join(sorted(provided))} once torch is imported"
        findings.append(Finding("mooncake libs", "ok", text))
    return findings


def check_master(folder: Path | None) -> Finding:
    """Tell whether a Mooncake master can be started on this machine."""
    binary = folder / "mooncake_master" if folder else None
    elsewhere = "needed only to start a master here, as the demo and the tests do"
    if binary is None or not binary.exists():
        return Finding("mooncake_master", "warn", "not in the wheel", elsewhere)
    if not os.access(binary, os.X_OK):
        return Finding("mooncake_master", "warn", "not executable", f"chmod +x {binary}")
    code, output = run([str(binary), "--version"])
    first = output.splitlines()[0] if output else f"exit code {code}"
    if code != 0:
        return Finding("mooncake_master", "warn", f"does not run: {first}", elsewhere)
    return Finding("mooncake_master", "ok", first.removeprefix("mooncake_master version "))


def check_gpudirect(usable: Sequence[str], peermem: bool, dmabuf: bool) -> Finding:
    """Tell how a network card can reach GPU memory."""
    if not usable:
        return Finding("gpudirect", "ok", "no GPU to reach")
    if peermem:
        return Finding("gpudirect", "ok", "nvidia_peermem is loaded", "set WITH_NVIDIA_PEERMEM=1")
    if dmabuf:
        return Finding("gpudirect", "ok", "by DMA-BUF", "set WITH_NVIDIA_PEERMEM=0")
    advice = "modprobe nvidia_peermem, or a driver with DMA-BUF (open kernel modules)"
    return Finding("gpudirect", "warn", "neither nvidia_peermem nor DMA-BUF", advice)


def check_rdma(ports: Sequence[Port]) -> Finding:
    """List the RDMA devices, with the state and link layer of each port."""
    if not ports:
        return Finding("rdma", "ok", "no device")
    text = ", ".join(
        f"{port.device}:{port.number} {port.state} {port.link_layer} {port.rate}".strip()
        for port in ports
    )
    if not any(port.active for port in ports):
        return Finding("rdma", "warn", text, "no port is ACTIVE: check cable, switch, subnet")
    return Finding("rdma", "ok", text)


def check_memlock(ports: Sequence[Port], limit: int) -> list[Finding]:
    """Judge the limit on locked memory, which registering with an RDMA device counts against."""
    if not ports:
        return []
    if limit >= 0:  # RLIM_INFINITY is negative
        text = f"{limit // 1024} KiB: registering the staging buffer will fail"
        advice = "ulimit -l unlimited, in Docker --ulimit memlock=-1"
        return [Finding("locked memory", "warn", text, advice)]
    return [Finding("locked memory", "ok", "unlimited")]


def check_environment(env: Mapping[str, str]) -> list[Finding]:
    """Look for variables that change how transfers and streams behave."""
    findings = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            text = f"{name} sets expandable_segments: some Mooncakes cannot register such memory"
            advice = "unset it if registering fails; staging never lies in such segments"
            findings.append(Finding("allocator", "warn", text, advice))
    if env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        text = "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue, no waiting on the device"
        findings.append(Finding("hardware queues", "warn", text, "unset it, or wait by events"))
    limit = env.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER")
    text = f"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER={limit}" if limit else "Mooncake's default queue"
    if limit is None or (limit.isdigit() and int(limit) > 2048):
        findings.append(Finding("tcp queue", "ok", f"{text}; kvferry sets it before set-up"))
    else:
        advice = "unset it: more slices than that to one peer break the channel"
        findings.append(Finding("tcp queue", "warn", text, advice))
    return findings


def conclude(
    ports: Sequence[Port], usable: Sequence[str], gpudirect: bool, cuda_wheel: bool, force_tcp: bool
) -> list[Finding]:
    """Say which protocol will be used, and where the staging buffer will live."""
    active = [port.device for port in ports if port.active]
    rdma = bool(active) and not force_tcp
    if rdma:
        protocol = Finding("protocol", "ok", f"rdma, over {', '.join(dict.fromkeys(active))}")
    else:
        reason = "MC_FORCE_TCP is set" if active else "no RDMA device with an ACTIVE port"
        protocol = Finding("protocol", "ok", f"tcp: {reason}")
    if not usable:
        staging = "ordinary memory: no GPU that torch can use"
    elif rdma and gpudirect and cuda_wheel:
        staging = "device memory: the network card reaches it"
    else:
        reasons = [
            text
            for text, holds in (
                ("the protocol is tcp", not rdma),
                ("no GPUDirect", not gpudirect),
                ("the Mooncake wheel has no CUDA", not cuda_wheel),
            )
            if holds
        ]
        staging = f"pinned host memory: {', '.join(reasons)}"
    return [protocol, Finding("staging", "ok", staging)]


# -- the report ------------------------------------------------------------------------------------


def examine(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> list[Finding]:
    """Return every finding about this machine, in the order of the report."""
    env = os.environ if env is None else env
    findings = [check_system(platform.system(), sys.version_info[:3], root)]
    usable = usable_gpus()
    findings.append(check_gpu(nvidia_gpus(), usable))
    findings.append(check_torch(*load("torch")))
    findings.append(check_triton(*load("triton")))
    findings += [check_package(name, *load(name)) for name in ("numpy", "nvtx")]

    wheels, folder = mooncake_wheels(), mooncake_folder()
    findings.append(check_mooncake(wheels, folder, usable))
    if folder is not None:
        missing = {name for path in mooncake_binaries(folder) for name in unresolved(path)}
        findings += check_libraries(missing, brought_by_torch(missing))
    findings.append(check_master(folder))

    ports = rdma_ports(root)
    peermem = (root / "sys/module/nvidia_peermem").exists()
    dmabuf = bool(usable) and dma_buf()
    findings.append(check_gpudirect(usable, peermem, dmabuf))
    findings.append(check_rdma(ports))
    if ports:
        import resource  # not on every system that can run this report

        findings += check_memlock(ports, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    findings += check_environment(env)
    cuda_wheel = bool(wheels) and not cpu_wheel(wheels)
    force_tcp = env.get("MC_FORCE_TCP", "0") not in ("", "0")
    return findings + conclude(ports, usable, peermem or dmabuf, cuda_wheel, force_tcp)


def main(*, as_json: bool = False) -> int:
    """Print the report; 0 if kvferry can run here, 1 if something that it needs is missing."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            advice = f"  -> {finding.advice}" if finding.advice else ""
            print(f"{finding.state:<4}  {finding.name:<{width}}  {finding.text}{advice}")
    return int(any(finding.state == "miss" for finding in findings))
