"""Changes objects in a store behind everybody's back."""

from collections.abc import Sequence

import torch

from kvferry.linker.eviction import evict
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import Outcome

MAX_OBJECT_BYTES = 1 << 20


class SabotageError(Exception):
    """The fault itself could not be made."""


def flip(store: MooncakeStore, keys: Sequence[str]) -> None:
    """Change a bit in the middle of the middle object."""
    key = keys[len(keys) // 2]
    content = _take(store, key)
    content[len(content) // 2] ^= 1
    _put(store, key, content)


def exchange(store: MooncakeStore, keys: Sequence[str]) -> None:
    """Put one object's bytes, whole and right, under another's key."""
    content = _take(store, keys[0])
    _put(store, keys[-1], content)


def remove(store: MooncakeStore, keys: Sequence[str]) -> None:
    """Remove the middle object, as an eviction does."""
    if evict(store, [keys[len(keys) // 2]])[0].outcome is not Outcome.STORED:
        raise SabotageError("an object could not be removed")


def _take(store: MooncakeStore, key: str) -> torch.Tensor:
    size = store.client.get_size(key)
    staging = StagingBuffer(MAX_OBJECT_BYTES, device=torch.device("cpu"))
    staging.register(store)
    try:
        if store.get([key], [staging.address], [size])[0].outcome is not Outcome.FETCHED:
            raise SabotageError(f"{key} could not be read")
        return staging.tensor[:size].clone()
    finally:
        staging.unregister()


def _put(store: MooncakeStore, key: str, content: torch.Tensor) -> None:
    staging = StagingBuffer(MAX_OBJECT_BYTES, device=torch.device("cpu"))
    staging.register(store)
    try:
        staging.tensor[: len(content)] = content
        evict(store, [key])
        result = store.put([key], [staging.address], [len(content)])[0]
        if result.outcome is not Outcome.STORED:
            raise SabotageError(f"{key} could not be replaced: {result}")
    finally:
        staging.unregister()
