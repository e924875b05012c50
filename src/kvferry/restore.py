"""Which prefixes can be restored, given which page objects exist."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvferry.arguments import mapping, one_of, or_none, shown, whole_number
from kvferry.errors import ArgumentError
from kvferry.pools import SPACES


def restorable(exists: Mapping[str, NDArray[np.bool_]], window_pages: int | None) -> list[int]:
    """Return every prefix length, in pages, whose objects all exist; ascending, without 0.

    A prefix of n pages can be restored if, for each index space present:
    `full`: pages 0 .. n-1 all exist; `swa`: the last `window_pages` of them (all, if there are
    fewer) exist; `state`: page n-1's state exists. So the lengths can be sparse, and a space's
    pages before a gap do not matter unless it is `full`. Work and memory are O(pages).

    Args:
        exists: index space to `[num_pages]` bool, entry i telling of page i of the prefix.
        window_pages: trailing pages that `swa` needs; None means all of the prefix.

    Raises:
        ArgumentError: no space, arrays of different lengths, or a window under 1.
    """
    mapping("exists", exists, "index spaces and which of their pages exist")
    for space, row in exists.items():
        one_of("exists: index space", space, SPACES)
        if np.ndim(row) != 1 or (np.size(row) and np.asarray(row).dtype != bool):
            raise ArgumentError(f"exists of {space!r} is {shown(row)}, wanted [num_pages] bool")
    lengths = {space: len(row) for space, row in exists.items()}
    if not lengths or len(set(lengths.values())) != 1:
        raise ArgumentError(f"exists has lengths {lengths}, wanted one length for every space")
    window_pages = or_none("window_pages", window_pages, whole_number, 1)
    num_pages = next(iter(lengths.values()))
    ends = np.arange(1, num_pages + 1)
    good = np.ones(num_pages, dtype=bool)
    for space, row in exists.items():
        present = np.asarray(row, dtype=bool)
        if space == "state":
            good &= present
        else:
            # Length of the unbroken stretch of existing pages that ends at each page.
            last_gap = np.maximum.accumulate(np.where(present, 0, ends))
            needed = (
                ends if space == "full" or window_pages is None else np.minimum(ends, window_pages)
            )
            good &= (ends - last_gap) >= needed
    return [int(end) for end in ends[good]]
