"""Checks of single arguments, one function each, and how a key stands in a message.

Each returns the value as the code wants it, or raises an error that names the argument, what came
and what was wanted. Truth values are no numbers, and whole floats no integers: what is nearly right
is a mistake of the caller's.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.errors import ArgumentError, LayoutError

if TYPE_CHECKING:
    import torch

MAX_SECONDS = 1e9
"""Thirty years; the system's own waits overflow at some 300."""

_SHOWN = 96
"""Characters of a value that a message repeats."""

_T = TypeVar("_T")


def shown(value: object) -> str:
    """Return a value as it stands in a message: its `repr`, the middle left out of a long one.

    Keys may have a thousand characters, and lists a thousand keys.
    """
    if isinstance(value, str | bytes) and len(value) > _SHOWN:
        half = _SHOWN // 2
        return f"{value[:half]!r}...{value[-half:]!r} ({len(value)} characters)"
    said = repr(value)
    if len(said) <= _SHOWN + 16:
        return said
    return f"{said[:_SHOWN]}... ({type(value).__name__})"


def whole_number(
    name: str,
    value: object,
    least: int,
    most: int | None = None,
    *,
    error: type[ArgumentError] = ArgumentError,
) -> int:
    """Return an integer within `least .. most`; numpy's and torch's integers are such too.

    Raises:
        ArgumentError: it is none, or outside; or `error`, where that is another.
    """
    found = value if type(value) is int else _as_int(value)
    if found is None or found < least or (most is not None and found > most):
        wanted = f"at least {least}" if most is None else f"{least} .. {most}"
        kind = "an integer, " if found is None else ""
        raise error(f"{name} is {shown(value)}, wanted {kind}{wanted}")
    return found


def number(
    name: str, value: object, *, least: float = 0.0, most: float = MAX_SECONDS, above: bool = False
) -> float:
    """Return a finite number within `least .. most`, or above `least` and up to `most`.

    Raises:
        ArgumentError: it is none, or outside.
    """
    found = _as_float(value)
    if found is None or not (least < found if above else least <= found) or found > most:
        wanted = f"above {least:g}" if above else f"{least:g} or more"
        raise ArgumentError(
            f"{name} is {shown(value)}, wanted a number, {wanted} and at most {most:g}"
        )
    return found


def seconds(name: str, value: object, *, above: bool = False) -> float:
    """Return a time in seconds, 0 or more, or above 0; not nan and not infinite.

    Raises:
        ArgumentError: it is none.
    """
    return number(name, value, above=above)


def seconds_or_none(name: str, value: object) -> float | None:
    """Return a time as `seconds`, or None where that stands for a bound of its own.

    Raises:
        ArgumentError: it is neither.
    """
    return None if value is None else seconds(name, value)


def or_none(name: str, value: object, check: Callable[..., _T], *bounds: Any) -> _T | None:
    """Return None where None came, else what `check` returns."""
    return None if value is None else check(name, value, *bounds)


def settle(owner: object, names: str, check: Callable[..., Any], *bounds: Any, **more: Any) -> None:
    """Check attributes of a frozen object while it is made, and keep them as the check returns.

    Args:
        owner: the object.
        names: of the attributes, with blanks between.
        check: one of the functions here.
        bounds: what it takes behind name and value.
        more: likewise.
    """
    for name in names.split():
        object.__setattr__(owner, name, check(name, getattr(owner, name), *bounds, **more))


def flag(name: str, value: object) -> bool:
    """Return True or False; nothing else has a truth here.

    Raises:
        ArgumentError: it is neither.
    """
    if value is not True and value is not False:
        raise ArgumentError(f"{name} is {shown(value)}, wanted True or False")
    return value


def string(
    name: str,
    value: object,
    *,
    least: int = 1,
    most: int | None = None,
    error: type[ArgumentError] = ArgumentError,
) -> str:
    """Return a string of `least .. most` characters that can be sent and stored; see `is_storable`.

    Raises:
        ArgumentError: it is none; or `error`, where that is another.
    """
    good = isinstance(value, str) and is_storable(value)
    if not good or len(value) < least or (most is not None and len(value) > most):  # type: ignore[arg-type]
        length = f"of {least} or more" if most is None else f"of {least} .. {most}"
        raise error(
            f"{name} is {shown(value)}, wanted a string {length} characters that UTF-8 can say, "
            "without NUL"
        )
    return value  # type: ignore[return-value]


def is_storable(value: str) -> bool:
    """Whether a string can be sent: no NUL, and no half of a surrogate pair, which UTF-8 lacks."""
    if "\0" in value:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def one_of(name: str, value: object, wanted: Collection[_T]) -> _T:
    """Return a value that is among the wanted ones.

    Raises:
        ArgumentError: it is not.
    """
    for each in wanted:
        if type(value) is type(each) and value == each:
            return each
    raise ArgumentError(f"{name} is {shown(value)}, wanted one of {tuple(wanted)}")


def device_of(name: str, value: object) -> "torch.device":
    """Return torch's device; its name will do.

    Raises:
        ArgumentError: torch knows none of that name.
    """
    import torch  # a store's owner checks arguments too, and has no use for it

    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(value)
    raise ArgumentError(f"{name} is {shown(value)}, wanted a torch.device or its name")


def of_type(
    name: str,
    value: object,
    wanted: type[_T],
    what: str = "",
    *,
    error: type[ArgumentError] = ArgumentError,
) -> _T:
    """Return a value of a type.

    Raises:
        ArgumentError: it is of another; `what` says what was wanted, by default the type's name.
            Or `error`, where that is another.
    """
    if not isinstance(value, wanted):
        raise error(f"{name} is {shown(value)}, wanted {what or wanted.__name__}")
    return value


def mapping(
    name: str, value: object, what: str, *, error: type[ArgumentError] = ArgumentError
) -> Mapping[Any, Any]:
    """Return a mapping.

    Raises:
        ArgumentError: it is none; `what` says what was wanted. Or `error`, where that is another.
    """
    if not isinstance(value, Mapping):
        raise error(f"{name} is {shown(value)}, wanted {what}")
    return value


def sequence(name: str, value: object, what: str) -> Sequence[Any]:
    """Return a list or tuple of what came; a string is one thing, not a sequence of letters.

    Raises:
        ArgumentError: it is a string, bytes, or nothing that can be gone through.
    """
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str | bytes | bytearray):
        raise ArgumentError(f"{name} is one string {shown(value)}, wanted a sequence of {what}")
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        raise ArgumentError(f"{name} is {shown(value)}, wanted a sequence of {what}") from None


def integers(owner: str, key: str, value: object) -> tuple[int, ...]:
    """Return an entry of a description that must be a sequence of integers.

    Raises:
        LayoutError: it is none; names owner and entry.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise LayoutError(f"{owner}: {key} is {shown(value)}, wanted a sequence of integers")
    return tuple(
        whole_number(f"{owner}: {key}[{index}]", each, -(2**48), 2**48, error=LayoutError)
        for index, each in enumerate(value)
    )


def _as_int(value: object) -> int | None:
    """Return an integer, also another library's; None where it is none, or a truth value."""
    if isinstance(value, bool) or getattr(value, "shape", ()) != () or _is_truth(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _as_float(value: object) -> float | None:
    """Return a number, also another library's; None where it is none, nan, or a truth value."""
    if type(value) is not float:
        is_scalar = isinstance(value, int | float) or getattr(value, "shape", None) == ()
        if isinstance(value, bool | str | bytes | complex) or not is_scalar or _is_truth(value):
            return None
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(found) else found


def _is_truth(value: object) -> bool:
    return "bool" in str(getattr(value, "dtype", ""))
