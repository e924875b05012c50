"""Deliberate faults in the library, each of which the suite must catch: `make mutants`.

Each fault is a replacement of text in one file, applied to a copy of the tree, and the tests that
should notice it are run there. Prints a line per fault and `n of n`; exit status 1 if one survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "kernels", "linker", "tuning", "tests", "fault_tests", "benchmarks", "docs",
          "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")  # fmt: skip
LIMIT_S = 300


@dataclass(frozen=True)
class Mutant:
    """A fault: what it is, where, which text becomes which, and the tests that should notice."""

    what: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "a tile's page id is that of the first page",
        "kernels/tiles.py",
        "page_id = load_page_id(ids_address.to(tl.int64), page, True, ID_BYTES)",
        "page_id = load_page_id(ids_address.to(tl.int64), page * 0, True, ID_BYTES)",
        "tests/test_pack.py",
    ),
    Mutant(
        "a forked child takes its parent's things for its own",
        "linker/home.py",
        "os.register_at_fork(after_in_child=_forked)",
        "",
        "tests/test_forks.py",
    ),
    Mutant(
        "a forked child ends its parent's clients when it exits",
        "linker/clients.py",
        "        os.register_at_fork(after_in_child=_leave_to_parent)",
        "        pass",
        "tests/test_forks.py",
    ),
    Mutant(
        "the threads of a dropped linker are not told",
        "linker/linker.py",
        "at_exit=Linker._abandon, dropped=self._crew.leave",
        "at_exit=Linker._abandon",
        "tests/test_endings.py",
    ),
    Mutant(
        "close waits for layers that nobody writes",
        "linker/crew.py",
        "min(_UNWRITTEN_S, timeout_s)",
        "timeout_s",
        "tests/test_endings.py",
    ),
    Mutant(
        "a master that is dropped first ends before its clients",
        "linker/local_process.py",
        "dropped=self._running.end, is_base=True",
        "dropped=self._running.end",
        "tests/test_endings.py",
    ),
    Mutant(
        "the last 16 bytes of a tile are not moved",
        "kernels/tiles.py",
        "mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2)",
        "mask = word < tl.multiple_of((num_bytes >> 3).to(tl.int32), 2) - 2",
        "tests/test_pack.py",
    ),
    Mutant(
        "a program under a budget leaves its last tile out",
        "kernels/tiles.py",
        "while number < num_tiles:",
        "while number < num_tiles - 1:",
        "tests/test_pack.py",
    ),
    Mutant(
        "a program under a budget takes the place of the next tile too early",
        "kernels/tiles.py",
        "row, page, pool, packed, num_bytes = (\n                next_row",
        "row, page, pool, packed, _ = (\n                next_row",
        "tests/test_pack.py",
    ),
    Mutant(
        "moves of several tails are taken for one shape",
        "kernels/launches.py",
        "move.sums_address != 0, move.tail, move.tail_tokens,",
        "move.sums_address != 0, move.tail,",
        "tests/test_launch_memory.py",
    ),
    Mutant(
        "remembered launches move to where the page ids are",
        "kernels/launches.py",
        "old[2] + objects",
        "old[2] + ids",
        "tests/test_launch_memory.py",
    ),
    Mutant(
        "tuned numbers with other tiles share tables",
        "kernels/pack.py",
        "key = (object_align_bytes, by_token, config.tile_bytes, config.page_run_bytes)",
        "key = (object_align_bytes, by_token, 0, 0)",
        "tests/test_tuned_pack.py",
    ),
    Mutant(
        "short runs take no cache hint",
        "kernels/units.py",
        "CACHE_HINTS.index(config.cache),",
        "0,",
        "tests/test_cache_hints.py",
    ),
    Mutant(
        "what streams is stored to stay",
        "kernels/device.py",
        'tl.store(pointers, value, mask=mask, cache_modifier=".cs")',
        "tl.store(pointers, value, mask=mask)",
        "tests/test_compiled.py",
    ),
    Mutant(
        "a cache hint that nobody wanted passes the gate",
        "tuning/gate.py",
        "(payload if is_wanted else {}):",
        "(payload if is_wanted else hinted):",
        "tests/test_cache_hints.py",
    ),
    Mutant(
        "a stage of the ring is asked for another phase",
        "kernels/bulk.py",
        "loaded // STAGES % 2",
        "loaded % 2",
        "tests/test_bulk.py",
    ),
    Mutant(
        "a program ends when its bulk stores have been read, not when they have arrived",
        "kernels/bulk.py",
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.wait_group.read 0;",
        "tests/test_bulk.py",
    ),
    Mutant(
        "bulk copies take moves with tails",
        "kernels/bulk.py",
        "and move.tail == WHOLE",
        "and move.tail >= WHOLE",
        "tests/test_bulk.py",
    ),
    Mutant(
        "an id outside the pools is not stopped",
        "kernels/tiles.py",
        "inside = (page_id >= 0) & (page_id < num_pool_pages)",
        "inside = page_id >= 0",
        "tests/test_pack.py",
    ),
    Mutant(
        "parts of a short run lie at the object's pitch in the pool",
        "kernels/units.py",
        "pool += wide_part * tl.load(row + 5)",
        "pool += wide_part * tl.load(row + 6)",
        "tests/test_pack.py tests/test_field_layouts.py",
    ),
    Mutant(
        "a tail that should be zeroed is kept",
        "kernels/tiles.py",
        "if TAIL == 1:",
        "if TAIL == 3:",
        "tests/test_tails.py",
    ),
    Mutant(
        "a tail is one token too long in short runs",
        "kernels/units.py",
        "token_byte >= tail_tokens.to(tl.int64) * tl.load(row + 9)",
        "token_byte > tail_tokens.to(tl.int64) * tl.load(row + 9)",
        "tests/test_tails.py",
    ),
    Mutant(
        "tiles lose what does not divide evenly",
        "kernels/tables.py",
        "num_tiles = -(-segment.part_bytes // tile_bytes)",
        "num_tiles = segment.part_bytes // tile_bytes or 1",
        "tests/test_tables.py tests/test_pack.py",
    ),
    Mutant(
        "an aligned hint is given to unaligned objects",
        "kernels/tables.py",
        "width = math.gcd(segment.alignment_bytes, object_align_bytes)",
        "width = segment.alignment_bytes",
        "tests/test_pack.py",
    ),
    Mutant(
        "the checksum forgets where a word stands",
        "kernels/device.py",
        "low = (value.to(tl.uint32) ^ first ^ key) * SPREAD",
        "low = value.to(tl.uint32) * SPREAD",
        "tests/test_checksum.py",
    ),
    Mutant(
        "checksums of all layers go to the first",
        "kernels/tiles.py",
        "cell = page.to(tl.int64) * num_layers + tl.load(row + 6)",
        "cell = page.to(tl.int64) * num_layers",
        "tests/test_checksum.py",
    ),
    Mutant(
        "the reference's checksum takes all places for one",
        "kernels/checksum.py",
        "words = pairs ^ keys",
        "words = pairs ^ keys[:1]",
        "tests/test_checksum_strength.py",
    ),
    Mutant(
        "keys of places form a plain sequence: parts of the sum are weak",
        "kernels/checksum.py",
        "np.stack((one ^ upper, other ^ upper), axis=1)",
        "np.stack((one, other), axis=1)",
        "tests/test_checksum_strength.py",
    ),
    Mutant(
        "words that are not there are summed as zeros",
        "kernels/tiles.py",
        "tl.sum(tl.where(mask, checksum_terms(value, pair), 0), axis=0)",
        "tl.sum(checksum_terms(value, pair), axis=0)",
        "tests/test_checksum.py",
    ),
    Mutant(
        "a pair at a layer's end takes the next layer's bytes along",
        "kernels/pairs.py",
        "inside = mask & (place >= start) & (place < end)",
        "inside = mask & (place >= start)",
        "tests/test_checksum.py",
    ),
    Mutant(
        "narrow stretches that follow one another are summed apart",
        "kernels/tables.py",
        "if joined and start == joined[-1][1]:",
        "if joined and start == joined[-1][1] > 1 << 40:",
        "tests/test_checksum.py",
    ),
    Mutant(
        "objects of the first format are taken for the second's",
        "src/kvferry/fingerprint.py",
        "FORMAT_VERSION = 2",
        "FORMAT_VERSION = 1",
        "tests/test_integrity.py",
    ),
    Mutant(
        "a page's stride is taken for its size",
        "src/kvferry/buffers.py",
        "page_stride = strides[0] * rows_per_page",
        "page_stride = pool.page_bytes",
        "tests/test_field_layouts.py tests/test_layout.py",
    ),
    Mutant(
        "the order of a page's dimensions is left out of the fingerprint",
        "src/kvferry/fingerprint.py",
        '"layer_ids", "order", "token_axis",',
        '"layer_ids", "token_axis",',
        "tests/test_layout.py tests/test_field_layouts.py",
    ),
    Mutant(
        "overlapping elements are let through",
        "src/kvferry/runs.py",
        "if level.stride < extent:",
        "if level.stride < 0:",
        "tests/test_runs.py tests/test_layout.py",
    ),
    Mutant(
        "the pools of a layer lie over each other in the object",
        "src/kvferry/object_order.py",
        "starts = _running([pool.page_bytes for pool in pools])",
        "starts = _running([0 for pool in pools])",
        "tests/test_layout.py tests/test_pack.py",
    ),
    Mutant(
        "a reader takes the heads of another rank",
        "src/kvferry/sharding.py",
        "return pieces(local, total, tp_size)[rank * total // (local * tp_size)]",
        "return pieces(local, total, tp_size)[rank % (total // local)]",
        "tests/test_reshard.py",
    ),
    Mutant(
        "a trailer's key is not compared",
        "src/kvferry/trailer.py",
        "return blake2b(key.encode(), digest_size=16).digest()",
        "return bytes(16)",
        "tests/test_integrity.py",
    ),
    Mutant(
        "a trailer's fingerprint is not written",
        "src/kvferry/trailer.py",
        'trailers["fingerprint"] = np.void(bytes.fromhex(fingerprint))',
        'trailers["fingerprint"] = np.void(bytes(16))',
        "tests/test_integrity.py",
    ),
    Mutant(
        "the longest context never counts in a config",
        "linker/engine_config.py",
        "kind not in NOT_BY_LENGTH for kind",
        "kind not in NOT_BY_LENGTH and False for kind",
        "tests/test_engine_config.py",
    ),
    Mutant(
        "a setting that is not known does not count in a config",
        "linker/engine_config.py",
        "for name, v in value.items() if name not in ignored}",
        "for name, v in value.items() if name not in ignored and 'tomorrow' not in name}",
        "tests/test_engine_config.py",
    ),
    Mutant(
        "weights that change under one version keep their generation",
        "linker/sglang_generations.py",
        'self.current = f"drawn-{self._seed}-{self._num_drawn}"',
        "self.current = weights.version",
        "tests/test_sglang_generations.py",
    ),
    Mutant(
        "weights that changed without a flush count as current",
        "linker/sglang_generations.py",
        "if (version, path) == (known.version, known.path):",
        "if path == known.path:",
        "tests/test_sglang_generations.py",
    ),
    Mutant(
        "a reset keeps its generation whatever weights the ranks have",
        "linker/vllm_generation.py",
        "weights, before = tuple(sorted(digests)), self.current",
        "weights, before = (), self.current",
        "tests/test_vllm_generation.py",
    ),
    Mutant(
        "a digest of weights leaves the last parameter out",
        "linker/vllm_weights.py",
        "repr((names, on_host.tolist()))",
        "repr((names, on_host[:-1].tolist()))",
        "tests/test_vllm_generation.py",
    ),
    Mutant(
        "blocks that the old weights computed are saved after a reset",
        "linker/vllm_scheduler.py",
        "self._known.clear()",
        "self._known.copy()",
        "tests/test_vllm_scheduler.py",
    ),
    Mutant(
        "keys of an old generation are learned from ranks that wake up",
        "linker/vllm_scheduler.py",
        "[keys for keys in ranks if keys.generation == self.generation.current]",
        "list(ranks)",
        "tests/test_vllm_scheduler.py",
    ),
    Mutant(
        "a batch of loads takes the key scheme anew for each request",
        "linker/linker.py",
        "self._load_of(request, scheme) for request in requests",
        "self._load_of(request, self.keys) for request in requests",
        "tests/test_renew.py",
    ),
    Mutant(
        "parts of a transfer forget the fingerprint of their keys",
        "linker/plan.py",
        "self.holds_last and end >= len(self.keys),\n                self.fingerprint,",
        'self.holds_last and end >= len(self.keys),\n                "00" * 16,',
        "tests/test_renew.py",
    ),
    Mutant(
        "a load unpacks before it verifies",
        "linker/mover.py",
        "self._get(transfer, staged[-1])\n                self._launch(transfer, staged[-1])",
        "self._launch(transfer, staged[-1])\n                self._get(transfer, staged[-1])",
        "tests/test_integrity.py tests/test_linker.py",
    ),
    Mutant(
        "a window of too few pages is enough",
        "src/kvferry/restore.py",
        "good &= (ends - last_gap) >= needed",
        "good &= (ends - last_gap) >= needed - 1",
        "tests/test_restore.py",
    ),
    Mutant(
        "counters of a layer are raised before its bytes are there",
        "linker/layer_loader.py",
        "if not is_there or self._batch.lacks_before(end):",
        "if self._batch.lacks_before(end):",
        "tests/test_layers.py",
    ),
    Mutant(
        "counters of a layer are raised while rows of it are lacking",
        "linker/layer_loader.py",
        "if not is_there or self._batch.lacks_before(end):",
        "if not is_there:",
        "tests/test_layers.py",
    ),
    Mutant(
        "the verdict of a layer-wise load is left out",
        "linker/layer_loader.py",
        "faults = too_long | self._batch.faults()",
        "faults = too_long",
        "tests/test_layers.py",
    ),
    Mutant(
        "the first group shares the wire with the others",
        "linker/layer_loader.py",
        "if part.group > 0 == self._next_group:",
        "if part.group > 99 == self._next_group:",
        "tests/test_layers.py",
    ),
    Mutant(
        "pages of a cancelled request are still written",
        "linker/layer_batch.py",
        "wanted = [row for row in wanted if int(of_rows[row]) in alive]",
        "pass",
        "tests/test_layers.py",
    ),
    Mutant(
        "a whole object is unpacked over layers that came before",
        "linker/layer_batch.py",
        "layers=range(first_layer, layout.num_layers),",
        "layers=range(layout.num_layers),",
        "tests/test_layers.py",
    ),
    Mutant(
        "a key that requests share is fetched to one place only",
        "linker/layer_plan.py",
        "if len(set(keys)) == len(keys):",
        "if keys:",
        "tests/test_layer_plan.py tests/test_layers.py",
    ),
    Mutant(
        "a layer is packed before it is written",
        "linker/layer_save.py",
        "return self._written[group] if len(self._written) > group else None",
        "return self._written[group] if len(self._written) > group else Fence()",
        "tests/test_layers.py",
    ),
    Mutant(
        "a put session does not ask whether its objects are still its own",
        "linker/put_sessions.py",
        "self._unfit() or self._lost()",
        "self._unfit()",
        "fault_tests/test_foreign_memory.py",
    ),
    Mutant(
        "a put session that was lost and opened by another has no witness",
        "linker/put_sessions.py",
        "self._book.ask([self._witness, *self._coverage])",
        "self._book.ask([*self._coverage])",
        "fault_tests/test_foreign_memory.py",
    ),
    Mutant(
        "a get session trusts the lease of a master that may have gone",
        "linker/get_sessions.py",
        "self.trust_s = min(TRUST_S, lease_ttl_s / 2)",
        "self.trust_s = lease_ttl_s / 2",
        "fault_tests/test_foreign_memory.py",
    ),
    Mutant(
        "memory that late bytes may reach is given back",
        "linker/put_sessions.py",
        "self._late.update(",
        "set().update(",
        "fault_tests/test_foreign_memory.py",
    ),
    Mutant(
        "closing gives memory back that late bytes may reach",
        "linker/put_book.py",
        "keys = sorted(self._open - late)",
        "keys = sorted(self._open)",
        "fault_tests/test_foreign_memory.py",
    ),
    Mutant(
        "put sessions grow older than the master allows",
        "linker/mooncake_config.py",
        "return 0.8 * self._shortest_s if given_s is None else given_s",
        "return 20.0 if given_s is None else given_s",
        "tests/test_sessions.py",
    ),
    Mutant(
        "a save that waits for the model leaves room for its own objects alone",
        "linker/layer_saver.py",
        "for it in layout.spaces]",
        "for it in layout.spaces[:1]]",
        "tests/test_layers.py",
    ),
    Mutant(
        "a save that waits for the model takes all of staging",
        "linker/layer_staging.py",
        "return 2 * sum(gaps) >= total and max(gaps) >= needed_bytes",
        "return True",
        "tests/test_layers.py",
    ),
    Mutant(
        "a wait for a layer outlives the requests' deadlines",
        "linker/layer_load.py",
        "waited = taken.wait.wait(step, layer, left_s)",
        "waited = taken.wait.wait(step, layer)",
        "tests/test_layers.py",
    ),
    Mutant(
        "a thread that was killed is not replaced",
        "linker/worker.py",
        "if begun and not ended:",
        "if begun and ended:",
        "tests/test_worker.py",
    ),
    Mutant(
        "a call that raises leaves its NVTX range open",
        "linker/ranges.py",
        "            try:\n                return function(*arguments, **options)\n"
        "            finally:\n                described.close()\n",
        "            result = function(*arguments, **options)\n"
        "            described.close()\n            return result\n",
        "tests/test_ranges.py",
    ),
    Mutant(
        "an NVTX range tells the bytes of its first index space alone",
        "linker/ranges.py",
        "num_bytes = sum(plan.num_bytes for plan in plans)",
        "num_bytes = plans[0].num_bytes if plans else 0",
        "tests/test_ranges.py",
    ),
    Mutant(
        "a save's ranges on the wire are not told to NVTX",
        "linker/layer_saver.py",
        '    @ranged(lambda run, item: of_plans("wire", run._plans_of(item), "objects"))\n',
        "",
        "tests/test_ranges.py",
    ),
    Mutant(
        "a launch tells a profiler half of its bytes",
        "kernels/metadata.py",
        "ways = 1 if move == SUM_ONLY else 2",
        "ways = 1",
        "tests/test_launch_metadata.py",
    ),
    Mutant(
        "hooks of launches are not looked for",
        "kernels/handles.py",
        "            if has_hooks():",
        "            if False:",
        "tests/test_launch_metadata.py",
    ),
    Mutant(
        "an empty reading of machine code is checked by bounds, all of which it keeps",
        "tuning/gate.py",
        "if not row.instructions:",
        "if row.instructions < 0:",
        "tests/test_inspect.py",
    ),
    Mutant(
        "a signal's fence may have any scope",
        "tuning/gate.py",
        'code[at - 1] != f"MEMBAR.ALL.{scope}"',
        'not code[at - 1].startswith("MEMBAR")',
        "tests/test_inspect.py",
    ),
    Mutant(
        "registers are given to warps one by one",
        "tuning/occupancy.py",
        "_REGISTERS_PER_ALLOCATION = 256",
        "_REGISTERS_PER_ALLOCATION = 1",
        "tests/test_inspect.py",
    ),
    Mutant(
        "a candidate that failed on one layout is chosen for another",
        "tuning/choose.py",
        "if len(found) == len(records)",
        "if found",
        "tests/test_sweep.py",
    ),
    Mutant(
        "a class without its units timed is taken for complete",
        "tuning/choose.py",
        "if len(found) < len(groups):",
        "if not found:",
        "tests/test_sweep.py",
    ),
    Mutant(
        "a sweep does not look at what a move wrote to the pools",
        "tuning/workload.py",
        '                ("pools", self._pools, self._pools_image),\n',
        "",
        "tests/test_sweep_runs.py",
    ),
    Mutant(
        "a record that was cut off is gone on with",
        "tuning/records.py",
        'if line.endswith("\\n"):',
        "if True:",
        "tests/test_sweep.py",
    ),
    Mutant(
        "a matmul counts as beside moves that have ended",
        "tuning/beside.py",
        "if is_covered or not with_moves:",
        "if True:",
        "tests/test_sweep_runs.py",
    ),
    Mutant(
        "ratios are taken of medians, not round by round",
        "tuning/timing.py",
        "statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))",
        "statistics.median(numerator) / statistics.median(denominator)",
        "tests/test_timing.py",
    ),
    Mutant(
        "accesses of 2 bytes are counted as of 4",
        "tuning/sass.py",
        '"U16": 2, "S16": 2, ',
        "",
        "tests/test_inspect.py",
    ),
    Mutant(
        "of a part of the GPU check that hangs, what it started goes on",
        "benchmarks/gpu_process.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "process.kill()",
        "tests/test_gpu_check.py",
    ),
    Mutant(
        "the GPU check takes a CPU's figures for a GPU's",
        "benchmarks/gpu_part.py",
        "kept = value if self.on_gpu else None",
        "kept = value",
        "tests/test_gpu_check.py",
    ),
    Mutant(
        "the GPU check leaves units of 2 bytes out",
        "benchmarks/gpu_matrix.py",
        "WIDTHS = (16, 8, 4, 2, 1)",
        "WIDTHS = (16, 8, 4, 1)",
        "tests/test_gpu_matrix.py",
    ),
    Mutant(
        "a transfer that was given up is begun all the same",
        "linker/sglang_jobs.py",
        "            if self.error is None:\n                self.handle",
        "            if True:\n                self.handle",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "giving a transfer up does not wait until it is begun",
        "linker/sglang_jobs.py",
        "        with self._beginning:\n            self._begun.set()",
        "        self._begun.set()",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "an error keeps the frames that it went through",
        "linker/transfer.py",
        "each.__traceback__ = None",
        "pass",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "verdicts of offloads overtake each other",
        "linker/sglang_offloads.py",
        "            if not offload.done():\n                break",
        "            if not offload.done():\n                continue",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "each rank stores all of what every rank holds",
        "linker/sglang_offloads.py",
        "np.where(mine, page_ids[space], -1)",
        "page_ids[space]",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "a layer counts as there once an earlier one is",
        "linker/sglang_loads.py",
        "layer <= self._reached[1]",
        "layer >= self._reached[1]",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "pools whose readers ask for no layer are read before they are loaded",
        "linker/sglang_loads.py",
        "if not self._by_layer:",
        "if False:",
        "tests/test_sglang_jobs.py",
    ),
    Mutant(
        "the first rank stores what all hold, and the others nothing of theirs",
        "linker/sglang_ranks.py",
        "% size == rank for",
        "% size == 0 for",
        "tests/test_sglang_ranks.py",
    ),
    Mutant(
        "pages of a window are those of the prefix's beginning",
        "linker/sglang_transfers.py",
        "row[np.asarray(positions, dtype=np.int64)] =",
        "row[: len(positions)] =",
        "tests/test_sglang_transfers.py",
    ),
    Mutant(
        "page ids are read from a tensor that SGLang goes on to use",
        "linker/sglang_transfers.py",
        "else ids.clone()",
        "else ids",
        "tests/test_sglang_transfers.py",
    ),
    Mutant(
        "the environment comes before SGLang's launch line",
        "linker/sglang_settings.py",
        "elif environment.get(variable) and value is None:",
        "elif environment.get(variable):",
        "tests/test_sglang_settings.py",
    ),
    Mutant(
        "a corrupted object is never replaced",
        "linker/lookup.py",
        "spoilt = self._remove_spoilt(store, keys) if self._spoilt else {}",
        "spoilt: dict[str, str] = {}",
        "tests/test_lookup.py",
    ),
    Mutant(
        "what is stored is removed under its readers",
        "linker/calls.py",
        'return self._many("batch_remove", keys, False)',
        'return self._many("batch_remove", keys, True)',
        "fault_tests/test_bad_layers.py tests/test_mooncake.py",
    ),
    Mutant(
        "generations are deleted under their readers",
        "linker/calls.py",
        '"^" + re.escape(prefix), False)',
        '"^" + re.escape(prefix), True)',
        "tests/test_forget.py",
    ),
    Mutant(
        "what is to be removed is asked for, and so leased anew",
        "linker/lookup.py",
        "asked = [key for key in keys if key not in spoilt] if spoilt else keys",
        "asked = keys",
        "tests/test_lookup.py",
    ),
    Mutant(
        "a save says nothing of what it could not replace",
        "linker/mover.py",
        "transfer.progress.failures.update(found.spoilt)",
        "pass",
        "fault_tests/test_bad_layers.py",
    ),
    Mutant(
        "where tokens are is left out of the fingerprint",
        "src/kvferry/fingerprint.py",
        '"layer_ids", "order", "token_axis",',
        '"layer_ids", "order",',
        "tests/test_layout.py",
    ),
    Mutant(
        "where tokens are is left out of the fingerprint, and two linkers meet",
        "src/kvferry/fingerprint.py",
        '"layer_ids", "order", "token_axis",',
        '"layer_ids", "order",',
        "tests/test_linker.py",
    ),
    Mutant(
        "planes are left out of the canonical fingerprint",
        "src/kvferry/object_order.py",
        "        pool.token_planes,\n",
        "",
        "tests/test_order.py",
    ),
    Mutant(
        "a stage does not name its layers",
        "src/kvferry/identity.py",
        "if stages == 1:",
        "if stages == 1 or self.layers is None:",
        "tests/test_layout.py",
    ),
    Mutant(
        "a stage's layers are not in the share",
        "src/kvferry/identity.py",
        "if self.layers is not None:\n            parts",
        "if False:\n            parts",
        "tests/test_keys.py",
    ),
    Mutant(
        "objects with and without trailers share keys",
        "linker/linker.py",
        "sealed=config.integrity",
        "sealed=True",
        "tests/test_integrity.py",
    ),
    Mutant(
        "the generation is not in the key",
        "linker/keys.py",
        "key_part(self.model), key_part(self.generation))",
        "key_part(self.model), key_part(''))",
        "tests/test_keys.py",
    ),
    Mutant(
        "whole numbers differ by how they are written",
        "src/kvferry/digest.py",
        "return int(value) if value.is_integer() else value",
        "return value",
        "tests/test_digest.py",
    ),
    Mutant(
        "a mistyped generation to keep deletes the right one",
        "src/kvferry/forget.py",
        "if (chosen_model, part) not in there:",
        "if False:",
        "tests/test_forget.py",
    ),
    Mutant(
        "CPUs with and without AMX share keys",
        "linker/engine_config.py",
        "':amx' if has_amx else ''",
        "''",
        "tests/test_engine_config.py",
    ),
    Mutant(
        "nothing is sent from rank to rank",
        "linker/peers.py",
        "dist.broadcast(tensor, group=self._group, group_src=rank)",
        "pass",
        "tests/test_shared_reads.py",
    ),
    Mutant(
        "every rank reads all of a call that it shares",
        "linker/shared_call.py",
        "mine = [n for n in range(len(self._keys)) if n not in others]",
        "mine = list(range(len(self._keys)))",
        "tests/test_shared_reads.py",
    ),
    Mutant(
        "a rank that has ended its load is waited for",
        "linker/shared_call.py",
        "load.is_alone = bool(agreed.texts)",
        "load.is_alone = False",
        "tests/test_shared_reads.py",
    ),
    Mutant(
        "a rank that has waited too long goes without a word",
        "linker/peers.py",
        "            if self._decide(load, call, _ALONE) == _SEND:",
        "            if late:\n                raise PeersLost(late)\n"
        "            if self._decide(load, call, _ALONE) == _SEND:",
        "tests/test_shared_reads.py",
    ),
    Mutant(
        "calls to other places of a span are taken for the same",
        "linker/shared_parts.py",
        "[address - first for address in addresses]",
        "[0 for address in addresses]",
        "tests/test_shared_parts.py",
    ),
    Mutant(
        "bytes are read into memory that lost ranks may still write",
        "linker/shared_call.py",
        "if error.still_arriving:",
        "if False:",
        "tests/test_shared_parts.py",
    ),
    Mutant(
        "every rank stores what all of them have",
        "linker/sglang_ranks.py",
        "== rank for key",
        "!= -1 for key",
        "tests/test_ranks.py",
    ),
    Mutant(
        "a slice of page ids begins with the first id",
        "kernels/page_ids.py",
        "some.address = self.address + first * self.id_bytes",
        "some.address = self.address",
        "tests/test_page_ids.py",
    ),
    Mutant(
        "every part takes the first part's pages",
        "linker/plan.py",
        "yield part, ids[first:end]",
        "yield part, ids[: len(part.keys)]",
        "tests/test_linker.py",
    ),
    Mutant(
        "of addresses at a stride the first alone is looked at",
        "linker/regions.py",
        "first, last = sorted((addresses[0], addresses[-1]))",
        "first = last = addresses[0]",
        "tests/test_mooncake.py",
    ),
    Mutant(
        "a save's blocks come free with the first of several workers",
        "linker/vllm_held.py",
        "self._ended.items() if count >= self._num_workers",
        "self._ended.items() if count >= 1",
        "tests/test_vllm_scheduler.py",
    ),
    Mutant(
        "a layer counts as written with its first cache",
        "linker/vllm_saves.py",
        "save.layer_written(layer - 1)",
        "save.layer_written(layer)",
        "tests/test_vllm_worker.py",
    ),
    Mutant(
        "groups of one batch are taken for another's",
        "linker/layer_plan.py",
        "scale = max(1, math.gcd(*num_rows))",
        "scale = max(1, *num_rows)",
        "tests/test_layer_plan.py",
    ),
    Mutant(
        "a request that is being given up is judged by what it lacks",
        "linker/layer_batch.py",
        "going = np.array([transfer.is_wanted for",
        "going = np.array([not transfer.is_over for",
        "fault_tests/test_cancelled.py::test_a_request_that_is_being_given_up_is_not_judged",
    ),
    Mutant(
        "what lies on an owner that hangs is tried call after call",
        "linker/hung_owners.py",
        "if taken_s > SLOW_S and TRANSFER_FAIL in answers:",
        "if taken_s > 9e9 and TRANSFER_FAIL in answers:",
        "tests/test_hung_owners.py",
    ),
    Mutant(
        "owners that answer are held with one that hangs",
        "linker/hung_owners.py",
        "held = owner in self._held_until_s",
        "held = bool(owner)",
        "tests/test_hung_owners.py",
    ),
    Mutant(
        "only buffers that begin at one address share memory",
        "src/kvferry/overlaps.py",
        "            if _share(one, other):",
        "            if one.start == other.start:",
        "tests/test_overlaps.py",
    ),
    Mutant(
        "a load may leave pages unfilled",
        "linker/plan.py",
        "    if unique and rows:",
        "    if not unique and rows:",
        "tests/test_plan.py",
    ),
    Mutant(
        "unsigned page ids wrap",
        "kernels/page_ids.py",
        'if found.dtype.kind == "u" and found.size',
        'if found.dtype.kind == "x" and found.size',
        "tests/test_plan.py",
    ),
    Mutant(
        "page ids of another layout pass",
        "kernels/page_ids.py",
        "if their_space != space or their_layout is not layout:",
        "if their_space != space:",
        "tests/test_page_ids.py",
    ),
    Mutant(
        "truth values are integers",
        "src/kvferry/arguments.py",
        "    if isinstance(value, bool) or getattr(value",
        "    if getattr(value",
        "tests/test_arguments.py",
    ),
    Mutant(
        "a layer-wise load names the first objects that failed",
        "linker/layer_loader.py",
        "        if attempts.drain_s or not self._batch.lacking:",
        "        if True:",
        "tests/test_layers.py",
    ),
    Mutant(
        "longer objects are not noticed by layer",
        "linker/get_sessions.py",
        "found += [answer >= 0 for answer in answers]",
        "found += [False for answer in answers]",
        "tests/test_sessions.py",
    ),
    Mutant(
        "what a save finds stays missing",
        "linker/lookup.py",
        "        self._forget_misses(",
        "        list(",
        "tests/test_lookup.py",
    ),
)


def run(mutant: Mutant, folder: Path) -> bool:
    """Whether the suite notices the fault."""
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) < 1:
        raise SystemExit(f"{mutant.what}: {mutant.path} no longer holds {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        status, output = run_tests(folder, mutant.tests.split())
    except subprocess.TimeoutExpired:
        return True  # it hangs: noticed
    finally:
        path.write_text(text, encoding="utf-8")
    # 1: a test failed. A crash of the interpreter (a negative status) is noticed too; a usage or
    # collection error is a fault of this list.
    if status in (2, 3, 4, 5):
        raise SystemExit(f"{mutant.what}: the tests did not run:\n{output}")
    return status != 0


def run_tests(folder: Path, tests: list[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run tests in the copy; return pytest's exit status and the end of its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "KVFERRY_HYPOTHESIS": "mutants",
        },
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return done.returncode, done.stdout[-2000:]


def main() -> int:
    """Apply each fault in turn."""
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as name:
        folder = Path(name)
        for item in COPIED:
            source = ROOT / item
            if source.is_dir():
                shutil.copytree(
                    source, folder / item, symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )  # fmt: skip
            else:
                shutil.copy(source, folder / item)
        every = sorted({test for mutant in MUTANTS for test in mutant.tests.split()})
        status, output = run_tests(folder, every, 4 * LIMIT_S)  # all files at once
        if status:
            raise SystemExit(f"the tests fail without any fault:\n{output}")
        print(f"without a fault, {len(every)} files of tests pass")
        caught = 0
        for mutant in MUTANTS:
            begin = time.monotonic()
            noticed = run(mutant, folder)
            caught += noticed
            verdict = "caught  " if noticed else "SURVIVED"
            print(f"{verdict} {time.monotonic() - begin:5.1f} s  {mutant.path}: {mutant.what}")
            sys.stdout.flush()
    print(f"{caught} of {len(MUTANTS)}")
    return 0 if caught == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
