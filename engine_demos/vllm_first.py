"""Time to the first token: without a cache, and with a prefix by each connector that takes it."""

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from answers import furthest
from engine_process import EngineError
from vllm_bed import VllmBed

KVFERRY = "kvferry"
NUM_PROMPTS = 3
CHUNK_TOKENS = 2048
"""Whole prompts at once: vLLM's ExampleConnector does not know of chunks."""


def run_first(bed: VllmBed, out: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Have each connector store prompts in one engine and load them in the next.

    Args:
        bed: of the case.
        out: a folder for what ExampleConnector writes; emptied before.
        note: told what is going on.

    Returns:
        A row for each connector. Those that refuse the model or fail have a row that says so.
    """
    folder = out / "example_connector" / bed.case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    rows = []
    for name, connector in ((KVFERRY, bed.kvferry()), ("vLLM's ExampleConnector", example)):
        note(f"time to first token: {name}")
        try:
            rows.append({"model": bed.case.name, "connector": name, **_row(bed, name, connector)})
        except EngineError as error:
            if name == KVFERRY:
                raise
            rows.append({"model": bed.case.name, "connector": name, "said": str(error)})
    return rows


def _row(bed: VllmBed, name: str, connector: dict[str, Any]) -> dict[str, Any]:
    prompts = bed.case.fault_prompts(f"first {name}", NUM_PROMPTS)
    settings = {"max_num_batched_tokens": CHUNK_TOKENS}
    log = "first-" + name.replace(" ", "-").replace("'", "")
    with bed.engine(f"{log}-writes", connector=connector, settings=settings) as engine:
        engine.generate([bed.case.warm_up])
        before = bed.keys()
        cold = [answer for prompt in prompts for answer in engine.generate([prompt])]
        local = [answer for prompt in prompts for answer in engine.generate([prompt])]
        if name == KVFERRY:
            num_pages = bed.case.whole_pages(prompts[0]) // bed.case.page_size
            bed.wait_stored(before, NUM_PROMPTS * num_pages)
    with bed.engine(f"{log}-reads", connector=connector, settings=settings) as engine:
        engine.generate([bed.case.warm_up])
        loaded = [answer for prompt in prompts for answer in engine.generate([prompt])]
    return {
        "tokens": len(prompts[0]),
        "from connector": sum(answer["host"] for answer in loaded) // NUM_PROMPTS,
        "cold ms": _first_ms(cold),
        "device hit ms": _first_ms(local),
        "connector's hit ms": _first_ms(loaded),
        "max Δlogprob": f"{furthest(loaded, local):g}",
        "said": "",
    }


def _first_ms(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.median(answer["first_s"] for answer in answers) * 1e3
