"""Prompts whose prefix an engine that ended has left in Mooncake, beside hits on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from answers import furthest
from sglang_bed import Bed, Engine
from sglang_cases import Case

REFERENCE = "reference"
"""Salt of what is answered to compare with: nothing of it is found without the salt."""


@dataclass(frozen=True)
class Hit:
    """One way to ask: by an engine that has computed the prefix itself, and by one that loads it.

    Attributes:
        case: the model.
        name: of the way.
        prompts: asked at once.
        cold: answers without a cache; empty where the prefix was asked before by another prompt.
        device: answers with the prefix on the device.
        loaded: answers of a new process.
        other: an answer after another prefix of this length, to the same last tokens.
    """

    case: Case
    name: str
    prompts: Sequence[list[int]]
    cold: Sequence[dict[str, Any]]
    device: Sequence[dict[str, Any]]
    loaded: Sequence[dict[str, Any]]
    other: dict[str, Any]

    @property
    def from_host(self) -> int:
        """Tokens that came from Mooncake."""
        return sum(answer.get("host", 0) for answer in self.loaded)

    @property
    def from_device(self) -> int:
        """Tokens that were on the device of the new process already; there can be none."""
        return sum(answer.get("device", 0) for answer in self.loaded)

    @property
    def wanted(self) -> int:
        """Tokens that came from the device in the engine that had computed them."""
        return sum(answer.get("device", 0) for answer in self.device)

    @property
    def apart(self) -> float:
        """The largest difference of a log-probability."""
        return furthest(self.loaded, self.device)

    @property
    def num_equal(self) -> int:
        """How many answers have the same tokens."""
        pairs = zip(self.loaded, self.device, strict=True)
        return sum("tokens" in mine and mine["tokens"] == want["tokens"] for mine, want in pairs)

    @property
    def sensitivity(self) -> float:
        """How far another prefix moves the first answer: what `apart` would show if it were lost.

        Infinite if it changes the tokens.
        """
        return furthest([self.other], self.device[:1])

    def row(self) -> dict[str, Any]:
        """Return the line of the table."""
        return {
            "model": self.case.name,
            "prompts": self.name,
            "tokens": "+".join(str(len(prompt)) for prompt in self.prompts),
            "from host": self.from_host,
            "device": self.from_device,
            "cold s": _seconds(self.cold),
            "device hit s": _seconds(self.device),
            "Mooncake s": _seconds(self.loaded),
            "max Δlogprob": f"{self.apart:g}",
            "equal": f"{self.num_equal}/{len(self.prompts)}",
            "other prefix": f"{self.sensitivity:.2g}",
        }


def run_hits(
    bed: Bed, hits: list[Hit], note: Callable[[str], None], then: Callable[[Engine], None]
) -> None:
    """Let one engine answer and end, and another answer after it.

    Args:
        bed: of the case.
        hits: what came of it is appended.
        note: told what is going on.
        then: called with the second engine, before it ends.

    Raises:
        EngineError: an engine did not do its part.
    """
    case = bed.case
    groups = {"again": [case.prompt], "longer": [case.longer], "at once": case.at_once}
    cold, device, others = {}, {}, {}
    note("engine A starts")
    with bed.engine("A") as engine:
        engine.generate([case.warm_up])
        note("engine A answers, and leaves its pages in Mooncake")
        for name, prompts in groups.items():
            # The longer prompt finds the shorter one on the device: that is its hit.
            if name == "longer":
                cold[name] = []
            else:
                cold[name] = engine.generate(prompts, salt=REFERENCE, together=True)
            device[name] = engine.generate(prompts, salt=REFERENCE, together=True)
            number = device[name][0].get("device", 0)
            other = case.with_other_prefix(prompts[0], number)
            others[name] = engine.generate([other], salt=REFERENCE)[0]
        before = bed.keys()
        num_pages = 0
        for name in ("again", "at once"):
            engine.generate(groups[name], together=True)
            num_pages += sum(case.whole_pages(each) // case.page_size for each in groups[name])
        bed.wait_stored(before, num_pages)
    note("engine B starts")
    with bed.engine("B") as engine:
        engine.generate([case.warm_up])
        for name, prompts in groups.items():
            note(f"engine B answers: {name}")
            loaded = engine.generate(prompts, together=True)
            engine.flush()  # the next must find nothing on the device
            hits.append(Hit(case, name, prompts, cold[name], device[name], loaded, others[name]))
        then(engine)


def _seconds(answers: Sequence[dict[str, Any]]) -> float | str:
    """Return the time of the slowest answer; nothing where there is none."""
    times = [answer["seconds"] for answer in answers if "seconds" in answer]
    return max(times) if times else ""
