"""Which generation of its weights a vLLM engine serves."""

import logging
import secrets

log = logging.getLogger(__name__)


class Generation:
    """The generation of the weights at hand; for the scheduler's thread alone.

    vLLM tells a connector neither a version of the weights nor that they change. It resets the
    connector's cache where they may have: before a pause that clears caches, before it sleeps,
    and when it is asked to. So a reset ends a generation that nobody has named. One that was set
    by hand stays: who names it answers for the weights.

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

    def renew(self) -> bool:
        """Draw a new generation, unless this one was set by hand; whether it was drawn."""
        if self._is_named:
            log.info("reset: generation %r was set by hand, and stays", self.current)
            return False
        before, self.current = self.current, f"drawn-{secrets.token_hex(8)}"
        log.warning(
            "reset: vLLM does not tell whether weights changed, so generation %r ends and %r was "
            "drawn, which no other engine has. Where weights stay as they are, set a generation in "
            "kv_connector_extra_config: resets and sleep keep it",
            before, self.current,
        )  # fmt: skip
        return True
