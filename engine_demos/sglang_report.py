"""Tables of hits and of faults, bars under both, and the exit status that they come to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bars import Bar, machine, table
from sglang_cases import Case
from sglang_faults import AGAIN_LIMIT_S, Fault
from sglang_hits import Hit

SENSITIVITY = 1e-3
"""How far another prefix must move log-probabilities, so that equal ones say something."""

HITS_LEGEND = """\
from host: tokens that the new process got from Mooncake; device: that it had itself, wanted 0
cold: without a cache; device hit: the prefix on the device; seconds of the slowest prompt
max Δlogprob: of the 5 most probable tokens at each place, to the device hit of the same length
other prefix: the same number had the prefix been another one; inf: other tokens too"""

FAULTS_LEGEND = """\
corrupted: a bit of one changed; exchanged: another's bytes under its key; killed: while it is read
right: equal to the last digit to what the same engine computes without a cache
503: SGLang ends requests whose load broke; right then: when asked once more; lost: any other end
hits again: seconds until all comes from the store again, since the answers; or since who was killed
has been started again, until a new prompt does"""


@dataclass
class Results:
    """What a run came to, as far as it came.

    Attributes:
        cases: that were asked for.
        hits: of each case.
        faults: under one of them.
        more: further tables, each with its heading.
        more_bars: further bars.
        failure: why the run is not finished; empty if it is.
        seconds: that it took.
    """

    cases: Sequence[Case]
    hits: list[Hit] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    more: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    more_bars: list[Bar] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    @property
    def harmed(self) -> Case | None:
        """The case whose store is harmed: one that a hit answers as a computation from scratch."""
        return next((case for case in self.cases if case.is_cut_free), None)


def report(results: Results, faults_legend: str = FAULTS_LEGEND) -> int:
    """Print everything; return 0 if the run is finished and no bar is short, else 1."""
    known = machine()
    print(
        f"\n{known['date']}, {known['processor']}, {known['cores']} cores, commit "
        f"{known['commit']}, {results.seconds:.0f} s\n"
    )
    if results.hits:
        print(f"{table([hit.row() for hit in results.hits])}\n\n{HITS_LEGEND}\n")
    if results.faults and results.harmed:
        print(f"faults, under {results.harmed.name}:")
        print(f"{table([fault.row() for fault in results.faults])}\n\n{faults_legend}\n")
    if results.harmed is None:
        print("no faults: they need a model that answers alike whatever was cached\n")
    for heading, rows in results.more:
        print(f"{heading}\n{table(rows)}\n")
    bars = [*_bars(results), *results.more_bars]
    for bar in bars:
        bound = f"{'>=' if bar.at_least else '<='}{bar.wanted:g}"
        print(f"bar {bar.name} {bar.value:g} {bound} {'ok' if bar.ok else 'short'}")
    if results.failure:
        print(f"not finished: {results.failure}")
    return 0 if not results.failure and all(bar.ok for bar in bars) else 1


def _bars(results: Results) -> Iterator[Bar]:
    for case in results.cases:
        hits = [hit for hit in results.hits if hit.case is case]
        if not hits:  # the run ended before: the failure says why
            continue
        name = case.name
        wanted = sum(hit.wanted for hit in hits)
        yield Bar(f"{name}.host_tokens", sum(hit.from_host for hit in hits), wanted, True)
        yield Bar(f"{name}.device_tokens", sum(hit.from_device for hit in hits), 0, False)
        num_prompts = sum(len(hit.prompts) for hit in hits)
        yield Bar(f"{name}.equal_tokens", sum(hit.num_equal for hit in hits), num_prompts, True)
        yield Bar(f"{name}.max_dlogprob", max(hit.apart for hit in hits), 0, False)
        sensitivity = min(hit.sensitivity for hit in hits)
        yield Bar(f"{name}.other_prefix", sensitivity, SENSITIVITY, True)
    for fault in results.faults:
        name = f"fault.{fault.name.replace(' ', '_')}"
        yield Bar(f"{name}.wrong", fault.wrong, 0, False)
        yield Bar(f"{name}.lost", fault.lost, 0, False)
        yield Bar(f"{name}.never_right", fault.aborted - fault.right_then, 0, False)
        if fault.back_s is not None:
            yield Bar(f"{name}.hits_again_s", fault.back_s, AGAIN_LIMIT_S, False)
