"""What a simulated model runs on: a real model's layout, and a linker over loopback."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvferry import (
    CacheLayout,
    Linker,
    LinkerConfig,
    LocalMaster,
    LocalOwner,
    MooncakeConfig,
    MooncakeStore,
    StagingBuffer,
)
from kvferry.linker.trace import Trace
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
def local_linker(
    layout: CacheLayout, config: LinkerConfig, trace: Trace, *, owner_bytes: int, staging_bytes: int
) -> Iterator[Linker]:
    """Make a linker whose objects go to an owner in another process, over TCP loopback."""
    assert layout.device is not None
    with ExitStack() as stack:
        master = stack.enter_context(LocalMaster())
        stack.enter_context(LocalOwner(master.address, owner_bytes))
        store = stack.enter_context(MooncakeStore(MooncakeConfig(master.address)))
        staging = StagingBuffer(staging_bytes, device=layout.device)
        yield stack.enter_context(Linker(layout, store, staging, config, trace=trace))
