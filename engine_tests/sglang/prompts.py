"""Prompts, what their pages tell, and requests as far as a prefix cache sees them."""

import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

LIMIT_S = 20.0


def wait_for(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for a condition; fail if it does not come true in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.002)


def tokens(num_tokens: int, branch: int = 0, common: int = 0) -> "array[int]":
    """Return a prompt that shares its first `common` tokens with other branches."""
    shared = [1000 + index for index in range(common)]
    own = [100_000 * (branch + 1) + index for index in range(common, num_tokens)]
    return array("q", shared + own)


def tags_of(prompt: Sequence[int], page_size: int) -> list[int]:
    """Return what each whole page of a prompt is to tell: a number of all tokens up to its end."""
    ends = range(page_size, len(prompt) + 1, page_size)
    return [zlib.crc32(array("q", prompt[:end]).tobytes()) for end in ends]


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if the body takes longer than its bound."""
    begin_s = time.monotonic()
    yield
    taken_s = time.monotonic() - begin_s
    assert taken_s < limit_s, f"took {taken_s:.1f} s, wanted at most {limit_s:g} s"


@dataclass
class Request:
    """A request as far as the prefix cache sees it.

    Attributes:
        rid: its id.
        kv: SGLang's own record of what it holds.
        tail: slots that a load was queued into.
        hit: tokens of its prompt that were on the device.
    """

    rid: str
    prompt: Sequence[int]
    kv: Any = field(default_factory=ReqKvInfo)
    session: Any = None
    last_node: Any = None
    swa_branching_seqlen: int | None = None
    skip_radix_cache_insert: bool = False
    discard_output_reason: Any = None
    match: MatchResult | None = None
    hit: int = 0
    tail: torch.Tensor | None = None

    @property
    def slots(self) -> torch.Tensor:
        """Slots that a load goes to."""
        assert self.tail is not None
        return self.tail
