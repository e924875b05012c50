"""Which generation of its weights an SGLang engine serves: by their version, else one is drawn."""

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """What SGLang tells of the weights that it serves.

    Attributes:
        version: `--weight-version`, or that of the last update that came with one.
        path: where they came from.
        num_updates: how often this process has read them from disk again.
    """

    version: str
    path: str
    num_updates: int = 0


class Generations:
    """The generation of the weights at hand, for the scheduler's thread alone.

    A version names a generation: engines that tell the same one meet. Where weights were seen to
    change under one version, a generation is drawn: of `seed` and a count, so that all ranks, which
    see the same, have the same one without a word to each other.

    Attributes:
        current: goes into keys.
    """

    def __init__(self, weights: Weights, *, named: str, seed: str) -> None:
        """Begin with the weights that the engine starts with.

        Args:
            weights: as SGLang tells them.
            named: their generation, set by hand; their version if empty.
            seed: of this engine's draws, alike on all ranks and unlike any other engine's.
        """
        self.current = named or weights.version
        self._weights = weights
        self._seed = seed
        self._num_drawn = 0
        self._is_told = False

    def are_current(self, version: str, path: str) -> bool:
        """Whether weights are those that `current` is the generation of.

        They are not between an update without a flush and the next flush: what is computed then
        belongs to no generation. Says so in the log, once.
        """
        known = self._weights
        if (version, path) == (known.version, known.path):
            return True
        if not self._is_told:
            self._is_told = True
            log.warning(
                "weights changed from version %r of %s to %r of %s without a flush: until the next "
                "flush nothing is stored and nothing is found",
                known.version, known.path, version, path,
            )  # fmt: skip
        return False

    def look(self, weights: Weights) -> bool:
        """Take the weights that are served behind a flush; whether they are another generation."""
        self._is_told = False
        before, self._weights = self._weights, weights
        if weights == before:
            return False
        if weights.version != before.version:
            self.current = weights.version
            log.info(
                "weights of version %r: generation %r, which engines with this version share",
                weights.version, self.current,
            )  # fmt: skip
            return True
        self._num_drawn += 1
        self.current = f"drawn-{self._seed}-{self._num_drawn}"
        log.warning(
            "weights changed from %s to %s under one version, %r: generation %r was drawn, which "
            "no other engine has; give each update a weight_version for engines to share",
            before.path, weights.path, weights.version, self.current,
        )  # fmt: skip
        return True
