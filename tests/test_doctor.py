"""The doctor: each finding from plain facts, and a whole report on this machine."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from kvferry import doctor, machine
from kvferry.__main__ import main
from kvferry.doctor import Finding
from kvferry.machine import Port

H200 = ["NVIDIA H200"]
ACTIVE = Port("mlx5_0", "1", "ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")
DOWN = Port("mlx5_1", "1", "DOWN", "Ethernet", "")
CPU = {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
CUDA = {"mooncake-transfer-engine": "0.3.13.post1"}


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def module(**attributes: object) -> ModuleType:
    return cast(ModuleType, SimpleNamespace(**attributes))


def states(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


# -- facts -----------------------------------------------------------------------------------------


def test_run_reports_what_does_not_start_or_end(tmp_path: Path) -> None:
    assert machine.run(["/nowhere/tool"]) == (127, "/nowhere/tool: No such file or directory")
    slow = str(executable(tmp_path / "slow", "exec sleep 60"))
    assert machine.run([slow], seconds=0.2) == (127, f"{slow}: no answer in 0 s")


@pytest.mark.parametrize(
    ("text", "version"),
    [("3.6.0", (3, 6, 0)), ("2.13.0+cpu", (2, 13, 0)), ("0.3.13.post1", (0, 3, 13)), ("dev", ())],
)
def test_version_of(text: str, version: tuple[int, ...]) -> None:
    assert machine.version_of(text) == version


def test_rdma_ports(tmp_path: Path) -> None:
    assert machine.rdma_ports(tmp_path) == []
    for device, state, layer in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "Ethernet"),
    ):
        port = tmp_path / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    assert machine.rdma_ports(tmp_path) == [ACTIVE, DOWN]
    assert ACTIVE.active
    assert not DOWN.active


def test_nvidia_gpus(tmp_path: Path) -> None:
    smi = executable(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 143771 MiB, 580.95.05'")
    assert machine.nvidia_gpus(str(smi)) == ["NVIDIA H200, 143771 MiB, 580.95.05"]
    broken = executable(tmp_path / "broken", "echo 'no devices were found'; exit 9")
    assert machine.nvidia_gpus(str(broken)) == []
    assert machine.nvidia_gpus("/nowhere/nvidia-smi") == []


def test_mooncake_wheels(tmp_path: Path) -> None:
    for name in ("mooncake_transfer_engine", "mooncake_transfer_engine_cuda13", "torch"):
        info = tmp_path / f"{name}-0.3.13.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.13\n")
    assert machine.mooncake_wheels([str(tmp_path)]) == {
        "mooncake-transfer-engine": "0.3.13",
        "mooncake-transfer-engine-cuda13": "0.3.13",
    }


def test_unresolved_libraries_by_name(tmp_path: Path) -> None:
    (tmp_path / "output").write_text(
        "store.so: /lib/libc.so.6: version `GLIBC_2.38' not found (required by store.so)\n"
        "\tlinux-vdso.so.1 (0x00007ffd)\n"
        "\tlibibverbs.so.1 => not found\n"
        "\tlibnuma.so.1 => /lib/x86_64-linux-gnu/libnuma.so.1 (0x00007f86)\n"
        "\tlibcurl.so.4 => not found\n"
    )
    ldd = executable(tmp_path / "ldd", f"cat {tmp_path}/output")
    missing = machine.unresolved(tmp_path / "store.so", str(ldd))
    assert missing == {"GLIBC_2.38", "libibverbs.so.1", "libcurl.so.4"}


def test_unresolved_without_ldd(tmp_path: Path) -> None:
    assert machine.unresolved(tmp_path / "master", "/nowhere/ldd") == set()
    missing = machine.unresolved(Path("libnowhere.so"), "/nowhere/ldd")  # not there itself
    assert missing == {"libnowhere.so"}


def test_unresolved_libraries_of_this_machine() -> None:
    assert machine.unresolved(Path(sys.executable)) == set()


def test_libraries_brought_by_torch(tmp_path: Path) -> None:
    library = tmp_path / "nvidia/cuda_runtime/lib/libcudart.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    needed = {"libcudart.so.12", "libcuda.so.1"}
    assert machine.brought_by_torch(needed, [str(tmp_path)]) == {"libcudart.so.12"}


# -- checks ----------------------------------------------------------------------------------------


def test_system(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 13"\n')
    found = doctor.check_system("Linux", (3, 13, 1), tmp_path)
    assert (found.state, found.text) == ("ok", "Debian GNU/Linux 13, Python 3.13.1")
    assert doctor.check_system("Linux", (3, 9, 18), tmp_path).state == "miss"
    assert doctor.check_system("Linux", (3, 14, 0), tmp_path).state == "miss"
    assert doctor.check_system("Darwin", (3, 12, 0), tmp_path).state == "miss"


def test_gpu() -> None:
    assert doctor.check_gpu([], []).state == "ok"
    assert doctor.check_gpu(["NVIDIA H200, 143771 MiB, 580.95"], H200).state == "ok"
    unusable = doctor.check_gpu(["NVIDIA H200, 143771 MiB, 580.95"], [])
    assert (unusable.state, "CUDA build" in unusable.advice) == ("warn", True)


def test_torch_and_triton() -> None:
    cuda = module(__version__="2.13.0", version=SimpleNamespace(cuda="13.0", hip=None))
    assert doctor.check_torch(cuda, "").text == "2.13.0, CUDA 13.0 build"
    rocm = module(__version__="2.13.0", version=SimpleNamespace(cuda=None, hip="7.1"))
    assert doctor.check_torch(rocm, "").text == "2.13.0, ROCm 7.1 build"
    broken = doctor.check_torch(None, "libcudart.so.13: cannot open shared object file")
    assert (broken.state, broken.text.split(":")[0]) == ("miss", "libcudart.so.13")

    assert doctor.check_triton(None, "not installed").state == "miss"
    for version, state in (
        ("3.5.1", "warn"),
        ("3.6.0", "ok"),
        ("3.9.2+git1", "ok"),
        ("3.10.0", "warn"),
    ):
        assert doctor.check_triton(module(__version__=version), "").state == state


def test_mooncake_wheel() -> None:
    here = Path("/site-packages/mooncake")
    assert doctor.check_mooncake({}, None, []).state == "miss"
    assert doctor.check_mooncake({}, here, []).state == "warn"
    assert doctor.check_mooncake(CPU, here, []).state == "ok"
    assert doctor.check_mooncake(CPU, here, H200).state == "warn"
    assert doctor.check_mooncake(CUDA, here, H200).state == "ok"
    assert doctor.check_mooncake(CUDA, None, H200).state == "miss"
    for version in ("0.3.12.post1", "0.4.0"):
        assert (
            doctor.check_mooncake({"mooncake-transfer-engine": version}, here, []).state == "warn"
        )
    both = doctor.check_mooncake(CPU | CUDA, here, [])
    assert both.state == "miss"
    assert "mooncake-transfer-engine mooncake-transfer-engine-non-cuda" in both.advice


def test_missing_libraries_each_with_its_package() -> None:
    (fine,) = doctor.check_libraries([])
    assert (fine.state, fine.text) == ("ok", "all resolve")
    needed = ["libibverbs.so.1", "libcurl.so.4", "libcudart.so.12", "GLIBC_2.38", "libother.so.1"]
    needed.append("libglog-6ed04f2c.so.0.0.0")
    findings = {found.text.split()[0]: found for found in doctor.check_libraries(needed)}
    assert set(findings) == set(needed)
    assert {found.state for found in findings.values()} == {"miss"}
    assert findings["libibverbs.so.1"].advice.endswith(" libibverbs1")
    assert findings["libcurl.so.4"].advice.endswith(" libcurl4")
    assert "non-cuda" in findings["libcudart.so.12"].advice
    assert "reinstall" in findings["libglog-6ed04f2c.so.0.0.0"].advice
    assert "distribution" in findings["GLIBC_2.38"].advice
    assert "libother.so.1" in findings["libother.so.1"].advice
    (provided,) = doctor.check_libraries(["libcudart.so.12"], ["libcudart.so.12"])
    assert (provided.state, "libcudart.so.12 once torch" in provided.text) == ("ok", True)


def test_master(tmp_path: Path) -> None:
    assert doctor.check_master(None).state == "warn"
    assert doctor.check_master(tmp_path).state == "warn"
    script = "[ $1 = --version ] && echo mooncake_master version 0.3.13"
    binary = executable(tmp_path / "mooncake_master", script)
    assert doctor.check_master(tmp_path) == Finding("mooncake_master", "ok", "0.3.13")
    binary.chmod(0o644)
    assert "chmod" in doctor.check_master(tmp_path).advice
    executable(binary, "echo 'error while loading shared libraries: libnuma.so.1' >&2; exit 127")
    assert "libnuma.so.1" in doctor.check_master(tmp_path).text


def test_gpudirect_and_rdma() -> None:
    assert doctor.check_gpudirect([], peermem=True, dmabuf=False).text == "no GPU to reach"
    assert "PEERMEM=1" in doctor.check_gpudirect(H200, peermem=True, dmabuf=True).advice
    assert "PEERMEM=0" in doctor.check_gpudirect(H200, peermem=False, dmabuf=True).advice
    assert doctor.check_gpudirect(H200, peermem=False, dmabuf=False).state == "warn"
    assert doctor.check_rdma([]).state == "ok"
    assert doctor.check_rdma([DOWN]).state == "warn"
    both = doctor.check_rdma([ACTIVE, DOWN])
    assert both.state == "ok"
    assert "mlx5_0:1 ACTIVE InfiniBand 400 Gb/sec" in both.text
    assert "mlx5_1:1 DOWN Ethernet" in both.text


def test_locked_memory() -> None:
    assert doctor.check_memlock([], 8 << 20) == []
    assert states(doctor.check_memlock([ACTIVE], 8 << 20)) == {"locked memory": "warn"}
    assert states(doctor.check_memlock([ACTIVE], -1)) == {"locked memory": "ok"}


def test_environment() -> None:
    assert states(doctor.check_environment({})) == {"tcp queue": "ok"}
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "2048",
    }
    names = {"allocator", "hardware queues", "tcp queue"}
    assert states(doctor.check_environment(env)) == dict.fromkeys(names, "warn")
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }
    assert states(doctor.check_environment(env)) == {"tcp queue": "ok"}


@pytest.mark.parametrize(
    ("ports", "usable", "gpudirect", "cuda_wheel", "force_tcp", "protocol", "staging"),
    [
        ([], [], False, False, False, "tcp: no RDMA device", "ordinary memory"),
        ([DOWN], [], False, False, False, "tcp: no RDMA device", "ordinary memory"),
        ([ACTIVE, DOWN], [], False, False, False, "rdma, over mlx5_0", "ordinary memory"),
        ([ACTIVE], H200, True, True, False, "rdma", "device memory"),
        ([ACTIVE], H200, True, True, True, "tcp: MC_FORCE_TCP", "pinned host memory: the protocol"),
        ([ACTIVE], H200, False, True, False, "rdma", "pinned host memory: no GPUDirect"),
        ([ACTIVE], H200, True, False, False, "rdma", "pinned host memory: the Mooncake wheel"),
        ([], H200, True, True, False, "tcp", "pinned host memory: the protocol is tcp"),
    ],
)
def test_conclusion(
    ports: list[Port],
    usable: list[str],
    gpudirect: bool,
    cuda_wheel: bool,
    force_tcp: bool,
    protocol: str,
    staging: str,
) -> None:
    found = doctor.conclude(ports, usable, gpudirect, cuda_wheel, force_tcp)
    assert [finding.name for finding in found] == ["protocol", "staging"]
    assert found[0].text.startswith(protocol)
    assert found[1].text.startswith(staging)


# -- the report ------------------------------------------------------------------------------------


def test_report_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    findings = [Finding(**fields) for fields in json.loads(capsys.readouterr().out)]
    names = [finding.name for finding in findings]
    assert names[:3] == ["system", "gpu", "torch"]
    assert names[-2:] == ["protocol", "staging"]
    assert code == int(any(finding.state == "miss" for finding in findings))

    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [finding.state for finding in findings]


def test_report_of_a_machine_with_rdma(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    findings = {found.name: found for found in doctor.examine(tmp_path, {})}
    assert findings["protocol"].text == "rdma, over mlx5_0"
    assert "locked memory" in findings


def test_report_where_nothing_is_installed() -> None:
    """In a process of its own, where the imports fail as they do without the packages."""
    script = (
        "import sys\n"
        "for name in ('torch', 'triton', 'numpy', 'nvtx', 'mooncake'): sys.modules[name] = None\n"
        "from kvferry.__main__ import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    for name in ("torch", "triton", "numpy", "nvtx"):
        assert any(line.split()[:2] == ["miss", name] for line in done.stdout.splitlines())


def test_mooncake_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from kvferry.doctor import main\n"
        "main()\n"
        "sys.exit(any(name.split('.')[0] == 'mooncake' for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--colour"])
