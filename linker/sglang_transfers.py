"""SGLang's transfers as page keys and page ids, which come to the host without a wait.

SGLang hands over slots as int64 tensors on the GPU. Their copy to the host is enqueued where they
are handed over, and waited for by the thread that carries the transfer out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.errors import ArgumentError, TransferFailed
from kvferry.linker.sglang_pools import TRANSFERS, SGLangPools
from kvferry.linker.streams import Fence, fence_of_caller

_SPACES = {name: space for space, name in TRANSFERS.items()}

COPY_LIMIT_S = 30.0
"""How long page ids may take to reach the host: behind all that their stream was given before."""


@dataclass(frozen=True)
class Pages:
    """Pages of one load or offload.

    Attributes:
        keys: page keys, each once, in the order of the prefix.
        positions: by index space, which of the keys have a page there.
        page_ids: by index space, int64 on the host, of those keys. Filled once `fence` is passed.
        fence: behind the copies of page ids.
    """

    keys: list[str]
    positions: Mapping[str, Sequence[int]]
    page_ids: Mapping[str, torch.Tensor]
    fence: Fence

    def on_host(self) -> dict[str, NDArray[np.int64]]:
        """Return page ids by index space, `[len(keys)]`, -1 where a key has no page there.

        Raises:
            TransferFailed: they did not come within `COPY_LIMIT_S`.
        """
        if not self.fence.wait(COPY_LIMIT_S):
            raise TransferFailed(
                f"page ids were not on the host within {COPY_LIMIT_S:g} s", cause="deadline"
            )
        rows = {}
        for space, positions in self.positions.items():
            row = np.full(len(self.keys), -1, dtype=np.int64)
            row[np.asarray(positions, dtype=np.int64)] = self.page_ids[space].numpy()
            rows[space] = row
        return rows


def pages_of(pools: SGLangPools, transfers: Sequence[Any], *, check_slots: bool = False) -> Pages:
    """Return the pages of SGLang's transfers, and begin to copy their ids to the host.

    Which keys there are and which spaces depends on the transfers alone, so that all ranks agree.

    Args:
        pools: whose slots they are.
        transfers: `PoolTransfer`s with `name`, `keys` and `device_indices`, one for each space.
        check_slots: see that slots are whole pages; waits for the device.

    Raises:
        ArgumentError: a transfer of a pool that the layout has not, two of one pool, keys twice, or
            another number of slots than its keys want.
        LayoutError: slots are no whole pages.
    """
    by_space: dict[str, Any] = {}
    for transfer in transfers:
        name = str(getattr(transfer.name, "value", transfer.name))
        space = _SPACES.get(name)
        if space not in pools.layout.spaces or space in by_space:
            raise ArgumentError(
                f"transfers are of pools {[str(each.name) for each in transfers]}, wanted each of "
                f"{[TRANSFERS[known] for known in pools.layout.spaces]} at most once"
            )
        assert space is not None
        by_space[space] = transfer
    keys = _all_keys(by_space)
    place = {key: number for number, key in enumerate(keys)}
    positions, page_ids = {}, {}
    for space, transfer in by_space.items():
        slots = transfer.device_indices
        wanted = len(transfer.keys) * pools.slots_per_page[space]
        if slots is None or len(slots) != wanted or len(set(transfer.keys)) != len(transfer.keys):
            raise ArgumentError(
                f"transfer of {TRANSFERS[space]!r} has {0 if slots is None else len(slots)} slots "
                f"for {len(set(transfer.keys))} different keys, wanted {wanted} for "
                f"{len(transfer.keys)}"
            )
        if check_slots:
            pools.check_slots(space, slots)
        positions[space] = [place[key] for key in transfer.keys]
        ids = pools.page_ids(space, slots)
        # A copy also on a CPU: the tensor may be one that SGLang goes on to use.
        page_ids[space] = ids.to("cpu", non_blocking=True) if ids.is_cuda else ids.clone()
    device = pools.layout.device
    assert device is not None
    return Pages(keys, positions, page_ids, fence_of_caller(device))


def _all_keys(by_space: Mapping[str, Any]) -> list[str]:
    """Return all keys of the transfers; where `full` is among them, its are first, in order."""
    first = by_space.get("full")
    keys = list(first.keys) if first is not None else []
    known = set(keys)
    for transfer in by_space.values():
        keys += [key for key in transfer.keys if key not in known]
        known.update(transfer.keys)
    return keys
