"""Any `@triton.jit` function, found by its path, as a variant that can be inspected."""

import ast
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from triton import JITFunction

from kvferry.tuning.compiled import Variant


def load_function(
    path: str,
    signature: str,
    constants: dict[str, Any],
    num_warps: int,
    payload_bytes: int,
    access_bytes: int,
) -> Variant:
    """Return a function of others as a variant.

    Args:
        path: `folder/file.py:name`, or `package.module:name`; the module is imported.
        signature: types of the run-time arguments in order, `*i16:16,*i64,i32`; `:16` says that an
            argument is a multiple of 16, which Triton finds by itself when a kernel is launched.
        constants: compile-time arguments by name; those with defaults may be left out.
        num_warps: warps per program.
        payload_bytes: what one program moves, 0 if that is not known.
        access_bytes: the width that its payload should have.

    Raises:
        ValueError: there is no such function, or the arguments are not its own.
    """
    place, _, name = path.rpartition(":")
    kernel = getattr(_module(place), name, None) if place else None
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"function is {path!r}, wanted FILE.py:NAME of a @triton.jit function")
    given = dict(constants)
    for param in kernel.params:
        if param.is_constexpr and param.name not in given and param.has_default:
            given[param.name] = param.default
    unknown = given.keys() - {param.name for param in kernel.params}
    missing = {param.name for param in kernel.params if param.is_constexpr} - given.keys()
    if unknown or missing:
        raise ValueError(
            f"constants lack {sorted(missing)} and have {sorted(unknown)} beyond what {name} takes"
        )
    names = [param.name for param in kernel.params if param.name not in given]
    types = [each.strip() for each in signature.split(",")] if signature else []
    if len(types) != len(names):
        raise ValueError(
            f"signature has {len(types)} types, wanted {len(names)}: {', '.join(names)}"
        )
    return Variant(
        name,
        kernel,
        given,
        num_warps,
        payload_bytes,
        access_bytes,
        signature={each: kind.partition(":")[0] for each, kind in zip(names, types, strict=True)},
        aligned={each for each, kind in zip(names, types, strict=True) if kind.endswith(":16")},
    )


def parse_constants(text: str) -> dict[str, Any]:
    """Return `BLOCK=1024,MODE='a'` as a dict; what is no literal of Python's is a string.

    Raises:
        ValueError: a part has no `=`.
    """
    constants: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"constants have {part!r}, wanted NAME=VALUE")
        try:
            constants[name.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            constants[name.strip()] = value
    return constants


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("inspected", place)
    if spec is None or spec.loader is None:
        raise ValueError(f"file is {place!r}, wanted one of Python's")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
