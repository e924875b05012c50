"""What is done to the store under a running engine, and how the engine goes on answering."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from answers import difference
from sabotage import SabotageError, exchange, flip, remove
from sglang_bed import Bed, Engine, wait_until

from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.mooncake_config import MooncakeConfig

UNDER_LOAD_S = 0.05
"""From the prompts to what is done to the store: they are being answered then."""

NUM_PROMPTS = 4
NUM_FLUSHES = 12
AGAIN_LIMIT_S = 60.0
"""Until pages must go to a store that is back, and come from it."""

UNAVAILABLE = 503


@dataclass
class Fault:
    """What became of prompts that were asked while something was done to the store.

    Attributes:
        name: of what was done.
        loaded: tokens that came from Mooncake all the same.
        right: answers at the first try.
        aborted: requests that SGLang ended with 503, since their load failed.
        right_then: of those, right when asked once more.
        wrong: answers that differ from what the engine computes without a cache.
        lost: requests that ended otherwise.
        slowest_s: longest time of an answer.
        back_s: until the store served as before, infinite if it never did: from the first answers,
            or from when what was killed had been started again. None where it was never away.
        causes: what the requests that ended badly were told.
    """

    name: str
    loaded: int = 0
    right: int = 0
    aborted: int = 0
    right_then: int = 0
    wrong: int = 0
    lost: int = 0
    slowest_s: float = 0.0
    back_s: float | None = None
    causes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong or lost, every abort came right, and the store is back."""
        well = not self.wrong and not self.lost and self.right_then == self.aborted
        return well and self.back_s != math.inf

    def judge(self, engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[Any]) -> None:
        """Take the answers that are due, and ask once more what was aborted."""
        again = self._count(engine.finish(), wanted)
        self.aborted += len(again)
        if not again:
            return
        before = self.right
        refused = self._count(
            engine.generate([prompts[index] for index in again]), [wanted[index] for index in again]
        )
        self.right_then += self.right - before
        self.right = before
        self.lost += len(refused)

    def _count(self, answers: Sequence[dict[str, Any]], wanted: Sequence[Any]) -> list[int]:
        """Count answers; return which were aborted for now."""
        aborted = []
        for index, (answer, reference) in enumerate(zip(answers, wanted, strict=True)):
            if "error" in answer:
                self.causes.append(answer["error"])
                if answer["code"] == UNAVAILABLE:
                    aborted.append(index)
                else:
                    self.lost += 1
                continue
            self.loaded += answer["host"]
            self.slowest_s = max(self.slowest_s, answer["seconds"])
            if difference(answer, reference) == 0.0:
                self.right += 1
            else:
                self.wrong += 1
        return aborted

    def row(self) -> dict[str, Any]:
        """Return the line of the table."""
        return {
            "what was done": self.name,
            "from host": self.loaded,
            "right": self.right,
            "503": self.aborted,
            "right then": self.right_then,
            "wrong": self.wrong,
            "lost": self.lost,
            "slowest s": self.slowest_s,
            "hits again s": "" if self.back_s is None else self.back_s,
        }


