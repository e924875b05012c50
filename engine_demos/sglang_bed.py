"""Where the demo's engines run: a Mooncake master, an owner of memory, and engines beside them."""

import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_process import EngineError, EngineProcess
from sglang_cases import Case

from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner

SEGMENT_BYTES = 256 << 20
DEVICE_TOKENS = 8192
START_LIMIT_S = 600.0
ANSWER_LIMIT_S = 300.0
ENGINE_LIMIT_S = 3600.0
"""Limits are for a machine that is busy with other things: a start takes 10 s of processor time."""

STORED_LIMIT_S = 60.0
QUIET_S = 1.0
"""So long nothing more must have come into the store until all is there."""


class Engine:
    """One engine of a case, and orders to it in Python's words.

    Attributes:
        case: whose sizes orders have.
        process: the program.
        told: all that came with the last answers.
    """

    def __init__(self, case: Case, process: EngineProcess) -> None:
        """Wrap a process that has said it is ready."""
        self.case = case
        self.process = process
        self.told: dict[str, Any] = {}

    def begin(
        self,
        prompts: Sequence[list[int]],
        *,
        salt: str = "",
        flushes: int = 0,
        together: bool = False,
    ) -> None:
        """Send prompts, all at once; `finish` waits for the answers.

        Args:
            prompts: lists of token ids.
            salt: SGLang's `cache_salt`: only prompts of the same one share cached pages.
            flushes: how often to flush the cache meanwhile.
            together: as one request of several prompts, which the scheduler gets in one piece: how
                prompts are cut into chunks, and where states are kept, is then the same each time.
        """
        order = {"do": "generate", "prompts": prompts, "salt": salt, "flushes": flushes}
        order = {**order, "together": together, "new_tokens": self.case.new_tokens}
        self.process.order(order)

    def finish(self) -> list[dict[str, Any]]:
        """Return the answers, in the order of the prompts; as `EngineProcess.answer`."""
        self.told = self.process.answer(ANSWER_LIMIT_S)
        answers: list[dict[str, Any]] = self.told["answers"]
        return answers

    def generate(self, prompts: Sequence[list[int]], **more: Any) -> list[dict[str, Any]]:
        """Answer prompts; as `begin` and `finish`."""
        self.begin(prompts, **more)
        return self.finish()

    def flush(self) -> None:
        """Empty the cache on the device.

        Raises:
            EngineError: it would not.
        """
        for _ in range(20):  # it refuses while a request is being ended
            if self.process.ask({"do": "flush"}, ANSWER_LIMIT_S)["flushed"]:
                return
            time.sleep(0.2)
        raise EngineError(f"the cache was not flushed; the log is {self.process.log_path}")


class Bed:
    """A master, an owner and the engines of one case. A context manager.

    Attributes:
        master: that all engines know.
        owner: of all objects' memory; engines lend none, so that they may end.
    """

    def __init__(self, case: Case, model_path: Path, out: Path) -> None:
        """Start master and owner.

        Args:
            case: whose model it is.
            model_path: its folder.
            out: where logs go.
        """
        self.case = case
        self._model_path = model_path
        self._out = out
        self._stack = contextlib.ExitStack()
        # A killed owner is forgotten sooner than by default (10 s).
        self.master = self._stack.enter_context(LocalMaster(extra_flags=["--client_ttl=5"]))
        try:
            owner = LocalOwner(self.master.address, SEGMENT_BYTES)
            self.owner = self._stack.enter_context(owner)
        except BaseException:
            self._stack.close()
            raise

    @contextlib.contextmanager
    def engine(self, name: str) -> "Any":
        """Run an engine within a `with`; its log is `CASE-NAME.log`.

        Raises:
            EngineError: it did not start.
        """
        log_path = self._out / f"{self.case.name}-{name}.log"
        log_path.unlink(missing_ok=True)
        command = [
            sys.executable,
            str(Path(__file__).with_name("sglang_engine.py")),
            json.dumps(self._settings()),
        ]
        environment = {
            "TRITON_INTERPRET": "1" if self.case.interpreted else "0",
            "OMP_NUM_THREADS": "1",  # tiny models: threads would only wait for each other
        }
        with EngineProcess(command, log_path, environment) as process:
            process.answer(START_LIMIT_S)
            yield Engine(self.case, process)

    def keys(self) -> set[str]:
        """Return the keys of all objects in the store."""
        # No proxy: an environment's http_proxy does not reach this loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.master.metrics_url}/get_all_keys", timeout=10.0) as reply:
            return set(reply.read().decode().split())

    def wait_stored(self, before: set[str], num_pages: int) -> set[str]:
        """Wait until new pages are in the store, and nothing more comes.

        Args:
            before: keys that were there already.
            num_pages: new ones of full attention that must come; other spaces' come with them.

        Returns:
            The new keys.

        Raises:
            EngineError: they did not come.
        """
        deadline_s = time.monotonic() + STORED_LIMIT_S
        new: set[str] = set()
        while time.monotonic() < deadline_s:
            time.sleep(QUIET_S)
            last, new = new, self.keys() - before
            if new == last and sum(key.endswith("/full") for key in new) >= num_pages:
                return new
        raise EngineError(
            f"{len(new)} objects were stored within {STORED_LIMIT_S:g} s, wanted {num_pages} pages "
            f"or more; the engines' logs are in {self._out}"
        )

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of `sglang.Engine`."""
        linker = {
            "linker": "KVFerryLinker",
            "linker_module_path": "kvferry.linker.sglang",
            "linker_extra_config": {
                "master_server_address": self.master.address,
                "protocol": "tcp",
                "local_hostname": "127.0.0.1",
                "global_segment_size": 0,
                "staging_bytes": "16mb",
                "check_slots": True,
            },
        }
        return {
            "limit_s": ENGINE_LIMIT_S,
            "model_path": str(self._model_path),
            "device": "cpu",
            "dtype": self.case.dtype,
            "skip_tokenizer_init": True,
            "disable_cuda_graph": True,
            "attention_backend": self.case.attention,
            "sampling_backend": "pytorch",
            "page_size": self.case.page_size,
            "max_total_tokens": DEVICE_TOKENS,
            # Sizes are given; of the memory that is free, others may take some meanwhile.
            "mem_fraction_static": 0.5,
            "chunked_prefill_size": self.case.chunk_tokens,
            "enable_cache_report": True,
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": linker,
            **dict(self.case.settings),
        }

    def __enter__(self) -> "Bed":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for something; whether it came within the limit."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.5)
    return True
