"""What does the compiler make of the kernels for long runs? `make bench-sass`.

Compiles the page kernel for sm_90 and sm_100 and reads the machine code: instructions per 16 bytes
of payload with and without the checksum, registers, spills, width of every store. Nothing runs;
what a checksum costs in time must be measured on a GPU.
"""

import sys
from typing import Any

from bars import Bar, report

from kvferry.tuning.compiled import Compiled, inspect, variants

ARCHES = (90, 100)
SHOWN = ("pack_tiles", "pack_summed_tiles", "unpack_tiles", "unpack_summed_tiles",
         "unpack_zero_tiles", "unpack_keep_tiles", "sum_tiles")  # fmt: skip


def main() -> int:
    """Print the table and the bars."""
    found: dict[tuple[str, int], Compiled] = {
        (variant.name, arch): inspect(variant, arch)
        for variant in variants()
        for arch in ARCHES
        if variant.name in SHOWN
    }
    rows: list[dict[str, Any]] = []
    for name in SHOWN:
        row: dict[str, Any] = {"kernel": name}
        for arch in ARCHES:
            sass = found[name, arch].sass
            per = found[name, arch].instructions_per_16_bytes
            row[f"sm_{arch}: per 16 bytes"] = f"{per:.1f}"
            row["registers " + str(arch)] = sass.registers
            row["stores " + str(arch)] = ", ".join(f"{n} x {w} B" for w, n in sass.stores.items())
        rows.append(row)
    plain = [found[name, arch] for name in ("pack_tiles", "unpack_tiles") for arch in ARCHES]
    bars = [
        Bar("instructions_per_16_bytes", max(one.instructions_per_16_bytes for one in plain), 19.0,
            at_least=False),
        Bar("narrowest_store_bytes",
            min(min(one.sass.stores, default=16) for one in found.values()), 16.0, at_least=True),
        Bar("spills", sum(one.sass.spills for one in found.values()), 0.0, at_least=False),
    ]  # fmt: skip
    return report("sass", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
