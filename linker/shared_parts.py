"""One store call cut into parts for several ranks: who fetches what, and what they tell."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.linker.plan import OBJECT_ALIGN_BYTES
from kvferry.linker.store import ObjectResult, Outcome

ENDED = "ended"
"""What a rank tells in place of a call that it does not make any more."""


@dataclass(frozen=True)
class Told:
    """What a rank tells of a call once it has fetched its part.

    Attributes:
        digest: of the call as the rank was asked for it.
        failures: index among the call's shared objects to what became of it; those of the rank's
            part that are not here were fetched.
    """

    digest: str
    failures: dict[int, ObjectResult]

    def text(self) -> str:
        """Return it as JSON."""
        failures = {
            str(index): [result.outcome.value, result.code_name]
            for index, result in self.failures.items()
        }
        return json.dumps({"digest": self.digest, "failures": failures})

    @classmethod
    def of_text(cls, text: str) -> "Told":
        """Read what `text` has made."""
        said = json.loads(text)
        failures = {
            int(index): ObjectResult(Outcome(word), code_name)
            for index, (word, code_name) in said["failures"].items()
        }
        return cls(said["digest"], failures)


def are_same(texts: Sequence[str]) -> bool:
    """Whether what ranks tell is about one and the same call."""
    return ENDED not in texts and len({Told.of_text(text).digest for text in texts}) == 1


def digest_of(
    kind: str,
    keys: Sequence[str],
    addresses: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int] = (),
) -> str:
    """Return a digest of a call: equal where the same bytes go to the same places of a span.

    Args:
        kind: name of the call.
        keys: of objects, at least one.
        addresses: where they go to; only their distances from the first count.
        sizes: of what is fetched.
        offsets: within the objects, if ranges are.
    """
    first = addresses[0]
    columns = ([address - first for address in addresses], sizes, offsets)
    found = hashlib.blake2b("\0".join((kind, *keys)).encode(), digest_size=16)
    for column in columns:
        found.update(b"|" + np.asarray(column, dtype=np.int64).tobytes())
    return found.hexdigest()


def cut_evenly(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Return consecutive ranges of indices, each of about as many bytes; some may be empty."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    total = int(ends[-1]) if len(ends) else 0
    bounds = [
        int(np.searchsorted(ends * num_parts, total * part, side="right"))
        for part in range(num_parts)
    ]
    return [range(a, b) for a, b in zip(bounds, [*bounds[1:], len(ends)], strict=True)]


def runs_of(addresses: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (address, num_bytes) of what ranges cover, in their order; neighbours are joined.

    Neighbours have at most the padding between them that objects in a span have.
    """
    begin = end = -1
    for address, size in zip(addresses, sizes, strict=True):
        if begin >= 0 and 0 <= address - end < OBJECT_ALIGN_BYTES:
            end = address + size
            continue
        if begin >= 0:
            yield begin, end - begin
        begin, end = address, address + size
    if begin >= 0:
        yield begin, end - begin
