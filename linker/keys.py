"""Object keys: one function makes them for exists, put and get."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout

MAX_KEY_LENGTH = 1024
"""Characters of a page key. Mooncake takes 4096 and more; a key travels with every call."""


@dataclass(frozen=True)
class KeyScheme:
    """`namespace/fingerprint/share/page key/index space`.

    Two page objects have one key only if their bytes mean the same: the fingerprint holds geometry,
    model and parallel sizes, the share this rank's part.

    Attributes:
        namespace: keeps deployments that share a store apart; without a slash.
        origins: by index space, fingerprint and share of its objects.
    """

    namespace: str
    origins: Mapping[str, tuple[str, str]]

    def __post_init__(self) -> None:
        if not self.namespace or "/" in self.namespace or "\0" in self.namespace:
            raise ArgumentError(
                f"namespace is {self.namespace!r}, wanted a non-empty string without a slash"
            )

    @classmethod
    def of(
        cls, layout: CacheLayout, namespace: str, replicated: Collection[str] = ()
    ) -> "KeyScheme":
        """Return the scheme of a layout's objects.

        Args:
            layout: whose objects they are.
            namespace: first part of every key.
            replicated: index spaces whose objects are equal on every tensor-parallel rank. Their
                keys name no rank and no number of ranks, so that each is stored once for all.

        Raises:
            ArgumentError: the namespace cannot be used, or the layout has no such space.
        """
        unknown = sorted(set(replicated) - set(layout.spaces))
        if unknown:
            raise ArgumentError(f"replicated is {unknown}, wanted index spaces {layout.spaces}")
        origins = {}
        for space in layout.spaces:
            if space in replicated:
                anyone = replace(layout.identity, tp=(0, 1))
                origins[space] = (layout.fingerprint_of_space(space, anyone), anyone.share)
            else:
                origins[space] = (layout.fingerprint, layout.identity.share)
        return cls(namespace, origins)

    def fingerprint(self, space: str) -> str:
        """Return the fingerprint of one index space's objects, 32 hex digits."""
        return self.origins[space][0]

    def object_keys(self, page_keys: Sequence[str], space: str) -> list[str]:
        """Return the object keys of pages in one index space, in order."""
        fingerprint, share = self.origins[space]
        prefix, suffix = f"{self.namespace}/{fingerprint}/{share}/", f"/{space}"
        return [f"{prefix}{page_key}{suffix}" for page_key in page_keys]


def _are_usable(keys: Sequence[str]) -> bool:
    """Whether each is surely a usable string, without a look at them one by one."""
    try:
        joined = "".join(keys)
    except TypeError:
        return False
    lengths = set(map(len, keys))
    return not keys or (min(lengths) >= 1 and max(lengths) <= MAX_KEY_LENGTH and "\0" not in joined)


def check_page_keys(page_keys: Sequence[str]) -> Sequence[str]:
    """Return the keys in order, each a string that occurs once; a list or tuple is not copied.

    Raises:
        ArgumentError: one is not a string, is empty, too long, holds a NUL, or occurs twice.
    """
    if isinstance(page_keys, str):
        raise ArgumentError("keys is one string, wanted a sequence of them")
    keys = page_keys if isinstance(page_keys, list | tuple) else list(page_keys)
    if not _are_usable(keys):
        for index, key in enumerate(keys):
            if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_LENGTH or "\0" in key:
                raise ArgumentError(
                    f"keys[{index}] is {key!r}, wanted a string of 1 .. {MAX_KEY_LENGTH} characters"
                )
    if len(set(keys)) != len(keys):
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            if first.setdefault(key, index) != index:
                raise ArgumentError(f"keys[{index}] repeats keys[{first[key]}]: {key!r}")
    return keys
