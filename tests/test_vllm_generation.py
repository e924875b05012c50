"""A generation of vLLM's weights: kept, named after what they hold, or drawn; and their digests."""

import logging

import pytest
import torch

from kvferry.linker.vllm_generation import Generation
from kvferry.linker.vllm_weights import Weights, digest_of


def begun(named: str = "", *digests: str) -> Generation:
    made = Generation(named)
    assert made.decide(digests or ("a", "b"))
    return made


def test_the_same_weights_keep_their_generation(caplog: pytest.LogCaptureFixture) -> None:
    made = begun()
    assert made.renew()
    assert made.renew()  # before anybody has told
    assert made.current.startswith("drawn-")
    with caplog.at_level(logging.INFO):
        assert not made.decide(("b", "a"))  # the ranks have yet to hear of it
    assert made.current == ""
    assert made.decide(("a", "b"))
    assert "weights are the same" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_other_weights_are_named_after_what_they_hold(caplog: pytest.LogCaptureFixture) -> None:
    made, other = begun(), begun("", "x", "y")
    for one in (made, other):
        assert one.renew()
        assert not one.decide(("a", "c"))
    assert made.current == other.current
    assert made.current.startswith("weights-")
    assert "weights changed, from generation ''" in caplog.text
    assert "named after what they hold" in caplog.text
    changed = made.current
    made.renew()
    made.decide(("a", "d"))
    assert made.current not in ("", changed)
    made.renew()
    made.decide(("a", "b"))
    assert made.current == ""  # those that it started with
    assert caplog.messages[-1].endswith("to '': served before")


def test_weights_that_are_not_seen_are_a_generation_of_their_own() -> None:
    made = begun("", "a", "")
    made.renew()
    drawn = made.current
    assert made.decide(("a", ""))
    assert made.current == drawn
    made.renew()
    assert made.current != drawn


def test_one_set_by_hand_stays() -> None:
    made = begun("fleet-7")
    assert not made.renew()
    assert made.decide(("c", "d"))
    assert made.current == "fleet-7"


def model(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    made = torch.nn.Module()
    for number, value in enumerate(values):
        weight = torch.full((8, 16), value).to(dtype)
        made.register_parameter(f"w{number}", torch.nn.Parameter(weight, requires_grad=False))
    return made


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64]
)
def test_a_digest_sees_any_change_of_one_weight(dtype: torch.dtype) -> None:
    one = model(1.0, 2.0, dtype=dtype)
    before = digest_of([one])
    assert before == digest_of([model(1.0, 2.0, dtype=dtype)])
    assert len(before) == 32
    words = one.w1.data.view(torch.uint8)
    for place in ((0, 0), (7, 3)):
        words[place] ^= 1
        assert digest_of([one]) != before
        words[place] ^= 1
    assert digest_of([one]) == before
    assert digest_of([model(2.0, 1.0, dtype=dtype)]) != before
    assert digest_of([one, model(3.0)]) != before


def test_views_and_models_without_weights() -> None:
    plain, turned = model(1.0), model(1.0)
    turned.w0.data = torch.arange(128.0).reshape(16, 8).t()  # as quantized weights may lie
    plain.w0.data = torch.arange(128.0).reshape(16, 8).t().contiguous()
    assert digest_of([plain]) == digest_of([turned])
    assert digest_of([]) == digest_of([torch.nn.Module()]) == ""


class Runner:
    """A model runner, as vLLM's: it registers the caches."""

    def __init__(self, model: torch.nn.Module | None, draft: torch.nn.Module | None = None) -> None:
        self.model, self.draft = model, draft

    def get_model(self) -> torch.nn.Module | None:
        return self.model

    def get_draft_model(self) -> torch.nn.Module | None:
        return self.draft

    def register(self, weights: Weights) -> None:
        Connector().register_kv_caches(weights)


class Connector:
    """What stands between the runner and us."""

    def register_kv_caches(self, weights: Weights) -> None:
        weights.find()


def test_the_model_is_found_with_its_draft() -> None:
    weights, runner = Weights(), Runner(model(1.0), model(2.0))
    assert weights.digest == ""
    runner.register(weights)
    before = weights.digest
    assert len(before) == 32
    assert runner.draft is not None
    runner.draft.w0.data.fill_(3.0)
    assert weights.digest == before  # until it looks
    weights.look()
    assert weights.digest not in ("", before)


def test_weights_that_cannot_be_had(caplog: pytest.LogCaptureFixture) -> None:
    weights = Weights()
    weights.find()
    assert weights.digest == ""
    runner = Runner(None)
    runner.register(weights)
    assert weights.digest == ""
    on_meta = torch.nn.Linear(4, 4, device="meta")
    runner.model = on_meta
    weights.look()
    assert weights.digest == ""
    assert "cannot be told apart" in caplog.text
    runner.model = model(1.0)
    weights.look()
    assert weights.digest
    del runner
    weights.look()
    assert weights.digest == ""