class Faults:
    """All of them, one after the other, on one engine that is never started anew.

    Attributes:
        stored_s: from an answer until its pages are in the store, and the engine may know it.
    """

    stored_s = 1.0

    def __init__(self, bed: Bed, engine: Engine, note: Callable[[str], None]) -> None:
        """Take a bed and its running engine; `note` is told what is going on."""
        self._bed = bed
        self._engine = engine
        self._note = note

    def run(self, faults: list[Fault], *, quick: bool) -> None:
        """Do all of it, or two of them if `quick`; what came of it is appended.

        Raises:
            EngineError: the engine ended, or hangs.
            SabotageError: a fault could not be made.
        """
        faults.append(self._change("object corrupted", flip))
        if not quick:
            faults.append(self._change("object exchanged", exchange))
            faults.append(self._change("object removed", remove))
            faults.append(self._flush())
        faults.append(self._owner())
        if not quick:
            faults.append(self._master())

    def _stored(self, name: str, number: int) -> tuple[list[list[int]], list[Any], list[list[str]]]:
        """Have prompts answered without a cache and stored, and forgotten on the device.

        Returns:
            The prompts, their answers, and each one's new keys.
        """
        self._note(f"fault: {name}")
        prompts = self._bed.case.fault_prompts(name, number)
        wanted, keys = [], []
        for prompt in prompts:
            before = self._bed.keys()
            wanted += self._engine.generate([prompt])
            if wanted[-1].get("device", 1) or wanted[-1]["host"]:
                raise SabotageError(f"{name}: a new prompt's answer is {wanted[-1]}, wanted no hit")
            num_pages = self._bed.case.whole_pages(prompt) // self._bed.case.page_size
            keys.append(sorted(self._bed.wait_stored(before, num_pages)))
        self._engine.flush()
        return prompts, wanted, keys

    def _flush(self) -> Fault:
        """Flush the cache again and again while prompts are answered, loaded and stored."""
        fault = Fault("cache flushed under load")
        prompts, wanted, _ = self._stored(fault.name, 2)
        fresh = self._bed.case.fault_prompts("fresh", 2)
        wanted = [*wanted, *self._engine.generate(fresh, salt=fault.name)]
        for _ in range(3):
            self._engine.begin([*prompts, *fresh], flushes=NUM_FLUSHES)
            fault.judge(self._engine, [*prompts, *fresh], wanted)
        return fault

    def _change(self, name: str, change: Callable[[MooncakeStore, Sequence[str]], None]) -> Fault:
        """Change one object of a prompt, then ask for it."""
        fault = Fault(name)
        prompts, wanted, keys = self._stored(name, 1)
        store = MooncakeStore(MooncakeConfig(self._bed.master.address))
        try:
            change(store, [key for key in keys[0] if key.endswith("/full")])
        finally:
            store.close()
        self._engine.begin(prompts)
        fault.judge(self._engine, prompts, wanted)
        self._engine.flush()
        num_tokens = self._bed.case.whole_pages(prompts[0])
        self._wait_back(fault, lambda: self._loads(fault, prompts[0], wanted[0]) == num_tokens)
        return fault

    def _owner(self) -> Fault:
        """Kill who has all objects in its memory, while they are read."""
        fault = Fault("owner killed")
        prompts, wanted, _ = self._stored(fault.name, NUM_PROMPTS)
        self._engine.begin(prompts)
        time.sleep(UNDER_LOAD_S)
        self._bed.owner.kill()
        fault.judge(self._engine, prompts, wanted)
        self._without_store(fault, prompts, wanted)
        self._bed.owner.start()
        self._wait_back(fault, self._stores_anew(fault))
        return fault

    def _master(self) -> Fault:
        """Kill who knows where objects are, while they are read."""
        fault = Fault("master killed")
        prompts, wanted, _ = self._stored(fault.name, NUM_PROMPTS)
        self._engine.begin(prompts)
        time.sleep(UNDER_LOAD_S)
        self._bed.master.kill()
        fault.judge(self._engine, prompts, wanted)
        self._without_store(fault, prompts, wanted)
        self._bed.master.start()
        self._bed.owner.kill()  # a new master knows nobody: a new owner tells it of itself
        self._bed.owner.start()
        self._wait_back(fault, self._stores_anew(fault))
        return fault

    def _without_store(
        self, fault: Fault, prompts: Sequence[list[int]], wanted: Sequence[Any]
    ) -> None:
        """Ask again with nothing on the device and a part of the store gone."""
        self._engine.flush()
        self._engine.begin(prompts)
        fault.judge(self._engine, prompts, wanted)

    def _wait_back(self, fault: Fault, is_back: Callable[[], bool]) -> None:
        """Wait until the store serves as before, and say how long it took."""
        begin_s = time.monotonic()
        back = wait_until(is_back, AGAIN_LIMIT_S)
        fault.back_s = time.monotonic() - begin_s if back else math.inf

    def _stores_anew(self, fault: Fault) -> Callable[[], bool]:
        """Return what has a new prompt stored, and says whether it is loaded then."""
        numbers = itertools.count()

        def stores() -> bool:
            [prompt] = self._bed.case.fault_prompts(f"{fault.name} back {next(numbers)}", 1)
            [wanted] = self._engine.generate([prompt])
            time.sleep(self.stored_s)
            self._engine.flush()
            return self._loads(fault, prompt, wanted) > 0

        return stores

    def _loads(self, fault: Fault, prompt: list[int], wanted: Any) -> int:
        """Return how many tokens of a prompt come from the store; the answer must be right."""
        [answer] = self._engine.generate([prompt])
        self._engine.flush()
        if answer.get("code") == UNAVAILABLE:
            return 0  # not back yet
        if difference(answer, wanted) != 0.0:
            fault.wrong += 1
        return int(answer.get("host", 0))
