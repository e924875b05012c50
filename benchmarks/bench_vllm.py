"""kvferry's descriptors beside those of vLLM 0.33's own MooncakeStoreConnector: `make bench-vllm`.

How much Python runs before the bytes of a prefix move? vLLM's side is its own code, called as its
receiving thread does, on the tensors that it allocates itself: `process_tokens` and `key_for` for
each block, `prepare_values`, which lists an address and a size for each block and region, and the
sum of all sizes. kvferry's side is all that a transfer does in its caller's thread and for its
parts: keys, plan, page ids, launches (started on a stub driver, which launches nothing), addresses.

vLLM makes one store call, behind all of its descriptors; `values` is its `prepare_values` alone.
kvferry makes one for each part, a quarter of the staging memory (`part MiB`): `first` is what runs
before the first one, the rest of `whole` is spread over the parts, most of it while others are on
the wire. Staging is the connector's default; for Llama on one GPU, whose blocks have 8 times the
bytes, also 8 times that.

Where vLLM lays blocks out whole (DeepSeek's must be, for their pages have two sizes), its own
connector names one range for each block, as kvferry does.

In turn, by the thread's own processor time; no bytes move. Each call is made twice running: `cold`
ratios are of the first times, when the other side has just filled the caches; the others of the
second times. Layers and block sizes are real. Pools are shrunk to 512 blocks, so block ids repeat;
neither side's work depends on which ids there are.
"""

import gc
import os
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bars import Bar, report

ROOT = Path(__file__).resolve().parent.parent
NUM_BLOCKS = 512
STAGING_ADDRESS = 1 << 40
ROUNDS = 21
JUDGED = ("Llama-70B, TP8", "Llama-70B, TP1, more staging")


@dataclass(frozen=True)
class Model:
    """What vLLM is told of a model.

    Attributes:
        specs: vLLM's cache specs, by layer.
        layout: vLLM's cache layout; only block-major ones take blocks of several sizes.
        block_tokens: of its blocks.
        times_staging: staging memory, in multiples of the connector's default.
    """

    specs: Mapping[str, Any]
    layout: Any
    block_tokens: int
    times_staging: int = 1


def models(num_llama_layers: int = 80, num_deepseek_layers: int = 61) -> dict[str, Model]:
    """Return the models, by name."""
    import plan
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    def llama(num_heads: int) -> Model:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=num_heads, head_size=128, dtype=torch.bfloat16
        )
        names = [f"model.layers.{i}.self_attn.attn" for i in range(num_llama_layers)]
        return Model(dict.fromkeys(names, spec), KVCacheLayout.LBNHC, 16)

    deepseek = plan.deepseek_v32(num_deepseek_layers)
    return {
        "Llama-70B, TP8": llama(1),
        "Llama-70B, TP1": llama(8),
        "Llama-70B, TP1, more staging": replace(llama(8), times_staging=8),
        "DeepSeek-V3.2": Model(deepseek, KVCacheLayout.BLNHC, 64),
    }


class Upstream:
    """vLLM's descriptors of a prefix."""

    def __init__(self, model: Model, caches: Mapping[str, torch.Tensor]) -> None:
        """Register vLLM's tensors with its own store layout."""
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
            ChunkedTokenDatabase,
            KeyMetadata,
        )

        size = model.block_tokens
        self._database = ChunkedTokenDatabase(KeyMetadata("model", 0, 0, 0, 0), size, size)
        self._layout = self._database.store_layout
        self._layout.register_kv_caches(list(caches.values()), NUM_BLOCKS)

    def prepare(self, hashes: list[bytes], block_ids: list[int]) -> int:
        """Make all keys and descriptors, as `KVCacheStoreRecvingThread` does; return how many."""
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
            _sum_batch_bytes,
        )

        num_tokens = len(hashes) * self._database.block_size
        keys, chunks, shards = [], [], []
        for begin, end, block_hash in self._database.process_tokens(num_tokens, hashes):
            for shard in self._layout.local_shard_ids:
                keys.append(self._layout.key_for(shard, block_hash))
                chunks.append((begin, end))
                shards.append(shard)
        addresses, sizes, _ = self._layout.prepare_values(chunks, block_ids, shards)
        assert len(keys) == len(addresses)
        assert _sum_batch_bytes(sizes) > 0
        return sum(map(len, addresses))

    def prepare_values(self, block_ids: list[int]) -> None:
        """Make the descriptors alone."""
        size = self._database.block_size
        chunks = [(at * size, (at + 1) * size) for at in range(len(block_ids))]
        self._layout.prepare_values(chunks, block_ids, [0] * len(chunks))


