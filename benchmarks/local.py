"""What a simulated model runs on: a real model's layout, and a store over loopback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry import CacheLayout, LocalMaster, LocalOwner, MooncakeConfig, MooncakeStore
from kvferry.models import description


def cut(model: str, num_layers: int | None) -> CacheLayout:
    """Return a model's layout, of its first layers alone if a number is given."""
    full = description(model)
    num_layers = min(num_layers or full["num_layers"], full["num_layers"])
    pools = [
        {**pool, "layers": [layer for layer in pool["layers"] if layer < num_layers]}
        for pool in full["pools"]
    ]
    return CacheLayout.from_description(
        {
            "page_size": full["page_size"],
            "num_layers": num_layers,
            "pools": [pool for pool in pools if pool["layers"]],
        }
    )


@contextmanager
def local_store(owner_bytes: int) -> Iterator[MooncakeStore]:
    """Make a store whose objects go to an owner in another process, over TCP loopback."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    with (
        LocalMaster() as master,
        LocalOwner(master.address, owner_bytes),
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        yield store
