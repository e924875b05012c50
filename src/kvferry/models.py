"""Descriptions of real models' pools that ship with kvferry, by name."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from kvferry.errors import ArgumentError


@cache
def descriptions() -> dict[str, dict[str, Any]]:
    """Return all descriptions, by model name, in the form that `from_description` takes.

    Geometry comes from the engines' own pools and the models' published configurations, as each
    description's `source` says. `object_bytes` holds the sizes that must come out.
    """
    text = (files("kvferry") / "layouts.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def description(name: str) -> dict[str, Any]:
    """Return one model's description.

    Raises:
        ArgumentError: no such model; names those that there are.
    """
    known = descriptions()
    if name not in known:
        raise ArgumentError(f"model is {name!r}, wanted one of: {', '.join(sorted(known))}")
    return known[name]
