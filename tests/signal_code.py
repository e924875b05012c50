"""Machine code of the kernels that signal and wait, as JSON: for a process without an interpreter.

`python tests/signal_code.py 90 100 gfx942` prints a list of name, target and instructions in order.
"""

import json
import sys
from collections.abc import Iterator

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from kvferry.kernels.signals import signal_layers
from kvferry.tuning.compiled import Variant, compile_for, signal_variants
from kvferry.tuning.sass import instruction_names, read_sass


@triton.jit
def _store_and_signal_kernel(
    payload_address: tl.int64, values_address: tl.int64, layer: tl.int32, SYS: tl.constexpr
):
    """What a move with signals of its own does: many threads store, one signal follows."""
    word = tl.arange(0, 1024)
    tl.store(payload_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + word, word.to(tl.int64))
    counters = values_address.to(tl.int64).to(tl.pointer_type(tl.int64))
    signal_layers(counters + layer, 1, None, SYS)


def variants(asm: bool) -> Iterator[Variant]:
    yield from signal_variants(asm)
    for scope in ("gpu", "sys"):
        constants = {"SYS": scope == "sys"}
        yield Variant(f"fused_{scope}", _store_and_signal_kernel, constants, 4, 0, 0)


def main() -> None:
    rows = []
    for target in sys.argv[1:]:
        if target.startswith("gfx"):
            for variant in variants(asm=False):
                compile_for(variant, GPUTarget("hip", target, 64))
                rows.append({"name": variant.name, "target": target})
            continue
        for variant in variants(asm=True):
            cubin = compile_for(variant, GPUTarget("cuda", int(target), 32)).asm["cubin"]
            sass = read_sass(cubin)
            rows.append({"name": variant.name, "target": target, "spills": sass.spills,
                         "spill_bytes": sass.spill_bytes, "registers": sass.registers,
                         "code": instruction_names(cubin)})  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
