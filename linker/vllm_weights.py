"""Which weights a worker serves: vLLM does not tell its connectors."""

import hashlib
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """The weights of one worker, told by their sums. For the model runner's thread alone.

    Attributes:
        digest: of the weights when they were last looked at; empty if they cannot be found.
    """

    def __init__(self) -> None:
        """Begin without a model."""
        self.digest = ""
        self._runner: weakref.ref[Any] | None = None

    def find(self) -> None:
        """Find the model while its runner registers the caches: it is one of the callers.

        vLLM hands a connector the caches alone. Where no caller has a model, weights stay unknown.
        """
        frame = sys._getframe(1) if self._runner is None else None
        while frame is not None:
            caller = frame.f_locals.get("self")
            if callable(getattr(caller, "get_model", None)):
                self._runner = weakref.ref(caller)
                break
            frame = frame.f_back
        self.look()

    def look(self) -> None:
        """Take the digest anew; reads all weights once, so they must be awake."""
        runner = None if self._runner is None else self._runner()
        try:
            models = [getattr(runner, name, lambda: None)() for name in _MODELS]
            self.digest = digest_of([model for model in models if model is not None])
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            log.warning("weights cannot be told apart by what they hold: %s", str(error))
            self.digest = ""


_MODELS = ("get_model", "get_draft_model")


def digest_of(models: list[torch.nn.Module]) -> str:
    """Return a digest of all parameters' names, shapes and sums; empty if there are none.

    Sums are of a parameter's words, as integers: they do not depend on the order of its rows, which
    balancing experts changes, and cost one pass. That an update leaves all of them as they were
    does not happen by chance.
    """
    names, sums = [], []
    for name, parameter in _parameters(models):
        data = parameter.data
        names.append(f"{name} {tuple(data.shape)} {data.dtype}")
        sums.append(data.view(_WORDS[data.element_size()]).sum(dtype=torch.int64))
    if not sums:
        return ""
    on_host = torch.stack([each.to(sums[0].device) for each in sums]).cpu()
    told = repr((names, on_host.tolist())).encode()
    return hashlib.sha256(told).hexdigest()[:32]


def _parameters(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield f"{number}.{name}", parameter
