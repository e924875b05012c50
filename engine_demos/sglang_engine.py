"""One SGLang engine on a CPU, as a program: orders come in and answers go out as lines of JSON.

`sglang_engine.py SETTINGS`, where SETTINGS is a JSON object: the arguments of `sglang.Engine`, and
`limit_s`, after which the program ends in any case. Orders, each answered by one line:

    {"do": "generate", "prompts": [[3, 4], [5]], "salt": "", "new_tokens": 3, "flushes": 0,
     "together": false}
    {"do": "flush"}
    {"do": "end"}

The end of standard input counts as `end`. SGLang's log goes to standard error.
"""

import asyncio
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Every process of the engine imports this file first, and needs what follows before SGLang.
sys.path.append(str(Path(__file__).parents[1] / "engine_tests" / "sglang"))
os.environ["HF_HUB_OFFLINE"] = "1"

import standins

standins.install(standins.ENGINE_PACKAGES)

import steady  # noqa: E402

steady.install()
if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreted

    interpreted.install()

FLUSH_PAUSE_S = 0.05
"""Between flushes while prompts are answered."""


async def _answers(
    engine: Any, prompts: list[list[int]], order: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the answers to one request of some prompts, or how SGLang refused it."""
    begin_s = time.perf_counter()
    try:
        replies = await engine.async_generate(
            input_ids=prompts,
            sampling_params={"max_new_tokens": order["new_tokens"], "temperature": 0},
            return_logprob=True,
            top_logprobs_num=5,
            cache_salt=order.get("salt") or None,
        )
    except Exception as error:  # noqa: BLE001 -- whatever it was is the answer, and is judged
        code = getattr(error, "status_code", 0)
        return [{"error": f"{type(error).__name__}: {error}", "code": code}] * len(prompts)
    seconds = time.perf_counter() - begin_s
    return [{**_told(reply), "seconds": seconds} for reply in replies]


def _told(reply: dict[str, Any]) -> dict[str, Any]:
    """Return what is compared of one reply."""
    told = reply["meta_info"]
    details = told.get("cached_tokens_details") or {}
    return {
        "tokens": reply["output_ids"],
        "top": [[pair[:2] for pair in place] for place in told["output_top_logprobs"]],
        "device": details.get("device", told["cached_tokens"]),
        "host": details.get("host", 0),
        "finish": told["finish_reason"]["type"],
    }


async def _flush(engine: Any) -> bool:
    return bool((await engine.tokenizer_manager.flush_cache()).success)


async def _generate(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts at once, and flush the cache meanwhile as often as the order says."""

    async def flushes() -> list[bool]:
        done = []
        for _ in range(order.get("flushes", 0)):
            await asyncio.sleep(FLUSH_PAUSE_S)
            done.append(await _flush(engine))
        return done

    prompts = order["prompts"]
    requests = [prompts] if order.get("together") else [[prompt] for prompt in prompts]
    *answers, flushed = await asyncio.gather(
        *(_answers(engine, request, order) for request in requests), flushes()
    )
    return {"answers": [one for several in answers for one in several], "flushed": flushed}


def main(arguments: Sequence[str]) -> int:
    """Start the engine, carry out orders until there are no more, shut down."""
    settings = json.loads(arguments[0])
    faulthandler.dump_traceback_later(settings.pop("limit_s"), exit=True)
    faulthandler.register(signal.SIGUSR1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints; only answers may go to standard output

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    import sglang

    begin_s = time.perf_counter()
    engine = sglang.Engine(**settings)
    reply({"ready": sglang.__version__, "seconds": time.perf_counter() - begin_s})
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "end":
                break
            if order["do"] == "flush":
                reply({"flushed": engine.loop.run_until_complete(_flush(engine))})
            else:
                reply(engine.loop.run_until_complete(_generate(engine, order)))
    finally:
        engine.shutdown()
    reply({"ended": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
