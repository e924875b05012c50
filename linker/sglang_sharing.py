"""Which of SGLang's ranks share their reads: those that hold the same objects."""

import logging
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from kvferry.linker.peers import Peers
from kvferry.linker.sglang_ranks import Ranks
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer

log = logging.getLogger(__name__)


def shared_reads_of(
    params: Any,
    ranks: Ranks,
    staging: StagingBuffer,
    replicated: Collection[str],
    transfer_timeout_s: float,
) -> SharedReads | None:
    """Bring together the ranks that share reads; all of them call this at the same time.

    They are the tensor-parallel ranks, and under decode context parallelism every dcp-th of them.

    Args:
        params: SGLang's `CacheInitParams`, for the group that tensor parallelism is told by.
        ranks: this process's place.
        staging: of the linker.
        replicated: index spaces whose objects the ranks have in common.
        transfer_timeout_s: of a load: a rank that waited for others has half of it left.

    Returns:
        None where there is nothing to share.

    Raises:
        PeersLost: they do not come.
    """
    own, size = ranks.replica
    if size == 1 or not replicated:
        log.warning(
            "share_reads does nothing here: %d ranks hold the same objects, of index spaces %s",
            size, sorted(replicated),
        )  # fmt: skip
        return None
    group = getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
    everyone = dist.get_process_group_ranks(group)
    dist.barrier(group)  # they may have been apart for as long as connecting to Mooncake takes
    peers = Peers(
        everyone[ranks.dcp[0] :: ranks.dcp[1]],
        staging.tensor.device,
        timeout_s=transfer_timeout_s / 2,
    )
    log.info("rank %d of %d shares its reads of index spaces %s", own, size, sorted(replicated))
    return SharedReads(peers, staging, replicated)
