"""What does the compiler make of the kernels that transfers use? `make bench-sass`.

Compiles them for sm_90 and sm_100 and reads the machine code: instructions per 16 bytes of payload
with and without the checksum, registers, spills, widths, bytes in flight. Nothing runs; what a
checksum costs in time must be measured on a GPU. `make inspect` shows every variant and target.
"""

import sys
from collections.abc import Iterable
from typing import Any

from bars import Bar, report

from kvferry.tuning.inspect import inspect_all
from kvferry.tuning.inspection import Inspected

TARGETS = ("sm_90", "sm_100")
LONG = ("pack_tiles_id4", "unpack_tiles_id4")
SHORT = ("pack_units16_id4", "unpack_units16_id4")
SUMMED = ("pack_summed_tiles_id4", "unpack_summed_tiles_id4", "sum_tiles")
SHOWN = (*LONG, "unpack_zero_tiles_id4", "unpack_keep_tiles_id4", *SUMMED,
         "pack_summed_tiles_persistent_id4", *SHORT, "pack_summed_units16_id4",
         "pack_summed_units16_few_id4")  # fmt: skip


def main() -> int:
    """Print the table and the bars."""
    only = f"^({'|'.join(SHOWN)})$"
    found = {(row.name, row.target): row for row in inspect_all(TARGETS, only)}
    rows: list[dict[str, Any]] = []
    for name in SHOWN:
        both = [found[name, target] for target in TARGETS]
        rows.append({
            "kernel": name,
            **{f"{one.target}: per 16 bytes": f"{one.instructions_per_16_bytes:.1f}"
               for one in both},
            "registers": max(one.registers for one in both),
            "KiB in flight": min(_in_flight(one) for one in both) // 1024,
            "loads of 16 B": min(one.loads.get(16, 0) for one in both),
            "stores of 16 B": min(one.stores.get(16, 0) for one in both),
        })  # fmt: skip
    plain = [found[name, target] for name in (*LONG, *SHORT) for target in TARGETS]
    bars = [
        Bar("long_instructions_per_16_bytes", _most(plain, LONG), 19.0, at_least=False),
        Bar("short_instructions_per_16_bytes", _most(plain, SHORT), 43.0, at_least=False),
        Bar("summed_instructions_per_16_bytes", _most(found.values(), SUMMED), 60.0,
            at_least=False),
        Bar("share_at_16_bytes", min(one.payload_share or 0.0 for one in found.values()), 1.0,
            at_least=True),
        Bar("burst_kib_in_flight", min(_in_flight(one) for one in plain) / 1024, 128.0,
            at_least=True),
        Bar("spills", sum(one.spills + one.spill_bytes for one in found.values()), 0.0,
            at_least=False),
    ]  # fmt: skip
    return report("sass", rows, bars)


def _most(rows: Iterable[Inspected], names: Iterable[str]) -> float:
    return max(row.instructions_per_16_bytes or 0.0 for row in rows if row.name in names)


def _in_flight(row: Inspected) -> int:
    return row.in_flight_bytes or 0


if __name__ == "__main__":
    sys.exit(main())
