"""What each class of kernel variants may do at most, and whether it does more."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvferry.tuning.inspection import Inspected

FOLDER = Path(__file__).parent / "thresholds"


@dataclass(frozen=True)
class Threshold:
    """Bounds of one class of variants; None sets none.

    Attributes:
        name: of the class.
        variants, targets: patterns that a variant's and a target's whole name match.
        registers: per thread, at most.
        instructions, instructions_per_16_bytes: at most.
        in_flight_bytes: on a multiprocessor, at least.
    """

    name: str
    variants: str
    targets: str
    registers: int
    instructions: int | None = None
    instructions_per_16_bytes: float | None = None
    in_flight_bytes: int | None = None

    def holds(self, row: Inspected) -> bool:
        """Whether the class has this variant on this target."""
        return bool(
            re.fullmatch(self.variants, row.name) and re.fullmatch(self.targets, row.target)
        )


def load_thresholds(triton_version: str, folder: Path = FOLDER) -> tuple[str, list[Threshold]]:
    """Return the thresholds for a Triton version, and the version of the newest file among them.

    A file holds what differs from the versions before it: theirs come behind its own, and the first
    that has a variant counts. A version without a file takes those before it.

    Raises:
        ValueError: it is older than all of them.
    """
    wanted = _numbers(triton_version)
    known = {_numbers(path.stem.removeprefix("triton_").replace("_", ".")): path
             for path in folder.glob("triton_*.json")}  # fmt: skip
    before = sorted((version for version in known if version <= wanted), reverse=True)
    if not before:
        oldest = ".".join(map(str, min(known)))
        raise ValueError(f"Triton is {triton_version}, wanted {oldest} or newer")
    texts = (known[version].read_text(encoding="utf-8") for version in before)
    classes = [Threshold(**one) for text in texts for one in json.loads(text)["classes"]]
    return ".".join(map(str, before[0])), classes


def faults(row: Inspected, thresholds: Sequence[Threshold]) -> list[str]:
    """Return what is wrong with a variant, a sentence each: what was measured, what is allowed.

    The first class that has the variant counts; one that no class has is a fault.
    """
    where = f"{row.name} on {row.target}"
    if not row.instructions:
        return [f"{where}: 0 instructions were read: {row.unread}"]
    found = []
    for name, bytes_or_number in (("spills", row.spills), ("spill_bytes", row.spill_bytes)):
        if bytes_or_number:
            found.append(f"{where}: {name} is {bytes_or_number}, allowed 0")
    if row.payload_share is not None and row.payload_share < 1:
        found.append(
            f"{where}: payload_share at {row.access_bytes} bytes is {row.payload_share:.3f}, "
            f"allowed at least 1 (loads {row.loads}, stores {row.stores})"
        )
    bounds = next((one for one in thresholds if one.holds(row)), None)
    if bounds is None:
        return [*found, f"{where}: no class of thresholds has it"]
    of = f"allowed for {bounds.name}"
    for name in ("registers", "instructions", "instructions_per_16_bytes"):
        measured: float | None = getattr(row, name)
        most: float | None = getattr(bounds, name)
        if most is not None and (measured is None or measured > most):
            found.append(f"{where}: {name} is {_text(measured)}, {of} at most {most:g}")
    least = bounds.in_flight_bytes
    if least is not None and (row.in_flight_bytes is None or row.in_flight_bytes < least):
        found.append(
            f"{where}: in_flight_bytes is {_text(row.in_flight_bytes)}, {of} at least {least}"
        )
    return found + [
        f"{where}: {fault}" for fault in order_faults(row) + hint_faults(row) + bulk_faults(row)
    ]


def order_faults(row: Inspected) -> list[str]:
    """Return what is wrong with how a kernel signals or waits; nothing for those that do neither.

    A signal is a barrier, for the stores of all threads, then a fence of the signal's scope, then
    the atomic operation. A wait is an acquiring load: a strong one that drops what the cache held.
    """
    if row.target.startswith("gfx"):
        return []  # AMD's assembly spells its order by counters of its own, which are not read
    code = list(row.ordering)
    if row.name == "wait":
        polls = [at for at, name in enumerate(code) if name.startswith("LDG")]
        bare = [at for at in polls if "CCTL.IVALL" not in code[at + 1 : at + 2]]
        if not polls or bare or any(".STRONG.SYS" not in code[at] for at in polls):
            return [f"polls are {code}, wanted LDG of scope SYS, each with CCTL.IVALL behind it"]
        if any(name.startswith(("ATOM", "RED")) for name in code):
            return [f"polls are {code}, wanted no atomic operation"]
    elif row.name.startswith("signal"):
        scope = row.name.rpartition("_")[2].upper()
        at = next((i for i, name in enumerate(code) if name.startswith(("ATOM", "RED"))), -1)
        if at < 2 or not code[at - 2].startswith("BAR.SYNC"):
            return [f"order is {code[: at + 1]}, wanted a barrier before the fence and the signal"]
        if code[at - 1] != f"MEMBAR.ALL.{scope}" or not code[at].endswith(f".STRONG.{scope}"):
            return [f"order is {code[: at + 1]}, wanted fence and signal of scope {scope}"]
    return []


def hint_faults(row: Inspected) -> list[str]:
    """Return what is wrong with cache hints: one that is wanted and not there, or the reverse.

    Triton 3.6 and 3.9 drop the hint of a load for AMD's GPUs: there none is wanted.
    """
    wanted = {
        "loads": row.cache != "none" and not row.target.startswith("gfx"),
        "stores": row.cache == "stream",
    }
    found = []
    for way, is_wanted in wanted.items():
        every: dict[int, int] = getattr(row, way)
        hinted: dict[int, int] = getattr(row, f"evict_first_{way}")
        payload = {row.access_bytes: every.get(row.access_bytes, 0)}
        if hinted != (payload if is_wanted else {}):
            found.append(
                f"{way} that are evicted first are {hinted}, wanted {payload if is_wanted else {}} "
                f"for cache {row.cache!r}"
            )
    return found


def bulk_faults(row: Inspected) -> list[str]:
    """Return what is wrong with bulk copies: they go both ways, and a program ends behind them."""
    if "_bulk_" not in row.name:
        return [f"bulk copies are {row.bulk}, wanted none"] if row.bulk else []
    code = [name.split(".TRANS64")[0] for name in row.bulk]
    # Each step, and the one right before it.
    steps = set(pairwise(name for name in code if name not in ("DEPBAR.LE", "CCTL.IVALL")))
    into = {before for before, name in steps if name == "UBLKCP.S.G"}
    out_of = {before for before, name in steps if name == "UBLKCP.G.S"}
    if into != {"SYNCS.ARRIVE"} or out_of != {"SYNCS.PHASECHK"}:
        return [f"order is {code}, wanted a barrier told of each load, and asked before each store"]
    if {name for before, name in steps if before == "UBLKCP.G.S"} != {"UTMACMDFLUSH"}:
        return [f"order is {code}, wanted each store committed"]
    # Of the waits for stores only that for their end drops what the cache held, not that for their
    # being read.
    last = code.index("EXIT")
    if code.count("EXIT") > 1 or code[last - 2 : last] != ["DEPBAR.LE", "CCTL.IVALL"]:
        return [f"order is {code}, wanted a wait for all that is stored before the exit"]
    return []


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(measured: float | None) -> str:
    return "not known" if measured is None else f"{measured:.10g}"
