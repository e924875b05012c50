"""Checks of the lists that a store call gets, and how a long list is cut into calls."""

from collections.abc import Iterator, Sequence

from kvferry.errors import ArgumentError

MAX_OBJECT_BYTES = 2**31 - 1  # Mooncake reports byte counts of ranged calls as int32


def check_keys(keys: Sequence[str], **lists: Sequence[int]) -> None:
    """Raise ArgumentError for an empty or repeated key, or a list of another length than `keys`."""
    for name, values in lists.items():
        if len(values) != len(keys):
            raise ArgumentError(f"{len(values)} {name} for {len(keys)} keys; one each is wanted")
    if len(set(keys)) != len(keys):
        # Mooncake reports success for both, and fills or stores the last one's buffer only.
        seen: set[str] = set()
        repeated = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(f"keys has {repeated!r} more than once; give each key once per call")
    if "" in keys:
        raise ArgumentError("keys has an empty key")


def check_sizes(keys: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise ArgumentError unless all sizes are in 1 .. 2**31 - 1."""
    if not sizes or (min(sizes) > 0 and max(sizes) <= MAX_OBJECT_BYTES):
        return
    for key, size in zip(keys, sizes, strict=True):
        if not 0 < size <= MAX_OBJECT_BYTES:
            raise ArgumentError(
                f"key {key!r}: size is {size} bytes, wanted 1 .. {MAX_OBJECT_BYTES}"
            )


def split(sizes: Sequence[int], max_bytes: int, max_objects: int) -> Iterator[slice]:
    """Cut a list into runs of at most `max_bytes` and `max_objects`; at least one entry each."""
    if sum(sizes) <= max_bytes:
        for first in range(0, len(sizes), max_objects):
            yield slice(first, min(first + max_objects, len(sizes)))
        return
    first = 0
    num_bytes = 0
    for index, size in enumerate(sizes):
        if index > first and (num_bytes + size > max_bytes or index - first >= max_objects):
            yield slice(first, index)
            first, num_bytes = index, 0
        num_bytes += size
    if first < len(sizes):
        yield slice(first, len(sizes))
