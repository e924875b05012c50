"""The connector's counters in vLLM's own Prometheus registry."""

import prometheus_client

from kvferry.linker.vllm import KVFerryConnector
from kvferry.linker.vllm_stats import COUNTERS


class Config:
    kv_transfer_config = None


def value(metric: str, engine: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"{metric}_total", {"engine": engine})


def test_counters_reach_prometheus_by_engine() -> None:
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    metrics = KVFerryConnector.build_prom_metrics(
        Config(), {kind: kind for kind in kinds}, ["engine"], {0: ["0"], 1: ["1"]}
    )
    try:
        metrics.observe({"load_bytes": 4096, "load_objects": 2}, 1)
        metrics.observe({"load_bytes": 1, "unknown": 7}, 1)
        name, _ = COUNTERS["load_bytes"]
        assert (value(name, "0"), value(name, "1")) == (0.0, 4097.0)
        assert value(COUNTERS["load_objects"][0], "1") == 2.0
        assert value(COUNTERS["save_bytes"][0], "1") == 0.0
    finally:
        for metric in list(prometheus_client.REGISTRY._collector_to_names):
            if getattr(metric, "_name", "").startswith("kvferry:"):
                prometheus_client.REGISTRY.unregister(metric)
