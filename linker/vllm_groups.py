"""vLLM's cache groups for its scheduler: block sizes, kinds, and which prefixes can be restored.

The scheduler has no tensors. What it needs of them, the texts around page keys in the object keys
of every rank, comes from the workers once, as `GroupKeys`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LayoutError
from kvferry.linker.keys import KeyScheme
from kvferry.linker.pool_tensors import required
from kvferry.linker.vllm_specs import space_of_group
from kvferry.restore import restorable


@dataclass(frozen=True)
class GroupKeys:
    """What the object keys of one rank and group are made of, beside the page's.

    Attributes:
        prefix: before the page key.
        suffix: behind it.
        window_pages: pages that a window needs before its end; None where all are needed, or one.
    """

    prefix: str
    suffix: str
    window_pages: int | None

    @classmethod
    def of(cls, scheme: KeyScheme, space: str, window_pages: int | None) -> "GroupKeys":
        """Take a key scheme's text apart."""
        (example,) = scheme.object_keys(["?"], space)
        prefix, _, suffix = example.rpartition("?")
        return cls(prefix, suffix, window_pages)

    def object_keys(self, page_keys: Sequence[str]) -> list[str]:
        """Return the object keys of pages."""
        return [self.prefix + key + self.suffix for key in page_keys]


@dataclass(frozen=True)
class RankKeys:
    """What one rank's object keys are made of.

    Attributes:
        generation: of the weights that they are for.
        groups: by group.
        weights: digest of the rank's weights; empty if they cannot be found.
    """

    generation: str
    groups: Mapping[int, GroupKeys]
    weights: str = ""


