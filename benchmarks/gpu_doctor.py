"""Part `doctor` of the GPU check: what this machine has, and how its GPU's clocks stand."""

import importlib.util
import shutil

from gpu_part import Check

NEEDED = ("system", "torch", "triton", "numpy")
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,pstate"


def run(check: Check) -> None:
    """Report kvferry's findings, tools and clocks.

    The check itself needs no Mooncake and no nvtx: that they are missing is told, not judged.
    """
    from kvferry import doctor, machine

    check.step("kvferry doctor")
    findings = doctor.examine()
    for finding in findings:
        print(f"{finding.state:<4}  {finding.name}  {finding.text}  {finding.advice}")
    needed = [each for each in findings if each.state == "miss" and each.name in NEEDED]
    if needed:
        raise AssertionError("; ".join(f"{each.name}: {each.text}" for each in needed))
    for finding in findings:
        if finding.state != "ok":
            check.left_out(f"{finding.name}: {finding.text}")
    for tool in ("ncu", "nsys", "compute-sanitizer"):
        check.figure(tool, shutil.which(tool) or "none")
    check.figure("nvtx", "there" if importlib.util.find_spec("nvtx") else "none")
    if check.on_gpu:
        check.step("clocks")
        code, text = machine.run(["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"])
        check.figure("clocks", text if code == 0 else f"unknown: {text.splitlines()[0]}")
    gpu = next(each.text for each in findings if each.name == "gpu")
    check.summary(f"{len(findings)} findings; gpu: {gpu}")
