"""A digest of an engine's settings: the same for the same settings, in any process and order."""

import enum
import hashlib
import json
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from kvferry.errors import ArgumentError

MAX_DEPTH = 32
"""Mappings and lists inside each other; a configuration that contains itself ends there too."""


def config_digest(config: Mapping[str, Any]) -> str:
    """Return 32 hex digits that tell a configuration from every other one.

    Equal are: mappings in any order of their keys, lists and tuples, sets and their sorted lists,
    whole numbers however they are written (10000 and 10000.0), an enum's member and its value, a
    torch dtype and its name. `None` is a value: an entry that is None and one that is absent
    differ, as do True and 1.

    Args:
        config: names to None, bool, numbers, strings, enum members, torch dtypes, and lists, sets
            and mappings of them. For `ModelIdentity.config` give what changes the meaning of KV
            (rope, heads, windows, norms, scales, quantization, LoRA), and nothing that may differ
            between engines that compute the same: names of hosts, length of context.

    Raises:
        ArgumentError: a value has no text that is the same in every process, as objects and
            functions, or is not equal to itself (nan); names its place.
    """
    if not isinstance(config, Mapping):
        raise ArgumentError(f"config is a {type(config).__name__}, wanted a mapping")
    text = json.dumps(_plain(config, "config", MAX_DEPTH), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return the value in JSON's types, one text for one meaning."""
    if depth == 0:
        raise ArgumentError(f"{where} is deeper than {MAX_DEPTH}, wanted a configuration that ends")
    if isinstance(value, enum.Enum):
        return _plain(value.value, where, depth - 1)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and hasattr(value, "is_integer"):
        return _number(float(value), where)
    if isinstance(value, Mapping):
        return _entries(value, where, depth)
    if isinstance(value, Set):
        items = [_plain(item, f"{where}[...]", depth - 1) for item in value]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{where}[{at}]", depth - 1) for at, item in enumerate(value)]
    raise ArgumentError(
        f"{where} is a {type(value).__name__}, wanted None, bool, a number, a string, or a list, "
        "set or mapping of them"
    )


def _number(value: float, where: str) -> int | float | str:
    if math.isnan(value):
        raise ArgumentError(f"{where} is nan, wanted a number that is equal to itself")
    if math.isinf(value):
        return value
    return int(value) if value.is_integer() else value


def _entries(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, item in value.items():
        name = key.value if isinstance(key, enum.Enum) else key
        # JSON's names are strings: what was read from it has "3" where a program may have 3.
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ArgumentError(f"{where} has the key {key!r}, wanted strings or whole numbers")
        if str(name) in entries:
            raise ArgumentError(f"{where} has the key {name!r} twice, as a string and a number")
        entries[str(name)] = _plain(item, f"{where}[{name!r}]", depth - 1)
    return entries
