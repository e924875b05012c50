"""The demo with SGLang: how answers are compared, and that no engine's process is left behind."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from answers import difference, furthest
from engine_process import EngineError, EngineProcess
from sglang_cases import CASES

ECHO = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print(json.dumps({"child": child.pid}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "end":
        break
    if order["do"] == "echo":
        print(json.dumps(order), flush=True)
"""


def answer(*values: float, tokens: tuple[int, ...] = (7,)) -> dict[str, Any]:
    return {"tokens": list(tokens), "top": [[[value, 5] for value in values] for _ in tokens]}


def test_answers_are_the_same_to_the_last_digit_or_are_not() -> None:
    here = answer(-1.0, -2.0)
    assert difference(here, answer(-1.0, -2.0)) == 0.0
    assert difference(here, answer(-1.0, math.nextafter(-2.0, 0.0))) > 0.0
    assert difference(here, answer(-1.25, -2.125)) == 0.25
    assert furthest([here, here], [here, answer(-1.5, -2.0)]) == 0.5


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    here = answer(-1.0, -2.0)
    for other in (
        answer(-1.0, -2.0, tokens=(8,)),
        {"error": "HTTPException: 503", "code": 503},
        {"tokens": [7], "top": [[[-1.0, 6], [-2.0, 5]]]},
        answer(-1.0, math.nan),
    ):
        assert difference(here, other) == math.inf
        assert difference(other, here) == math.inf


def test_a_row_of_a_steady_product_depends_on_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functional = torch.nn.functional
    for name in ("matmul", "bmm"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(functional, name, getattr(functional, name))
    steady.install()
    rows, weight = torch.randn(300, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    whole = functional.linear(rows, weight)
    assert whole.dtype == torch.bfloat16
    for count in (1, 2, 7, 64, 299):
        assert torch.equal(functional.linear(rows[:count], weight), whole[:count])
    wanted = (rows.double() @ weight.double().T).bfloat16()
    assert torch.equal(whole, wanted)


def test_prompts_share_what_they_should() -> None:
    for case in CASES.values():
        prompt, longer = case.prompt, case.longer
        assert longer[: len(prompt)] == prompt
        assert case.whole_pages(prompt) < len(prompt)
        assert case.tail_tokens > case.chunk_tokens, "its tail is computed in several chunks"
        other = case.with_other_prefix(prompt, 16)
        assert other[16:] == prompt[16:]
        first = {tuple(each[:16]) for each in [prompt, other, *case.at_once]}
        assert len(first) == 2 + len(case.others)


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have waited for it yet."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_an_engine_takes_all_it_started_with_it(tmp_path: Path) -> None:
    with EngineProcess([sys.executable, "-c", ECHO], tmp_path / "log", {}) as process:
        child = process.answer(20)["child"]
        assert process.ask({"do": "echo", "n": 1}, 20) == {"do": "echo", "n": 1}
        assert Path(f"/proc/{child}").exists()
    assert gone(child)


def test_an_engine_that_hangs_is_killed(tmp_path: Path) -> None:
    with EngineProcess([sys.executable, "-c", ECHO], tmp_path / "log", {}) as process:
        child = process.answer(20)["child"]
        with pytest.raises(EngineError, match=r"no answer within 0\.2 s; its log is .*log"):
            process.ask({"do": "nothing"}, 0.2)
        assert gone(child)
        with pytest.raises(EngineError, match="has ended"):
            process.order({"do": "echo"})
