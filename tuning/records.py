"""What a sweep has measured so far, a JSON line for each group, so that it can go on later."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ArgumentError
from kvferry.tuning.derive import Candidate
from kvferry.tuning.plans import Group, Trial
from kvferry.tuning.timing import Timing


@dataclass(frozen=True)
class Result:
    """What came of one trial.

    Attributes:
        trial: which.
        fault: what was wrong; such a trial was not timed.
        timing: of one move; None with a fault.
        share_of_copy: how long a copy of as many bytes takes, divided by that: the median over the
            rounds that both were in. 0 with a fault.
    """

    trial: Trial
    fault: str = ""
    timing: Timing | None = None
    share_of_copy: float = 0.0


@dataclass(frozen=True)
class Beside:
    """A matmul with a move beside it.

    Attributes:
        slowdown: how long the matmul takes, divided by how long it takes alone: the median over
            rounds.
        matmul: alone.
    """

    slowdown: float
    matmul: Timing


@dataclass(frozen=True)
class Record:
    """What came of one group.

    Attributes:
        group: which.
        num_bytes: payload of one move.
        copy: of as many bytes, in the same rounds; None if nothing was timed.
        results: of each trial.
        beside: of the group's last stage alone.
        why_not: why nothing was measured.
    """

    group: Group
    num_bytes: int = 0
    copy: Timing | None = None
    results: tuple[Result, ...] = ()
    beside: Beside | None = None
    why_not: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Record":
        """Return the record of what `plain` returned."""
        results = tuple(
            Result(
                Trial(Candidate(**one["trial"]["candidate"]), one["trial"]["cache"]),
                one["fault"],
                _timing(one["timing"]),
                one["share_of_copy"],
            )
            for one in plain["results"]
        )
        beside = plain["beside"]
        return cls(
            Group(**plain["group"]),
            plain["num_bytes"],
            _timing(plain["copy"]),
            results,
            None if beside is None else Beside(beside["slowdown"], Timing(**beside["matmul"])),
            plain["why_not"],
        )


class RecordFile:
    """A file of records: a line that says of what, then one for each record.

    Attributes:
        path: of the file.
        records: by group.
    """

    def __init__(self, path: Path, about: Mapping[str, str], *, resume: bool) -> None:
        """Open, to append.

        Args:
            path: its folder is there.
            about: what records must have in common: machine, versions, plan.
            resume: keep what the file holds; without, begin anew.

        Raises:
            ArgumentError: `resume`, and the file holds records of something else.
        """
        self.path = path
        self.records: dict[Group, Record] = {}
        lines = list(_whole_lines(path)) if resume and path.exists() else []
        if lines:
            other = [key for key in about if lines[0].get(key) != about[key]]
            if other:
                told = ", ".join(f"{key} {lines[0].get(key)!r}" for key in other)
                wanted = ", ".join(f"{key} {about[key]!r}" for key in other)
                raise ArgumentError(
                    f"resume is given and {path} is of {told}, wanted {wanted}; begin anew "
                    "without --resume"
                )
        self.records = {record.group: record for record in map(Record.of, lines[1:])}
        # Written anew: a line that was cut off by an interruption goes.
        kept = [dict(about), *(record.plain() for record in self.records.values())]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, record: Record) -> None:
        """Keep a record, and write it at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.plain()) + "\n")
        self.records[record.group] = record


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; the last one only if it was written to its end."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _timing(plain: Mapping[str, Any] | None) -> Timing | None:
    return None if plain is None else Timing(**plain)
