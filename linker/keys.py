"""Object keys: one function makes them for exists, put and get."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import quote

from kvferry.arguments import is_storable, sequence, shown, string
from kvferry.errors import ArgumentError
from kvferry.layout import CacheLayout

MAX_KEY_LENGTH = 1024
"""Characters of a page key. Mooncake takes 4096 and more; a key travels with every call."""

MAX_PART_LENGTH = 200
"""Characters of a namespace, and of a model or generation as it stands in keys."""


@dataclass(frozen=True)
class KeyScheme:
    """`namespace/model/generation/fingerprint/share/page key/index space`, or `.../space.unsealed`.

    Two page objects have one key only if their bytes mean the same: the fingerprint holds geometry,
    model, generation and parallel sizes, the share this rank's part. Model and generation are there
    to be read, and to be deleted by: see `stem`.

    Attributes:
        namespace: keeps deployments that share a store apart; without a slash.
        origins: by index space, fingerprint and share of its objects.
        model: the model's id, any text; see `key_part`.
        generation: the set of weights, likewise.
        sealed: whether the objects end in a trailer. Those without are other objects: who verifies
            what it loads never finds them, nor they what it stored.
    """

    namespace: str
    origins: Mapping[str, tuple[str, str]]
    model: str = ""
    generation: str = ""
    sealed: bool = True

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        namespace: str,
        replicated: Collection[str] = (),
        *,
        sealed: bool = True,
    ) -> "KeyScheme":
        """Return the scheme of a layout's objects.

        Args:
            layout: whose objects they are.
            namespace: first part of every key.
            replicated: index spaces whose objects are equal on every tensor-parallel rank. Their
                keys name no rank and no number of ranks, so that each is stored once for all.
            sealed: whether the objects end in a trailer.

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
        identity = layout.identity
        return cls(namespace, origins, identity.model, identity.generation, sealed)

    @cached_property
    def stem(self) -> str:
        """What the keys of all objects of this model's generation begin with, on every rank."""
        return stem_of_parts(self.namespace, key_part(self.model), key_part(self.generation))

    def fingerprint(self, space: str) -> str:
        """Return the fingerprint of one index space's objects, 32 hex digits."""
        return self.origins[space][0]

    def object_keys(self, page_keys: Sequence[str], space: str) -> list[str]:
        """Return the object keys of pages in one index space, in order."""
        fingerprint, share = self.origins[space]
        prefix = f"{self.stem}{fingerprint}/{share}/"
        suffix = f"/{space}" if self.sealed else f"/{space}.unsealed"
        return [f"{prefix}{page_key}{suffix}" for page_key in page_keys]


def check_namespace(namespace: str) -> None:
    """Raise an ArgumentError unless a string can be the first part of keys."""
    string("namespace", namespace, most=MAX_PART_LENGTH)
    if "/" in namespace:
        raise ArgumentError(f"namespace is {shown(namespace)}, wanted one without a slash")


def stem_of_parts(namespace: str, model_part: str, generation_part: str) -> str:
    """Return `namespace/model/generation/`, which no other generation's keys begin with."""
    return f"{namespace}/{model_part}/{generation_part}/"


def key_part(name: str) -> str:
    """Return a name as a part of keys: `-` if it is empty, percent-encoded where it must be.

    Names that are too long end in a digest of the whole.
    """
    quoted = quote(name, safe="", errors="surrogatepass") or "-"
    if len(quoted) <= MAX_PART_LENGTH:
        return quoted
    digest = hashlib.sha256(quoted.encode()).hexdigest()[:16]
    return f"{quoted[: MAX_PART_LENGTH - 17]}~{digest}"


def _are_usable(keys: Sequence[str]) -> bool:
    """Whether each is surely a usable string, without a look at them one by one."""
    try:
        joined = "".join(keys)
    except TypeError:
        return False
    lengths = set(map(len, keys))
    return not keys or (
        min(lengths) >= 1 and max(lengths) <= MAX_KEY_LENGTH and is_storable(joined)
    )


def check_page_keys(page_keys: Sequence[str]) -> Sequence[str]:
    """Return the keys in order, each a string that occurs once; a list or tuple is not copied.

    Raises:
        ArgumentError: one is not a string, is empty, too long, holds a NUL or half a surrogate
            pair, or occurs twice.
    """
    keys = sequence("keys", page_keys, "strings")
    if not _are_usable(keys):
        for index, key in enumerate(keys):
            string(f"keys[{index}]", key, most=MAX_KEY_LENGTH)
    if len(set(keys)) != len(keys):
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            if first.setdefault(key, index) != index:
                raise ArgumentError(
                    f"keys[{index}] repeats keys[{first[key]}]: {shown(key)}, wanted each once"
                )
    return keys
