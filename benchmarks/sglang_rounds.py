"""Figures of several linkers, round by round: medians, spreads, and ratios within each round."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

FigureT = TypeVar("FigureT")


@dataclass
class Rounds(Generic[FigureT]):
    """What each linker took in each round; the first one named is what the others are set beside.

    Attributes:
        by_side: linker's name to its figures, one for each round, all in the same order.
    """

    by_side: dict[str, list[FigureT]] = field(default_factory=dict)

    def add(self, side: str, figure: FigureT) -> None:
        """Note a linker's round."""
        self.by_side.setdefault(side, []).append(figure)

    def median(self, side: str, of: Callable[[FigureT], float]) -> float:
        """Return the median over a linker's rounds."""
        return statistics.median(map(of, self.by_side[side]))

    def spread(self, side: str, of: Callable[[FigureT], float]) -> str:
        """Return the median, with the least and the most in brackets."""
        values = [of(figure) for figure in self.by_side[side]]
        return f"{statistics.median(values):.1f} ({min(values):.0f}..{max(values):.0f})"

    def ratio(self, side: str, of: Callable[[FigureT], float]) -> float:
        """Return how often a linker's figure goes into the first one's, the median over the rounds.

        Both are of the same round: what else the machine did then weighs on both.
        """
        first = next(iter(self.by_side.values()))
        return statistics.median(
            of(base) / of(own) for base, own in zip(first, self.by_side[side], strict=True)
        )
