"""What is done to the store under a running vLLM: as under SGLang, and behind a lookup's back."""

import time
from collections.abc import Callable
from typing import Any

from bars import Bar
from sabotage import SabotageError, remove
from sglang_bed import Bed, Engine
from sglang_faults import Fault, Faults
from vllm_bed import LOOKUP_TTL_S

from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.mooncake_config import MooncakeConfig

NUM_TRIES = 4
"""The removal must come before a lookup is forgotten, which a busy machine may miss."""

LEGEND = """\
right: equal to the last digit to what the same engine computes without a cache; a load that breaks
is computed anew, so that nothing is ended with 503. lost: no answer
hits again: seconds until all comes from the store again, since the answers; or since who was killed
has been started again, until a new prompt does"""


class VllmFaults(Faults):
    """All faults, on one engine that is never started anew.

    Attributes:
        bars: that the faults' own results do not hold.
    """

    stored_s = LOOKUP_TTL_S + 0.5  # the engine has asked before, and remembers that they were not

    def __init__(self, bed: Bed, engine: Engine, note: Callable[[str], None]) -> None:
        """Take a bed and its running engine; `note` is told what is going on."""
        super().__init__(bed, engine, note)
        self.bars: list[Bar] = []

    def run(self, faults: list[Fault], *, quick: bool) -> None:
        """Do all of it, or three of them if `quick`; as `Faults.run`."""
        fault, num_failed = self._removed_after_lookup()
        faults.append(fault)
        self.bars.append(Bar("fault.removed_after_lookup.failed_loads", num_failed, 1, True))
        super().run(faults, quick=quick)

    def _removed_after_lookup(self) -> tuple[Fault, int]:
        """Remove an object that a lookup has just found, then have it loaded.

        Returns:
            The fault, and how many failures of loads the connector counted.
        """
        fault = Fault("removed after lookup")
        num_failed = 0
        store = MooncakeStore(MooncakeConfig(self._bed.master.address))
        try:
            for number in range(NUM_TRIES):
                name = f"{fault.name} {number}"
                [prompt], [wanted], [keys] = self._stored(name, 1)
                self._load_all(name, prompt)
                self._engine.flush()
                remove(store, [key for key in keys if key.endswith("/full")])
                self._engine.begin([prompt])
                fault.judge(self._engine, [prompt], [wanted])
                self._engine.flush()
                num_failed += int(self._engine.told.get("failed_loads", 0))
                if num_failed:
                    break
        finally:
            store.close()
        return fault, num_failed

    def _stored(self, name: str, number: int) -> tuple[list[list[int]], list[Any], list[list[str]]]:
        """As `Faults._stored`; then wait until the engine has forgotten that nothing was there."""
        stored = super()._stored(name, number)
        time.sleep(self.stored_s)
        return stored

    def _load_all(self, name: str, prompt: list[int]) -> None:
        """Have a prompt found and loaded: its lookup is remembered from now on."""
        [answer] = self._engine.generate([prompt])
        if not answer.get("host"):
            raise SabotageError(f"{name}: the stored prompt was not loaded: {_short(answer)}")


def _short(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "top"}
