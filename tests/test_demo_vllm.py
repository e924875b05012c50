"""The demo with vLLM: what is asked of it, and what it makes of failures; vLLM is not started."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import demo_vllm
import pytest
import sglang_report
import vllm_first
from bars import Bar
from engine_process import EngineError
from vllm_cases import CASES
from vllm_preempt import NEW_TOKENS, blocks_of


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_vllm.main(["llama", "mixtral"]) == 2
    assert capsys.readouterr().out == f"MODELS has mixtral, wanted some of: {' '.join(CASES)}\n"


def test_answers_do_not_fit_beside_prompts_that_do() -> None:
    """Else nobody is preempted, or nobody is ever begun."""
    case = CASES["llama"]
    prompts = [case.prompt, *case.at_once]
    blocks = blocks_of(case, prompts)
    sizes = [len(prompt) for prompt in prompts]
    assert sum(-(-size // case.page_size) for size in sizes) <= blocks
    assert sum(-(-(size + NEW_TOKENS) // case.page_size) for size in sizes) > blocks
    assert -(-(max(sizes) + NEW_TOKENS) // case.page_size) < blocks


@pytest.mark.parametrize("name", sorted(CASES))
def test_prompts_are_computed_in_chunks_and_end_within_a_block(name: str) -> None:
    case = CASES[name]
    assert len(case.longer) <= 1024  # vLLM's max_model_len here
    for prompt in (case.prompt, *case.at_once):
        assert len(prompt) > case.chunk_tokens
        assert 0 < case.whole_pages(prompt) < len(prompt)


def test_another_connector_that_fails_is_told_of_and_ours_is_not_excused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing: set[str] = set()

    def row(bed: Any, name: str, connector: Any) -> dict[str, Any]:
        if name in failing:
            raise EngineError(f"{name} ended")
        return {"cold ms": random.random(), "said": ""}

    monkeypatch.setattr(vllm_first, "_row", row)
    bed: Any = SimpleNamespace(case=CASES["gemma3"], kvferry=dict)
    failing.add("vLLM's ExampleConnector")
    ours, theirs = vllm_first.run_first(bed, tmp_path, lambda text: None)
    assert (ours["connector"], ours["said"]) == ("kvferry", "")
    assert theirs["said"] == "vLLM's ExampleConnector ended"
    assert set(theirs) <= {*ours}
    failing.add("kvferry")
    with pytest.raises(EngineError, match="kvferry ended"):
        vllm_first.run_first(bed, tmp_path, lambda text: None)


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (0.0, 1)])
def test_further_tables_and_bars_count(
    value: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    results = sglang_report.Results([CASES["llama"]])
    results.more.append(("preempted:", [{"model": "llama", "blocks": 62}]))
    results.more_bars.append(Bar("llama.preempted.preemptions", value, 1, True))
    assert sglang_report.report(results, "legend") == status
    printed = capsys.readouterr().out
    assert "preempted:\nmodel  blocks\nllama      62\n" in printed
    assert f"preemptions {value:g} >=1 {'short' if status else 'ok'}\n" in printed
