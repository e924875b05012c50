"""What a soak has seen so far: operations, faults, failures by cause, and what must never be."""

import threading
import traceback
from collections import Counter
from typing import Any

from kvferry.linker.lookup import SPOILT

MAX_REPORTS = 20


class Tally:
    """Counts from all threads of a soak.

    Attributes:
        operations: by form and outcome.
        causes: of failed transfers and objects, by form and cause.
        begun: transfers that a linker took, by engine and kind.
        faults: by kind.
        victims: of other clients' objects, how many were stored and how often they were compared.
        wrong: what was wrong with bytes or results, by kind of finding; must stay empty.
        reports: the first findings in full.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.operations: Counter[tuple[str, str]] = Counter()
        self.causes: Counter[tuple[str, str]] = Counter()
        self.begun: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.victims: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.reports: list[str] = []

    def ended(self, form: str, outcome: str) -> None:
        """Count an operation that ended."""
        with self._lock:
            self.operations[form, outcome] += 1

    @property
    def num_spoilt(self) -> int:
        """How many loads were refused because an object was not what it should be."""
        with self._lock:
            return sum(count for (_, cause), count in self.causes.items() if cause in SPOILT)

    def failed(self, form: str, cause: str) -> None:
        """Count why a transfer, an object or a wait failed."""
        with self._lock:
            self.causes[form, cause] += 1

    def began(self, engine: str, kind: str, count: int = 1) -> None:
        """Count transfers that a linker has taken, and must end."""
        with self._lock:
            self.begun[engine, kind] += count

    def fault(self, kind: str) -> None:
        """Count a fault that was injected."""
        with self._lock:
            self.faults[kind] += 1

    def victim(self, what: str, count: int) -> None:
        """Count other clients' objects that were stored or compared."""
        with self._lock:
            self.victims[what] += count

    def found(self, kind: str, what: str) -> None:
        """Count something that must never be, and print the first ones at once."""
        with self._lock:
            self.wrong[kind] += 1
            if len(self.reports) < MAX_REPORTS:
                self.reports.append(f"{kind}: {what}")
                print(f"FOUND {kind}: {what}", flush=True)

    def unexpected(self, where: str, error: BaseException) -> None:
        """Count an exception that no contract allows."""
        self.found("errors", f"{where}: {''.join(traceback.format_exception(error))}")

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts as a table's rows."""
        with self._lock:
            return [
                *(
                    {"what": f"{form}, {outcome}", "count": count}
                    for (form, outcome), count in sorted(self.operations.items())
                ),
                *(
                    {"what": f"{form} failed: {cause}", "count": count}
                    for (form, cause), count in sorted(self.causes.items())
                ),
                *(
                    {"what": f"fault: {kind}", "count": count}
                    for kind, count in sorted(self.faults.items())
                ),
                *(
                    {"what": f"victims {what}", "count": count}
                    for what, count in sorted(self.victims.items())
                ),
            ]
