"""Checks of the lists that a store call gets, and how a long list is cut into calls."""

from array import array
from collections.abc import Iterator, Sequence

from kvferry.arguments import is_storable, sequence, shown, string, whole_number
from kvferry.errors import ArgumentError

MAX_NAME_LENGTH = 4096
"""Characters of an object's key that Mooncake surely takes."""

MAX_OBJECT_BYTES = 2**31 - 1  # Mooncake reports byte counts of ranged calls as int32


def check_names(keys: Sequence[str]) -> Sequence[str]:
    """Return objects' keys, each a string that Mooncake takes and that occurs once.

    Raises:
        ArgumentError: one is none.
    """
    names = sequence("keys", keys, "strings")
    try:
        good = is_storable("".join(names))
    except TypeError:
        good = False
    if not good or (names and max(map(len, names)) > MAX_NAME_LENGTH):
        for index, key in enumerate(names):
            string(f"keys[{index}]", key, most=MAX_NAME_LENGTH)
    check_keys(names)
    return names


def check_integers(name: str, values: Sequence[int]) -> None:
    """Raise ArgumentError unless all are integers of 64 bits; truth values are none."""
    numbers = sequence(name, values, "integers") if not isinstance(values, range) else values
    try:
        array("q", numbers)
    except (TypeError, OverflowError):
        pass
    else:
        if bool not in set(map(type, numbers)):
            return
    for index, value in enumerate(numbers):
        whole_number(f"{name}[{index}]", value, -(2**63), 2**63 - 1)


def check_keys(keys: Sequence[str], **lists: Sequence[int]) -> None:
    """Raise ArgumentError for an empty or repeated key, or a list of another length than `keys`."""
    for name, values in lists.items():
        if len(values) != len(keys):
            raise ArgumentError(f"{len(values)} {name} for {len(keys)} keys; one each is wanted")
    if len(set(keys)) != len(keys):
        # Mooncake reports success for both, and fills or stores the last one's buffer only.
        seen: set[str] = set()
        repeated = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArgumentError(
            f"keys has {shown(repeated)} more than once, wanted each key once per call"
        )
    if "" in keys:
        raise ArgumentError("keys has an empty key, wanted one of 1 or more characters")


def check_sizes(keys: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise ArgumentError unless all sizes are in 1 .. 2**31 - 1."""
    if not sizes or (min(sizes) > 0 and max(sizes) <= MAX_OBJECT_BYTES):
        return
    for key, size in zip(keys, sizes, strict=True):
        if not 0 < size <= MAX_OBJECT_BYTES:
            raise ArgumentError(
                f"key {shown(key)}: size is {size} bytes, wanted 1 .. {MAX_OBJECT_BYTES}"
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
