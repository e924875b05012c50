"""What vLLM's scheduler and its workers tell each other about loads and saves: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupPages:
    """Pages of one group.

    Attributes:
        keys: page keys, each once.
        block_ids: of the group's block table, one for each key.
    """

    keys: list[str]
    block_ids: list[int]


@dataclass(frozen=True)
class LoadJob:
    """A request's load.

    Attributes:
        request_id: whose.
        pages: by group.
        error: why it cannot be begun, and counts as failed; empty if it can.
    """

    request_id: str
    pages: Mapping[int, GroupPages]
    error: str = ""


@dataclass(frozen=True)
class SaveJob:
    """Pages to save, which hold their content once the step's forward pass has run.

    Attributes:
        number: by which its end is reported; each is greater than the one before.
        pages: by group.
    """

    number: int
    pages: Mapping[int, GroupPages]


@dataclass
class StepJobs:
    """All that a step brings.

    Attributes:
        loads: begun this step.
        saves: begun this step.
        is_idle: whether the step computes nothing.
        generation: of the weights, for the keys of this step's transfers.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    is_idle: bool = False
    generation: str = ""


@dataclass
class LoadsEnded:
    """Loads that have ended.

    Attributes:
        ended: request ids.
        failed: those of them that failed.
        failed_blocks: what they were to fill.
    """

    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)

    def and_also(self, other: "LoadsEnded") -> "LoadsEnded":
        """Return both together."""
        return LoadsEnded(
            self.ended | other.ended,
            self.failed | other.failed,
            self.failed_blocks | other.failed_blocks,
        )