@dataclass(frozen=True)
class Group:
    """A group whose blocks vLLM keeps under prefix hashes.

    Attributes:
        group_id: its index in `KVCacheConfig.kv_cache_groups`.
        space: `full`, `swa` or `state`.
        block_tokens: tokens of a block, over all ranks of decode context parallelism.
    """

    group_id: int
    space: str
    block_tokens: int

    def page_keys(self, block_hashes: Sequence[bytes], hash_tokens: int, end: int) -> list[str]:
        """Return the keys of a request's blocks 0 .. end - 1.

        vLLM's hashes are chained: that of a block's last piece tells the whole prefix up to it.

        Args:
            block_hashes: of the request, each of `hash_tokens` tokens.
            hash_tokens: a divisor of `block_tokens`.
            end: number of blocks; fewer come back where hashes are lacking.
        """
        step = self.block_tokens // hash_tokens
        last = min(end, len(block_hashes) // step) * step
        return [block_hashes[at].hex() for at in range(step - 1, last, step)]


def read_groups(kv_cache_config: Any, dcp_size: int) -> tuple[Group, ...]:
    """Return the groups that travel, from vLLM's `KVCacheConfig`.

    Raises:
        LayoutError: a kind of group that is not described, or none at all.
    """
    groups = []
    for group_id in required(kv_cache_config, "prefix_cacheable_group_ids"):
        group = required(kv_cache_config, "kv_cache_groups")[group_id]
        spec = required(group, "kv_cache_spec")
        shards = dcp_size if dcp_size > 1 and required(spec, "dcp_sharded") else 1
        space = space_of_group(group_id, group)
        groups.append(Group(group_id, space, required(spec, "block_size") * shards))
    if not groups:
        raise LayoutError("kv_cache_config has no group whose blocks are kept, wanted one")
    return tuple(groups)


class Prefixes:
    """Answers how long a prefix could be restored, over all groups and ranks."""

    def __init__(self, groups: Sequence[Group], hash_tokens: int, *, drop_last: bool) -> None:
        """Describe the groups.

        Args:
            groups: that travel.
            hash_tokens: tokens of one of a request's hashes.
            drop_last: whether the last block that is found is not to be used, as vLLM's own cache
                does for draft models of some kinds.

        Raises:
            LayoutError: a group's blocks are not whole pieces of a hash's.
        """
        for group in groups:
            if group.block_tokens % hash_tokens:
                raise LayoutError(
                    f"group {group.group_id}: blocks of {group.block_tokens} tokens, wanted a "
                    f"multiple of the hashes' {hash_tokens}"
                )
        self.groups = tuple(groups)
        self.hash_tokens = hash_tokens
        self.align_tokens = math.lcm(*(group.block_tokens for group in groups))
        self._drop_last = drop_last
        self._ranks: dict[int, tuple[GroupKeys, ...]] = {}

    def learn(self, ranks: Sequence[Mapping[int, GroupKeys]]) -> None:
        """Take the keys of all ranks; each has those of its groups. Equal ones count once."""
        self._ranks = {
            group.group_id: tuple(
                dict.fromkeys(rank[group.group_id] for rank in ranks if group.group_id in rank)
            )
            for group in self.groups
        }

    @property
    def is_ready(self) -> bool:
        """Whether the keys of every group are known."""
        return bool(self._ranks) and all(self._ranks.values())

    def questions(self, block_hashes: Sequence[bytes], first: int, end: int) -> "Questions":
        """Return which objects decide how long a prefix could be restored.

        Args:
            block_hashes: of the request.
            first: tokens that are there already, a multiple of every group's block.
            end: the longest prefix that is of use, in tokens.
        """
        return Questions(self, block_hashes, first, end - end % self.align_tokens)

    def object_keys(self, group: Group, page_keys: Sequence[str]) -> Iterator[list[str]]:
        """Yield the object keys of pages on each rank that has its own."""
        for keys in self._ranks[group.group_id]:
            yield keys.object_keys(page_keys)

    def window_pages(self, group: Group) -> int | None:
        """Return how many pages a group's window needs."""
        return self._ranks[group.group_id][0].window_pages


class Questions:
    """One request's lookup: the keys to ask for, and what the answers come to."""

    def __init__(
        self, prefixes: Prefixes, block_hashes: Sequence[bytes], first: int, end: int
    ) -> None:
        self._prefixes = prefixes
        self._first = first
        self._end = end
        self._rows: list[tuple[Group, int, int]] = []  # group, keys asked for, ranks
        self.keys: list[str] = []
        """Object keys to ask for."""
        for group in prefixes.groups:
            pages = group.page_keys(block_hashes, prefixes.hash_tokens, end // group.block_tokens)
            asked = pages[first // group.block_tokens :]
            num_ranks = 0
            for keys in prefixes.object_keys(group, asked):
                self.keys += keys
                num_ranks += 1
            self._rows.append((group, len(asked), num_ranks))

    def longest(self, exists: Sequence[bool]) -> int:
        """Return the longest prefix that all groups and ranks can restore, in tokens.

        Args:
            exists: an answer for each of `keys`.

        Returns:
            At least `first`; a multiple of every group's block.
        """
        answers = np.asarray(exists, dtype=bool)
        good = np.arange(0, self._end + 1, self._prefixes.align_tokens)
        good = good[good > self._first]
        for group, num_asked, num_ranks in self._rows:
            row, answers = answers[: num_asked * num_ranks], answers[num_asked * num_ranks :]
            there: NDArray[np.bool_] = np.logical_and.reduce(row.reshape(num_ranks, num_asked))
            good = np.intersect1d(good, self._lengths(group, there))
        if self._prefixes._drop_last and len(good):
            good = good[good <= good[-1] - self._prefixes.align_tokens]
        return int(good[-1]) if len(good) else self._first

    def _lengths(self, group: Group, there: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the prefix lengths, in tokens, that one group can restore."""
        known = np.ones(self._first // group.block_tokens, dtype=bool)
        row = np.concatenate([known, there])
        if not len(row):
            return np.zeros(0, dtype=np.int64)
        pages = restorable({group.space: row}, self._prefixes.window_pages(group))
        return np.asarray(pages, dtype=np.int64) * group.block_tokens
