"""Requests that vLLM preempts because its cache is too small, with their prefixes from Mooncake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from answers import furthest
from bars import Bar
from sglang_cases import Case
from sglang_hits import REFERENCE
from vllm_bed import VllmBed

NEW_TOKENS = 96
"""So many tokens of each answer do not fit in the cache beside the prompts."""

SPARE_BLOCKS = 2


def run_preempted(
    bed: VllmBed, note: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Answer prompts at once in an engine with many blocks, then in one with too few.

    Args:
        bed: of the case.
        note: told what is going on.

    Returns:
        The table's rows, and the bars.
    """
    case = replace(bed.case, new_tokens=NEW_TOKENS)
    prompts = [case.prompt, *case.at_once]
    num_blocks = blocks_of(case, prompts)
    note(f"engine C starts, with {num_blocks} blocks")
    with bed.engine("C-roomy") as engine:
        engine.case = case
        engine.generate([case.warm_up])
        wanted = engine.generate(prompts, salt=REFERENCE)
        before = bed.keys()
        engine.generate(prompts, salt="preempted")
        bed.wait_stored(before, sum(case.whole_pages(each) // case.page_size for each in prompts))
    with bed.engine("C-small", settings={"num_gpu_blocks_override": num_blocks}) as engine:
        engine.case = case
        engine.generate([case.warm_up])
        engine.flush()
        answers = engine.generate(prompts, salt="preempted")
        told = engine.told
    apart = furthest(answers, wanted)
    hits = sum(answer.get("host", 0) for answer in answers)
    name = f"{case.name}.preempted"
    row = {
        "model": case.name,
        "blocks": num_blocks,
        "prompts": len(prompts),
        "new tokens": NEW_TOKENS,
        "from host": hits,
        "preemptions": told["preemptions"],
        "max Δlogprob": f"{apart:g}",
    }
    return [row], [
        Bar(f"{name}.preemptions", told["preemptions"], 1, True),
        Bar(f"{name}.host_tokens", hits, 1, True),
        Bar(f"{name}.max_dlogprob", apart, 0, False),
    ]


def blocks_of(case: Case, prompts: list[list[int]]) -> int:
    """Return how many blocks the prompts fill, of full attention alone, and few more."""
    return sum(-(-len(prompt) // case.page_size) for prompt in prompts) + SPARE_BLOCKS
