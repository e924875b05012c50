"""Where documents get their figures from: runs the demo and the benchmarks, then fills the texts.

`make figures` measures anew: `benchmarks/results/*.json`, with date, machine and versions. With
`--texts` it only writes README's table and `docs/measured.md` from them; a test keeps both so.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bars import RESULTS, machine, table

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = {
    "host": ("make bench-host", "How much Python runs before the bytes of a save move?"),
    "ranges": (
        "make bench-ranges",
        "What do NVTX ranges cost a transfer of one part, beyond functions without any?",
    ),
    "sass": ("make bench-sass", "What does the compiler make of the kernels that transfers use?"),
    "pack_cpu": (
        "make bench-pack",
        "What does the torch reference cost on a CPU, with and without checksums? Columns are "
        "shares of a copy's rate; they say nothing about a GPU.",
    ),
    "transport": ("make bench-transport", "Do packed pages reach Mooncake's own contiguous rate?"),
    "direct": (
        "make bench-direct",
        "From which page size on should saves leave straight from the pools, where a page lies "
        "there in one piece? 32 MiB by two linkers without checksums, over the same pools and one "
        "connection: a remote owner over TCP loopback, wall times of whole saves. The bars judge "
        "the sizes that `min_direct_bytes` lets go.",
    ),
    "layers": (
        "make bench-layers",
        "Packed layer groups beside ranges of every layer straight from the pools, as a linker "
        "without packing sends them: DeepSeek-V3.2's geometry, a remote owner over TCP loopback. "
        "The bars judge the linker without checksums, since the ranges have none.",
    ),
    "sglang": (
        "make bench-sglang",
        "kvferry's linker beside SGLang 0.5.23's own: in one process, over the same pools of "
        "SGLang's and the same Mooncake, driven by the same transfers, with all layers of the "
        "models. First Python alone: processor time of all threads, against a client that answers "
        "at once. Then wall times, a warm remote owner over TCP loopback, every byte compared: "
        "medians (least..most). Ratio: how often the first linker's time contains this one's, the "
        "median over rounds. The wall bars judge the linker without checksums, since SGLang's has "
        "none. Last, what SGLang's linker says to models that it refuses.",
    ),
    "vllm": (
        "make bench-vllm",
        "How much Python runs before the bytes of a prefix move: keys and descriptors by vLLM "
        "0.33's own MooncakeStoreConnector code, beside all that kvferry does until its store "
        "calls. Processor time of one thread, medians of calls made twice running (cold: ratios of "
        "the first ones, behind the other side); no bytes move. Values: `prepare_values` "
        "alone; first: until the first of kvferry's store calls. Pools are shrunk to 512 blocks, "
        "layers and blocks are real.",
    ),
    "overlap": (
        "make bench-overlap",
        "Does compute hide a layer-wise load, but for its first group? A simulated model on a CPU, "
        "a remote owner over TCP loopback.",
    ),
    "soak": (
        "make soak",
        "What comes of ten minutes of saves, loads, cancels and faults, by callers side by side?",
    ),
}
APART = ("soak", "sglang", "vllm")
"""Recorded on their own: `python benchmarks/soak.py --minutes 10 --write`, for it takes long; `make
bench-sglang WRITE=1` and `make bench-vllm WRITE=1`, in environments with engines; then
`figures.py --texts`."""


def measure() -> int:
    """Run everything and record it; return the first exit status that is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo"], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        print(done.stdout, done.stderr)
        return done.returncode
    RESULTS.mkdir(exist_ok=True)
    record = {"machine": machine(), "lines": done.stdout.splitlines()}
    (RESULTS / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in (name for name in BENCHMARKS if name not in APART):
        script = Path(__file__).parent / f"bench_{name.split('_')[0]}.py"
        status = subprocess.run([sys.executable, str(script), "--write"], timeout=600).returncode
        if status:
            return status
    return 0


def load(name: str) -> dict[str, Any]:
    """Return a recorded result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def readme(text: str) -> str:
    """Return README with the recorded demo's output in its place."""
    demo = load("demo")
    caption = f"`make demo`, {_where(demo['machine'])}; every figure is in docs/measured.md."
    body = "\n".join(demo["lines"])
    filled = f"<!-- demo -->\n```\n{body}\n```\n\n{caption}\n<!-- /demo -->"
    return re.sub(r"<!-- demo -->.*?<!-- /demo -->", lambda _: filled, text, flags=re.DOTALL)


def measured() -> str:
    """Return `docs/measured.md`."""
    parts = [
        "# Measured",
        "Written by `make figures`, which runs the commands named here; never by hand. Single "
        "figures wander by a third on a shared machine: ratios are from one run, turn by turn.",
        "GPU figures (pack and unpack beside `Tensor.copy_`, the demo on a GPU): «not measured»; "
        "how they will be, and against which bars: [gpu-check.md](gpu-check.md).",
    ]
    demo = load("demo")
    parts += ["## `make demo`", _where(demo["machine"]), _fenced("\n".join(demo["lines"]))]
    for name, (command, question) in BENCHMARKS.items():
        if not (RESULTS / f"{name}.json").exists():
            parts += [f"## `{command}`", f"{question} «not measured»."]
            continue
        result = load(name)
        bars = [
            {
                "bar": bar["name"],
                "value": f"{bar['value']:.3f}",
                "wanted": f"{'>=' if bar['at_least'] else '<='} {bar['wanted']:g}",
            }
            for bar in result["bars"]
        ]
        parts += [f"## `{command}`", f"{question} {_where(result['machine'])}."]
        tables = (result["rows"], *result.get("more", ()), bars)
        parts += [_fenced(table(rows)) for rows in tables if rows]
    return "\n\n".join(parts) + "\n"


def _where(found: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {found[name]}" for name in found
        if name not in ("date", "processor", "cores", "commit")
    )  # fmt: skip
    return f"{found['date']}, {found['cores']} cores of {found['processor']}, {versions}"


def _fenced(text: str) -> str:
    return f"```\n{text}\n```"


def main() -> int:
    """Measure (unless `--texts`), then write the texts."""
    if "--texts" not in sys.argv[1:]:
        status = measure()
        if status:
            return status
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8")), encoding="utf-8")
    (ROOT / "docs" / "measured.md").write_text(measured(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
