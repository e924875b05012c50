"""What kvferry's connector hands to vLLM in vLLM's own classes: messages, counters, metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.linker.vllm_groups import RankKeys
from kvferry.linker.vllm_jobs import LoadsEnded, StepJobs
from kvferry.linker.vllm_stats import COUNTERS, in_words, together


@dataclass
class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to its workers, each step."""

    jobs: StepJobs


@dataclass
class KVFerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, at the start and whenever it wakes up."""

    keys: RankKeys


@dataclass
class KVFerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler.

    Attributes:
        saves: that read no block any more: number to how many workers.
        stored: that have ended, good or bad, likewise.
        loads: that failed within a step.
        keys: of the workers that have gone over to another generation.
    """

    saves: Counter[int]
    stored: Counter[int]
    loads: LoadsEnded
    keys: list[RankKeys] = field(default_factory=list)

    def aggregate(self, other: "KVFerryWorkerMetadata") -> "KVFerryWorkerMetadata":
        """Return both together."""
        return KVFerryWorkerMetadata(
            self.saves + other.saves,
            self.stored + other.stored,
            self.loads.and_also(other.loads),
            [*self.keys, *other.keys],
        )


@dataclass
class KVFerryStats(KVConnectorStats):  # type: ignore[misc]
    """Counters since the last time; see `vllm_stats`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was counted."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVFerryStats":
        """Add another's counters."""
        self.data = together(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log tells."""
        return in_words(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counters for Prometheus, through vLLM's own endpoint."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=metric, documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, (metric, text) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)
