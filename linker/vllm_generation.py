"""Which generation of its weights a vLLM engine serves."""

import hashlib
import logging
import secrets
from collections.abc import Sequence

log = logging.getLogger(__name__)


class Generation:
    """The generation of the weights at hand; for the scheduler's thread alone.

    vLLM tells a connector neither a version of the weights nor that they change. It resets the
    connector's cache where they may: before a pause that clears caches, before it sleeps, and when
    it is asked to. Behind a reset the workers look at their weights. What they have served before
    has the generation that it had; other weights have one by what they hold, so that engines that
    were given the same meet. Where they cannot be looked at, one is drawn. One that was set by hand
    stays: who names it answers for the weights.

    Attributes:
        current: goes into keys; empty for the weights that an engine starts with.
    """

    def __init__(self, named: str) -> None:
        """Begin with the weights that the engine starts with.

        Args:
            named: their generation, set by hand; empty if it was not.
        """
        self.current = named
        self._is_named = bool(named)
        self._before = named
        self._is_decided = True
        self._of_weights: dict[tuple[str, ...], str] = {}

    def renew(self) -> bool:
        """Draw a generation for until the workers have told; False if one was set by hand."""
        if self._is_named:
            log.info("reset: generation %r was set by hand, and stays", self.current)
            return False
        if self._is_decided:
            self._before = self.current
        self._is_decided = False
        self.current = f"drawn-{secrets.token_hex(8)}"
        return True

    def decide(self, digests: Sequence[str]) -> bool:
        """Take the digests of all workers' weights; whether `current` is their generation already.

        If not, it is from now on, and the workers have yet to hear of it.
        """
        weights, before = tuple(sorted(digests)), self.current
        was_decided, self._is_decided = self._is_decided, True
        if self._is_named:
            return True
        if was_decided:
            self._of_weights.setdefault(weights, self.current)
            return True
        if not all(weights):
            log.warning(
                "reset: whether weights changed cannot be seen, so generation %r ends and %r was "
                "drawn, which no other engine has. Where weights stay as they are, set a "
                "generation in kv_connector_extra_config: resets and sleep keep it",
                self._before, self.current,
            )  # fmt: skip
            return True
        name = f"weights-{hashlib.sha256(' '.join(weights).encode()).hexdigest()[:16]}"
        self.current = self._of_weights.setdefault(weights, name)
        if self.current == self._before:
            log.info("reset: weights are the same, and so is generation %r", self.current)
        else:
            log.warning(
                "reset: weights changed, from generation %r to %r: %s",
                self._before,
                self.current,
                "named after what they hold" if self.current == name else "served before",
            )  # fmt: skip
        return self.current == before