class Packed:
    """kvferry's descriptors of a prefix."""

    def __init__(self, pools: Any, part_bytes: int) -> None:
        """Take what kvferry reads of vLLM's tensors, and the size of a transfer's parts."""
        import stub_driver

        from kvferry.kernels.pack import Packer
        from kvferry.linker.keys import KeyScheme

        [group] = pools.groups
        self._layout = group.layout
        self._part_bytes = part_bytes
        self._packer = Packer(group.layout, "full")
        self._scheme = KeyScheme.of(group.layout, "bench")
        self._device = torch.device("cuda", 0)
        self._forget = stub_driver.calls.clear

    def prepare(self, keys: list[str], block_ids: list[int], max_parts: int) -> int:
        """Make keys, launches and descriptors of a save's first parts.

        Returns:
            How many contiguous pieces of memory the store calls name.
        """
        from kvferry.kernels.device import PACK
        from kvferry.kernels.page_ids import PageIds
        from kvferry.linker.plan import plan_transfer

        layout, num_ranges = self._layout, 0
        layers = ((0, layout.num_layers),)
        num_parts = 0
        for plan in plan_transfer(
            layout, self._scheme, keys, block_ids, unique=False, trailer=True
        ):
            ids = PageIds.upload(layout, plan.page_ids, unique=False)
            for part, some in plan.parts_and_ids(ids, self._part_bytes):
                move = self._packer.describe(PACK, some, STAGING_ADDRESS, part.stride_bytes, layers)
                for launch in self._packer.launches(move):
                    launch.start(self._device)
                num_ranges += len(part.addresses(STAGING_ADDRESS))
                num_parts += 1
                if num_parts == max_parts:
                    self._forget()
                    return num_ranges
        self._forget()
        return num_ranges


@dataclass(frozen=True)
class Times:
    """A call's times in milliseconds, round by round: behind the others, and once more."""

    cold_ms: list[float]
    warm_ms: list[float]


def in_turn(calls: list[Callable[[], object]], num_rounds: int) -> list[Times]:
    """Return each call's times, behind two rounds that do not count."""
    times = [Times([], []) for _ in calls]
    gc.collect()
    gc.disable()
    for number in range(num_rounds + 2):
        for call, took in zip(calls, times, strict=True):
            for each in (took.cold_ms, took.warm_ms):
                begin = time.thread_time()
                call()
                if number > 1:
                    each.append((time.thread_time() - begin) * 1e3)
    gc.enable()
    return times


def compare(name: str, model: Model, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Return the table's row of one model and prefix."""
    import plan

    from kvferry.linker.vllm_settings import ConnectorConfig

    made = plan.make(model.specs, model.layout, num_blocks=NUM_BLOCKS)
    part_bytes = model.times_staging * ConnectorConfig.staging_bytes // 4
    theirs, ours = Upstream(model, made.caches), Packed(made.read(), part_bytes)
    num_blocks = num_tokens // model.block_tokens
    hashes = [index.to_bytes(32, "big") for index in range(num_blocks)]
    keys = [one.hex() for one in hashes]
    block_ids = random.Random(0).choices(range(1, NUM_BLOCKS), k=num_blocks)
    whole, vllm, first, values = in_turn(
        [
            partial(ours.prepare, keys, block_ids, sys.maxsize),
            partial(theirs.prepare, hashes, block_ids),
            partial(ours.prepare, keys, block_ids, 1),
            partial(theirs.prepare_values, block_ids),
        ],
        num_rounds,
    )
    return {
        "model": name,
        "tokens": num_tokens,
        "blocks": num_blocks,
        "vLLM: ranges": theirs.prepare(hashes, block_ids),
        "vLLM ms": statistics.median(vllm.warm_ms),
        "values ms": statistics.median(values.warm_ms),
        "part MiB": part_bytes >> 20,
        "kvferry: ranges": ours.prepare(keys, block_ids, sys.maxsize),
        "first ms": statistics.median(first.warm_ms),
        "whole ms": statistics.median(whole.warm_ms),
        "vLLM / first": _ratio(vllm.warm_ms, first.warm_ms),
        "vLLM / whole": _ratio(vllm.warm_ms, whole.warm_ms),
        "cold: first": _ratio(vllm.cold_ms, first.cold_ms),
        "cold: whole": _ratio(vllm.cold_ms, whole.cold_ms),
    }


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def load_vllm() -> None:
    """Make vLLM's plans importable, on a CPU."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path += [str(ROOT / folder) for folder in ("engine_tests/vllm", "engine_tests", "tests")]
    warnings.filterwarnings("ignore", module="vllm")


def main() -> int:
    """Print the table and the bar."""
    load_vllm()
    torch.set_num_threads(1)
    tiny = "--tiny" in sys.argv[1:]
    rows = [
        compare(name, model, num_tokens, 3 if tiny else ROUNDS)
        for name, model in (models(4, 2) if tiny else models()).items()
        for num_tokens in ((512,) if tiny else (32768, 131072))
    ]
    bars = [
        Bar(f"vllm_over_kvferry_{re.sub('[, ]+', '_', name)}", row["vLLM / whole"], 20.0, True)
        for row in rows
        if row["tokens"] == 32768 and (name := row["model"]) in JUDGED
    ]
    return report("vllm", rows, bars)


if __name__ == "__main__":
    sys.exit(main())
