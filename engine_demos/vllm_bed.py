"""Where the demo's vLLM engines run: the bed of SGLang's, and what vLLM is told."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from sglang_bed import ENGINE_LIMIT_S, START_LIMIT_S, Bed, Engine

LOOKUP_TTL_S = 3.0
"""Long enough for an object to be removed between its lookup and its load."""

DEVICE_TOKENS = 32768
"""Tokens that the device's cache holds."""


class VllmBed(Bed):
    """A master, an owner and vLLM engines of one case."""

    @contextlib.contextmanager
    def engine(
        self,
        name: str,
        *,
        connector: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Iterator[Engine]:
        """Run an engine within a `with`; its log is `CASE-NAME.log`.

        Args:
            name: of the log.
            connector: vLLM's `kv_transfer_config`; kvferry's if None, none at all if empty.
            settings: more arguments of `vllm.LLM`.

        Raises:
            EngineError: it did not start.
        """
        log_path = self._out / f"{self.case.name}-{name}.log"
        log_path.unlink(missing_ok=True)
        command = [
            sys.executable,
            str(Path(__file__).with_name("vllm_engine.py")),
            json.dumps(self._arguments(connector, settings or {})),
        ]
        # Tiny models: threads would only wait for each other.
        with EngineProcess(command, log_path, {"OMP_NUM_THREADS": "1"}) as process:
            process.answer(START_LIMIT_S)
            yield Engine(self.case, process)

    def _arguments(
        self, connector: Mapping[str, Any] | None, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`."""
        transfer = self.kvferry() if connector is None else connector
        return {
            "limit_s": ENGINE_LIMIT_S,
            "model": str(self._model_path),
            "dtype": self.case.dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "max_model_len": 1024,
            "block_size": self.case.page_size,
            "max_num_batched_tokens": self.case.chunk_tokens,
            "num_gpu_blocks_override": DEVICE_TOKENS // self.case.page_size,
            **({"kv_transfer_config": dict(transfer)} if transfer else {}),
            **dict(self.case.settings),
            **settings,
        }

    def kvferry(self) -> dict[str, Any]:
        """Return `kv_transfer_config` with kvferry's connector."""
        return {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.linker.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "master_server_address": self.master.address,
                "protocol": "tcp",
                "local_hostname": "127.0.0.1",
                "staging_bytes": "64mb",
                "lookup_ttl_s": LOOKUP_TTL_S,
            },
        }
