"""Bars: what a benchmark's figures must reach, a line each; exit status 1 if one is short."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A figure and the bound that it must keep.

    Attributes:
        name: what is measured, with its unit.
        value: what came out.
        wanted: the bound.
        at_least: whether the value must be at least the bound, else at most.
    """

    name: str
    value: float
    wanted: float
    at_least: bool

    @property
    def ok(self) -> bool:
        """Whether the bound is kept."""
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted


def report(bars: list[Bar]) -> int:
    """Print `bar NAME VALUE WANTED ok|short` for each; return the exit status."""
    for bar in bars:
        bound = f"{'>=' if bar.at_least else '<='}{bar.wanted:g}"
        print(f"bar {bar.name} {bar.value:.3f} {bound} {'ok' if bar.ok else 'short'}")
    return 0 if all(bar.ok for bar in bars) else 1
