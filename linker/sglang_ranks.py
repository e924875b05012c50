"""SGLang's ranks: whose bytes a rank's objects are, and which of them it writes."""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from kvferry.errors import ArgumentError
from kvferry.identity import ModelIdentity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """A rank among those that share a model; each pair is (rank, size).

    Attention data parallelism has no place here: its replicas hold equal bytes under equal keys,
    and each finds what the others wrote. Tensor parallelism is that of the attention.

    Attributes:
        tp: attention's tensor parallelism.
        pp: pipeline parallelism.
        cp: attention's context parallelism.
        dcp: decode context parallelism: each rank keeps every dcp-th token.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)

    @property
    def num_ranks(self) -> int:
        """Ranks that share a host's memory: as SGLang's own client counts them."""
        return self.tp[1] * self.pp[1]

    def identity(self, **told: Any) -> ModelIdentity:
        """Return who writes this rank's bytes, with what else `ModelIdentity` is told."""
        return ModelIdentity(tp=self.tp, pp=self.pp, cp=self.cp, dcp=self.dcp, **told)

    @property
    def replica(self) -> tuple[int, int]:
        """This rank's number, and how many there are, among those whose replicated bytes agree.

        Tensor-parallel ranks do, but under decode context parallelism only every dcp-th.
        """
        (rank, size), (_, dcp_size) = self.tp, self.dcp
        return rank // dcp_size, max(1, size // dcp_size)

    def writes(self, page_keys: Sequence[str]) -> list[bool]:
        """Return, for pages that several ranks hold alike, which this rank stores.

        By a hash of the key, so that the ranks share them out without a word to each other.
        """
        rank, size = self.replica
        if size == 1:
            return [True] * len(page_keys)
        return [zlib.crc32(key.encode()) % size == rank for key in page_keys]


def ranks_of(params: Any, dcp: tuple[int, int] = (0, 1)) -> Ranks:
    """Return this process's place.

    Args:
        params: SGLang's `CacheInitParams`.
        dcp: rank and size of decode context parallelism, which SGLang keeps elsewhere.

    Raises:
        ArgumentError: the ranks do not fit together.
    """
    group = getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
    tp = (0, 1)
    if dist.is_available() and dist.is_initialized():
        tp = (dist.get_rank(group), dist.get_world_size(group))
    ranks = Ranks(
        tp, (params.pp_rank, params.pp_size), (params.attn_cp_rank, params.attn_cp_size), dcp
    )
    for name in ("tp", "pp", "cp", "dcp"):
        rank, size = getattr(ranks, name)
        if not 0 <= rank < size:
            raise ArgumentError(f"{name} is (rank {rank}, size {size}), wanted 0 <= rank < size")
    if ranks.tp[1] % ranks.dcp[1] or ranks.tp[0] % ranks.dcp[1] != ranks.dcp[0]:
        raise ArgumentError(
            f"dcp is {ranks.dcp} and tp {ranks.tp}, wanted ranks of one dcp group side by side"
        )
    return ranks


def agree_on(text: str, params: Any) -> str:
    """Return one rank's text on all of them; all call this at the same time.

    Args:
        text: each rank's own.
        params: SGLang's `CacheInitParams`, whose groups of ranks talk over the host.
    """
    told = [text]
    if not (dist.is_available() and dist.is_initialized()):
        return text
    # One kind of parallelism after the other: each hands on what the one before has agreed upon.
    for names in (
        ("attn_tp_cache_group", "tp_cache_group"),
        ("attn_cp_cache_group",),
        ("pp_cache_group",),
    ):
        group = next((each for name in names if (each := getattr(params, name, None))), None)
        if group is not None and dist.get_world_size(group) > 1:
            dist.broadcast_object_list(told, dist.get_process_group_ranks(group)[0], group)
    return told[0]


def check_pipeline(ranks: Ranks, allowed: bool) -> None:
    """Refuse pipeline parallelism, unless it is asked for by name.

    Over tensor and context parallelism SGLang makes lookups, verdicts and finished offloads the
    same; over pipeline stages, in 0.5.23, it does not. A prefix that one stage finds and another
    misses gives them batches of different shapes.

    Raises:
        ArgumentError: there are several stages, and `allowed` is false.
    """
    if ranks.pp[1] > 1 and not allowed:
        raise ArgumentError(
            f"pp is {ranks.pp}: SGLang's stages do not agree on what its external linker finds; "
            "wanted one stage, or allow_pipeline in linker_extra_config to risk it"
        )
    if ranks.pp[1] > 1:
        log.warning("allow_pipeline: stages may disagree on prefixes, and then fail")
