"""A vLLM engine without a model: vLLM's scheduler and kvferry's connectors, step by step.

The scheduler, its cache manager, its block hashes, what the model runner calls around a forward
pass, and the putting together of what the workers return are vLLM's own. So is the order of the
calls, `EngineCore.step` and `step_with_batch_queue`. The forward pass is that of `model.py`.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model import completed, tags_of
from plan import Plan
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from worker import Told, Worker

LIMIT_S = 20.0


@dataclass
class Answer:
    """A request as its caller sees it.

    Attributes:
        request: vLLM's.
        wanted: the right answer.
        tokens: what has come.
        counted: vLLM's own count of what was cached of its prompt.
        reason: why it has ended, once it has.
    """

    request: Request
    wanted: list[int]
    counted: Any
    tokens: list[int] = field(default_factory=list)
    reason: str = ""

    @property
    def num_external(self) -> int:
        """Tokens that vLLM counted as loaded by the connector."""
        return int(self.counted.num_external_cached_tokens)

    @property
    def num_local(self) -> int:
        """Tokens that vLLM found in its own cache."""
        return int(self.counted.num_local_cached_tokens)

    @property
    def is_right(self) -> bool:
        """Whether it was answered, rightly and whole."""
        return self.reason == "length" and self.tokens == self.wanted


class Engine:
    """vLLM's engine core, from its scheduler down to the connectors.

    Attributes:
        scheduler: vLLM's.
        connector: kvferry's, of the scheduler.
        workers: its ranks.
        answers: of all requests, by name.
        stats: what the connectors counted, step by step.
    """

    def __init__(self, config: VllmConfig, plans: Sequence[Plan], *, runner: str = "v2") -> None:
        """Make an engine.

        Args:
            config: vLLM's.
            plans: caches of each rank.
            runner: whose calls the workers make.
        """
        self.config = config
        planned = generate_scheduler_kv_cache_config([plan.config for plan in plans])
        config.cache_config.num_gpu_blocks = planned.num_blocks
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        block, hashed = resolve_kv_cache_block_sizes(planned, config)
        self._hasher = get_request_block_hasher(hashed, hash_function)
        self._is_async = bool(config.scheduler_config.async_scheduling)
        self.scheduler = (AsyncScheduler if self._is_async else Scheduler)(
            config,
            planned,
            StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self._told = Told()
        self.workers = [
            Worker(config, plan, self._told, rank=rank, runner=runner)
            for rank, plan in enumerate(plans)
        ]
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(plans))
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.answers: dict[str, Answer] = {}
        self.stats: list[dict[str, Any]] = []
        self.num_free = self.pool.get_num_free_blocks()
        self.shake_hands()

    @property
    def pool(self) -> Any:
        """VLLM's pool of blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    def shake_hands(self) -> None:
        """Tell the scheduler's connector of the workers' keys, as the engine's core does."""
        told = {
            (0, rank): pickle.loads(pickle.dumps(worker.connector.get_handshake_metadata()))
            for rank, worker in enumerate(self.workers)
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(told)

    def add(
        self, prompt: Sequence[int], max_tokens: int = 2, *, name: str = "", **options: Any
    ) -> Answer:
        """Ask for the tokens behind a prompt."""
        name = name or f"request-{len(self.answers)}"
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            None,
            block_hasher=self._hasher,
            **options,
        )
        tokens = completed(prompt, len(prompt) + max_tokens)
        self._told.of_request[name] = tags_of(tokens)
        self.answers[name] = Answer(request, tokens[len(prompt) :], request.prefill_stats)
        self.scheduler.add_request(request)
        return self.answers[name]

    def ask(self, prompt: Sequence[int], max_tokens: int = 2, **options: Any) -> Answer:
        """Ask, and wait for the end of all requests, and of what is still on its way."""
        answer = self.add(prompt, max_tokens, **options)
        self.run()
        self.settle()
        return answer

    def settle(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the store has all that was saved."""
        end_s = time.monotonic() + limit_s
        while any(worker.connector._worker.saves.num_in_flight for worker in self.workers):
            assert time.monotonic() < end_s, "a save did not end in time"
            time.sleep(0.001)

    def abort(self, answer: Answer) -> None:
        """Give up a request, as its caller may at any time."""
        self.scheduler.finish_requests([answer.request.request_id], RequestStatus.FINISHED_ABORTED)
        answer.reason = "abort"

    def step(self) -> None:
        """Go one step on."""
        scheduled = self.scheduler.schedule()
        self._note_hashes()
        # As between processes: plain data, and nobody's own.
        outputs = [pickle.loads(pickle.dumps(w.execute(scheduled))) for w in self.workers]
        self._queue.append((scheduled, self._aggregator.aggregate(outputs)))
        # With async scheduling a step is planned before the last one's outcome is known.
        while len(self._queue) > (1 if self._is_async and scheduled.num_scheduled_tokens else 0):
            self._finish(*self._queue.popleft())
        if not scheduled.num_scheduled_tokens:
            time.sleep(0.001)

    def run(self, limit_s: float = LIMIT_S) -> None:
        """Go on until nothing is left to do; nobody may be left waiting."""
        self.until(lambda: not self.scheduler.has_requests() and not self._queue, limit_s)
        assert all(answer.reason for answer in self.answers.values())

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Go on until a condition comes true."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, "it did not come true in time"
            self.step()

    def check_idle(self) -> None:
        """Check that an engine without requests holds nothing."""
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.num_free
        assert not [b.block_id for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        for worker in self.workers:
            for layer in worker.layers:
                assert layer.is_untouched(0), f"{layer.name}: the null block was written"

    def flush(self) -> None:
        """Forget what the engine's own cache holds."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """End the connectors, as the engine's end does."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    @property
    def stores(self) -> list[Any]:
        """The workers' clients of the store, whose calls a test can hold or break."""
        return [worker.connector._store for worker in self.workers]

    @property
    def num_loading(self) -> int:
        """Requests that wait for the connector."""
        return sum(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in self.scheduler.requests.values()
        )

    @property
    def spoiled(self) -> list[str]:
        """What steps read wrong."""
        return [text for worker in self.workers for text in worker.spoiled]

    def _note_hashes(self) -> None:
        for name, request in self.scheduler.requests.items():
            tags = self._told.of_request[name]
            size = self.scheduler.hash_block_size
            for at, told in enumerate(request.block_hashes):
                self._told.of_key.setdefault(told.hex(), tags[: (at + 1) * size])

    def _finish(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for item in outputs.outputs:
                answer = self.answers[item.request_id]
                answer.tokens += item.new_token_ids
                if item.finish_reason is not None:
                    answer.reason = str(item.finish_reason)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)


def prompt(num_tokens: int, branch: int = 0, common: int = 0) -> list[int]:
    """Return a prompt; all share their first `common` tokens with those of branch 0."""
    branches = [0] * common + [branch] * (num_tokens - common)
    return [(at * 7 + branch * 31) % 400 + 1 for at, branch in enumerate(branches)]
