"""One vLLM engine on a CPU, as a program: orders come in and answers go out as lines of JSON.

`vllm_engine.py SETTINGS`, where SETTINGS is a JSON object: the arguments of `vllm.LLM`, and
`limit_s`, after which the program ends in any case. Orders, each answered by one line:

    {"do": "generate", "prompts": [[3, 4], [5]], "salt": "", "new_tokens": 3, "flushes": 0}
    {"do": "flush"}
    {"do": "end"}

The end of standard input counts as `end`. vLLM's log goes to standard error. The engine runs in
this one process, step by step, so that the time of a first token is that of the step it came from.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

import prometheus_client
import steady

steady.install()

COUNTED = {"preemptions": "vllm:num_preemptions", "failed_loads": "kvferry:load_failures"}
"""What answers tell of vLLM's counters: their rise while prompts were answered."""

FLUSH_EVERY_STEPS = 2
DRAIN_PAUSE_S = 0.01
DRAIN_LIMIT_S = 10.0


def _allow_prefixes_of_mla() -> None:
    """Have MLA models reuse prefixes on any processor: vLLM allows it beside AMX alone.

    Its attention for other processors takes what is cached before a prompt's part by plain torch.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def lenient(vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        check(vllm_config)
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            (
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
            ) = asked

    CpuPlatform.check_and_update_config = staticmethod(lenient)


class Engine:
    """A `vllm.LLM`, and what of each request vLLM counts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Make the engine; `settings` are the arguments of `vllm.LLM`."""
        import vllm
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers import utils

        # The library's own products sum in another order for another number of rows: torch's, which
        # `steady` has replaced, are taken instead.
        ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *_: False
        _allow_prefixes_of_mla()
        self._engine = vllm.LLM(**settings).llm_engine
        self._sampling = vllm.SamplingParams
        self._counted: dict[str, Any] = {}
        self._num_requests = 0
        process = self._engine.output_processor.process_outputs

        def noting(outputs: Sequence[Any], *rest: Any, **more: Any) -> Any:
            for output in outputs:
                if output.prefill_stats is not None:
                    self._counted[output.request_id] = output.prefill_stats
            return process(outputs, *rest, **more)

        self._engine.output_processor.process_outputs = noting

    def generate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Answer prompts, all at once, and flush the cache meanwhile as often as the order says."""
        before = self._counters()
        begin_s = time.perf_counter()
        inner_names = {}
        for prompt in order["prompts"]:
            name = f"request-{self._num_requests}"
            self._num_requests += 1
            inner_names[name] = self._add(name, prompt, order)
        first_s: dict[str, float] = {}
        answers: dict[str, dict[str, Any]] = {}
        flushed: list[bool] = []
        num_steps = 0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            taken_s = time.perf_counter() - begin_s
            for output in outputs:
                name = output.request_id
                if output.outputs and output.outputs[0].token_ids:
                    first_s.setdefault(name, taken_s)
                if output.finished:
                    counted = self._counted.pop(inner_names[name])
                    times = {"seconds": taken_s, "first_s": first_s[name]}
                    answers[name] = {**_answer(output), **_hits(counted), **times}
            num_steps += 1
            if len(flushed) < order.get("flushes", 0) and not num_steps % FLUSH_EVERY_STEPS:
                flushed.append(bool(self._engine.reset_prefix_cache()))
        missing = {"error": "vLLM gave no answer", "code": 0}
        return {
            "answers": [answers.get(name, missing) for name in inner_names],
            "flushed": flushed,
            **{name: value - before[name] for name, value in self._counters().items()},
            "seconds": time.perf_counter() - begin_s,
        }

    def flush(self) -> bool:
        """Empty the cache on the device, once saves hold no block of it any more."""
        deadline_s = time.monotonic() + DRAIN_LIMIT_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(DRAIN_PAUSE_S)
            self._engine.step()
        return True

    def close(self) -> None:
        """End the engine, and its connector."""
        self._engine.engine_core.shutdown()

    def _add(self, name: str, prompt: list[int], order: dict[str, Any]) -> str:
        content: dict[str, Any] = {"prompt_token_ids": prompt}
        if order.get("salt"):
            content["cache_salt"] = order["salt"]
        sampling = self._sampling(
            max_tokens=order["new_tokens"], temperature=0.0, logprobs=5, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        return str(self._engine.add_request(name, content, sampling))

    @staticmethod
    def _counters() -> dict[str, int]:
        """Return what Prometheus would be told."""
        found = dict.fromkeys(COUNTED, 0)
        for family in prometheus_client.REGISTRY.collect():
            for sample in family.samples:
                for name, metric in COUNTED.items():
                    if sample.name == f"{metric}_total":
                        found[name] += int(sample.value)
        return found


def _answer(output: Any) -> dict[str, Any]:
    """Return tokens and the most probable ones at each place, of vLLM's output."""
    [one] = output.outputs
    return {
        "tokens": list(one.token_ids),
        "top": [
            sorted(([entry.logprob, token] for token, entry in place.items()), reverse=True)
            for place in one.logprobs
        ],
        "finish": one.finish_reason,
    }


def _hits(counted: Any) -> dict[str, int]:
    """Return tokens of a prompt that were on the device, and that the connector brought."""
    return {
        "device": counted.num_local_cached_tokens,
        "host": counted.num_external_cached_tokens,
    }


def main(arguments: Sequence[str]) -> int:
    """Start the engine, carry out orders until there are no more, shut down."""
    settings = json.loads(arguments[0])
    faulthandler.dump_traceback_later(settings.pop("limit_s"), exit=True)
    faulthandler.register(signal.SIGUSR1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints; only answers may go to standard output

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    begin_s = time.perf_counter()
    engine = Engine(settings)
    import vllm

    reply({"ready": vllm.__version__, "seconds": time.perf_counter() - begin_s})
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "end":
                break
            if order["do"] == "flush":
                reply({"flushed": engine.flush()})
            else:
                reply(engine.generate(order))
    finally:
        engine.close()
    reply({"ended": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
