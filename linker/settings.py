"""Settings that come as JSON from an engine's launch line: sizes, and values of the right kind."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from kvferry.errors import ArgumentError

_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def bytes_of(name: str, value: Any) -> int:
    """Return a size: an integer, or a text such as `512mb` or `4gb`.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"(\d+)\s*([kmg]b)?", str(value).strip().lower())
    if isinstance(value, str) and found:
        return int(found[1]) * _UNITS[found[2] or ""]
    raise ArgumentError(f"{name} is {value!r}, wanted bytes, or a text such as '512mb' or '4gb'")


def file_values(variable: str, path: Path, names: Collection[str]) -> dict[str, Any]:
    """Return some settings of a JSON file.

    Args:
        variable: that names the file, for messages.
        path: of the file.
        names: of the settings; others are not read.

    Raises:
        ArgumentError: it cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{variable} is {path}, which cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ArgumentError(f"{variable} is {path}, wanted a JSON object in it")
    return {name: value for name, value in content.items() if name in names}


def values_of(extra: Mapping[str, Any], known: Mapping[str, "Field[Any]"]) -> dict[str, Any]:
    """Return the values of some settings that are given, each of its kind."""
    return {
        name: _typed(name, extra[name], field) for name, field in known.items() if name in extra
    }


def _typed(name: str, value: Any, field: "Field[Any]") -> Any:
    default = None if field.default is MISSING else field.default
    if name.endswith("_bytes"):
        return bytes_of(name, value)
    if isinstance(default, bool):
        good = isinstance(value, bool)
    elif isinstance(default, int):
        good = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(default, str):
        good = isinstance(value, str)
    elif name == "groups":
        good = value is None or (
            isinstance(value, list)
            and all(
                isinstance(pair, list)
                and len(pair) == 2
                and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in pair)
                for pair in value
            )
        )
    else:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good:
        kind = "a list of [first, end] pairs" if name == "groups" else f"a value like {default!r}"
        raise ArgumentError(f"{name} is {value!r}, wanted {kind}")
    return value
