"""kvferry: KV-cache pages as whole objects, packed by Triton kernels, carried by Mooncake.

The names below are the public face. Each is imported when it is first used, so that a program that
needs one part (a store's owner, say) does not pay for torch or Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.auditor import audit
    from kvferry.deployments import layout_for
    from kvferry.digest import config_digest
    from kvferry.identity import ModelIdentity
    from kvferry.kernels.pack import Packer
    from kvferry.kernels.page_ids import PageIds
    from kvferry.layout import CacheLayout
    from kvferry.linker.config import LinkerConfig
    from kvferry.linker.layer_load import LayerLoad, LoadRequest
    from kvferry.linker.layer_save import LayerSave
    from kvferry.linker.linker import Linker
    from kvferry.linker.master import LocalMaster
    from kvferry.linker.mooncake import MooncakeStore
    from kvferry.linker.mooncake_config import MooncakeConfig
    from kvferry.linker.owner import LocalOwner
    from kvferry.linker.staging import StagingBuffer
    from kvferry.linker.stats import Stats
    from kvferry.linker.trace import Trace
    from kvferry.linker.transfer import Transfer, TransferResult
    from kvferry.pools import PoolTensors
    from kvferry.reshard import plan_reshard
    from kvferry.restore import restorable

__version__ = "0.1.0"

_HOMES = {
    "CacheLayout": "layout",
    "LayerLoad": "linker.layer_load",
    "LayerSave": "linker.layer_save",
    "Linker": "linker.linker",
    "LinkerConfig": "linker.config",
    "LoadRequest": "linker.layer_load",
    "LocalMaster": "linker.master",
    "LocalOwner": "linker.owner",
    "ModelIdentity": "identity",
    "MooncakeConfig": "linker.mooncake_config",
    "MooncakeStore": "linker.mooncake",
    "Packer": "kernels.pack",
    "PageIds": "kernels.page_ids",
    "PoolTensors": "pools",
    "StagingBuffer": "linker.staging",
    "Stats": "linker.stats",
    "Trace": "linker.trace",
    "Transfer": "linker.transfer",
    "TransferResult": "linker.transfer",
    "audit": "auditor",
    "config_digest": "digest",
    "layout_for": "deployments",
    "plan_reshard": "reshard",
    "restorable": "restore",
}

__all__ = [
    "CacheLayout",
    "LayerLoad",
    "LayerSave",
    "Linker",
    "LinkerConfig",
    "LoadRequest",
    "LocalMaster",
    "LocalOwner",
    "ModelIdentity",
    "MooncakeConfig",
    "MooncakeStore",
    "Packer",
    "PageIds",
    "PoolTensors",
    "StagingBuffer",
    "Stats",
    "Trace",
    "Transfer",
    "TransferResult",
    "audit",
    "config_digest",
    "layout_for",
    "plan_reshard",
    "restorable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    return getattr(import_module(f"kvferry.{_HOMES[name]}"), name)
