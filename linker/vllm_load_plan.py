"""Which of vLLM's blocks a load fills, by group, and whether they are all that will be read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.linker.vllm_groups import Group, Prefixes
from kvferry.linker.vllm_jobs import GroupPages, LoadJob
from kvferry.linker.vllm_pools import NULL_BLOCK_ID


def load_job(
    prefixes: Prefixes, request: Any, table: Sequence[Sequence[int]], first: int, end: int
) -> LoadJob:
    """Return the load of a request's tokens `first` .. `end - 1`.

    Args:
        prefixes: vLLM's groups.
        request: vLLM's.
        table: its block table, by group.
        first: tokens that are there already, whole blocks of every group.
        end: tokens that will be there.
    """
    pages = {}
    for group in prefixes.groups:
        found = _pages_of(prefixes, group, request, table[group.group_id], first, end)
        if found.keys:
            pages[group.group_id] = found
    return LoadJob(request.request_id, pages, _missing(prefixes, pages, table, first, end))


def _pages_of(
    prefixes: Prefixes, group: Group, request: Any, table: Sequence[int], first: int, end: int
) -> GroupPages:
    """Return the pages of a group that a prefix of `end` tokens lacks behind `first`."""
    keys = group.page_keys(request.block_hashes, prefixes.hash_tokens, end // group.block_tokens)
    wanted = [
        at
        for at in _positions(prefixes, group, first, end)
        if at < len(table) and table[at] != NULL_BLOCK_ID
    ]
    return GroupPages([keys[at] for at in wanted], [table[at] for at in wanted])


def _positions(prefixes: Prefixes, group: Group, first: int, end: int) -> Iterable[int]:
    """Return which blocks of a group a prefix of `end` tokens lacks behind `first`."""
    last = end // group.block_tokens
    start = first // group.block_tokens
    window = 1 if group.space == "state" else prefixes.window_pages(group)
    if group.space != "full" and window is not None:
        start = max(start, last - window)
    return range(start, last)


def _missing(
    prefixes: Prefixes,
    pages: Mapping[int, GroupPages],
    table: Sequence[Sequence[int]],
    first: int,
    end: int,
) -> str:
    """Return what keeps a load from filling all that will be read; empty if nothing does."""
    for group in prefixes.groups:
        wanted = len(list(_positions(prefixes, group, first, end)))
        got = len(pages[group.group_id].keys) if group.group_id in pages else 0
        if got != wanted:
            return (
                f"vLLM gave group {group.group_id} {got} blocks for tokens {first} .. {end}, "
                f"wanted {wanted}; its table has {len(table[group.group_id])}"
            )
    return ""
