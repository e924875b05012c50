"""What the callers of a soak do: saves and loads of every form, whole, cancelled or let expire."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soak_cluster import CHAIN_PAGES, NUM_CHAINS, Engine, Prefix
from soak_pages import Ids
from soak_quiet import Quiet
from soak_tally import Tally
from soak_watch import Watch

from kvferry.errors import TransferFailed
from kvferry.linker.layer_load import LoadRequest
from kvferry.testing import check_telling, write_telling

FORMS = {"save whole": 3, "save layers": 3, "load whole": 4, "load layers": 4, "load batch": 3}
"""How often each form is chosen, relative to the others."""
IDLE_PAUSE_S = 0.02
"""After an operation that moved nothing, so that outages are not all that is counted."""
HELD_AT_LAYER = 4
"""Where a save waits for a quiet to end: some of its layer groups are sent, the largest is not."""
HELD_PAGES = (CHAIN_PAGES, 5 * CHAIN_PAGES)
"""How many pages such a save has: its objects fit into staging, or by far not."""
NO_DEADLINE_S = 40.0
"""Longer than any transfer's deadline: a result that is not there by then will not come."""

_new_chains = itertools.count(10 * NUM_CHAINS)


@dataclass
class Request:
    """One request of a load: what it wants and where, and what came of it so far.

    Attributes:
        prefix: what it loads.
        ids: where to.
        early: layers whose bytes were wrong when their wait said that they had landed; wrong only
            if the load succeeds, since its objects are verified as a whole.
        ended: whether its pages are out of the linker's hands.
    """

    prefix: Prefix
    ids: Ids
    early: list[str] = field(default_factory=list)
    ended: bool = False


class Caller(threading.Thread):
    """One caller; runs operations until it is told to stop."""

    def __init__(
        self, number: int, seed: int, engine: Engine, tally: Tally, watch: Watch, quiet: Quiet
    ) -> None:
        super().__init__(name=f"soak-{engine.name}-{number}", daemon=True)
        self._rng = random.Random(f"{seed}-{number}")
        self._engine = engine
        self._tally = tally
        self._watch = watch
        self._quiet = quiet

    def run(self) -> None:
        """Run operations; whatever they raise is counted, never swallowed."""
        forms: dict[str, Callable[[], str]] = {
            "save whole": self._save_whole,
            "save layers": self._save_layers,
            "save held": self._save_held,
            "load whole": self._load_whole,
            "load layers": lambda: self._load_layers("load layers", 1),
            "load batch": lambda: self._load_layers("load batch", self._rng.randint(2, 4)),
        }
        while not self._watch.stopping.is_set():
            (form,) = self._rng.choices(list(FORMS), list(FORMS.values()))
            if self._quiet.wanted:
                form = "save held"
            with self._watch.operation(form):
                try:
                    outcome = forms[form]()
                except Exception as error:  # noqa: BLE001 - counted and shown, and the soak fails
                    self._tally.unexpected(f"{self.name}, {form}", error)
                    outcome = "raised"
            self._tally.ended(form, outcome)
            if outcome not in ("done", "in part", "cancelled"):
                time.sleep(IDLE_PAUSE_S)

    # ---- saves ----

    def _save_whole(self) -> str:
        prefix, ids = self._lend(saving=True)
        if ids is None:
            return "no pages free"
        for space, pages in ids.items():
            write_telling(self._layout, space, pages, prefix.tags(space, saving=True))
        save = self._begin_save("save whole", prefix, ids, layerwise=False)
        if save is None:
            return "refused"
        if self._rng.random() < 0.3:
            save.wait_packed()
            self._give_back(ids, "a save, after wait_packed")
            return self._end_save("save whole", save, ids)
        outcome = self._end_save("save whole", save, ids)
        self._give_back(ids, f"a save that was {outcome}")
        return outcome

    def _save_layers(self) -> str:
        prefix, ids = self._lend(saving=True)
        if ids is None:
            return "no pages free"
        save = self._begin_save("save layers", prefix, ids, layerwise=True)
        if save is None:
            return "refused"
        num_layers = self._layout.num_layers
        leaves_at = self._rng.choice([None] * 8 + [self._rng.randrange(num_layers)])
        at_once = self._rng.random() < 0.25
        for layer_id in range(num_layers):
            if layer_id == leaves_at:
                break  # the model failed: some cancel, some forget it
            for space, pages in ids.items():
                tags = prefix.tags(space, saving=True)
                write_telling(self._layout, space, pages, tags, layers=[layer_id])
            if not at_once:
                save.layer_written(layer_id)
                time.sleep(self._rng.choice([0, 0, 0.001, 0.003]))
        if at_once and leaves_at is None:
            save.all_written()
        forgets = self._engine.name == "hasty" and self._rng.random() < 0.5
        if leaves_at is not None and not forgets:
            save.cancel()
        outcome = self._end_save("save layers", save, ids)
        self._give_back(ids, f"a save by layers that was {outcome}")
        return outcome

    def _save_held(self) -> str:
        """Begin to save pages that nobody has saved, and go on when the quiet is over."""
        prefix = Prefix(next(_new_chains), self._rng.choice(HELD_PAGES))
        counts = _counts(prefix, saving=True)
        # Those whose deadlines are shorter than the quiet have nothing in hand.
        ids = self._pages.lend(counts) if self._engine.name == "patient" else None
        save = ids and self._begin_save("save held", prefix, ids, layerwise=True)
        if ids is None or save is None:
            self._quiet.hold()
            return "nothing in hand"
        for layer_id in range(self._layout.num_layers):
            if layer_id == HELD_AT_LAYER:
                self._quiet.hold()
            for space, pages in ids.items():
                tags = prefix.tags(space, saving=True)
                write_telling(self._layout, space, pages, tags, layers=[layer_id])
            save.layer_written(layer_id)
        outcome = self._end_save("save held", save, ids)
        self._give_back(ids, f"a held save that was {outcome}")
        return outcome

    def _begin_save(self, form: str, prefix: Prefix, ids: Ids, *, layerwise: bool) -> Any:
        """Return a save's handle; None if the linker refused it."""
        rows = prefix.rows(ids, saving=True)
        try:
            save = self._engine.linker.save(prefix.keys, rows, layerwise=layerwise)
        except TransferFailed as error:
            self._tally.failed(form, f"refused, {error.cause}")
            self._give_back(ids, "a save that was refused")
            return None
        self._tally.began(self._engine.name, "save")
        return save

    def _end_save(self, form: str, save: Any, ids: Ids) -> str:
        outcome, result = self._end(form, save)
        if result is None:
            return outcome
        num_objects = sum(len(pages) for pages in ids.values())
        counted = result.num_objects + result.num_existing + len(result.failures)
        if counted != num_objects:
            self._tally.found("results", f"{form} of {num_objects} objects counted {result}")
        for reason in result.failures.values():
            self._tally.failed(f"{form}, object", reason)
        return "in part" if result.failures else outcome

    # ---- loads ----

    def _load_whole(self) -> str:
        request = self._find()
        if isinstance(request, str):
            return request
        try:
            load = self._engine.linker.load(
                request.prefix.keys, request.prefix.rows(request.ids, saving=False)
            )
        except TransferFailed as error:
            self._tally.failed("load whole", f"refused, {error.cause}")
            self._end_request(request, "refused", "load whole")
            return "refused"
        self._tally.began(self._engine.name, "load")
        outcome, _ = self._end("load whole", load)
        self._end_request(request, outcome, "load whole")
        return outcome

    def _load_layers(self, form: str, num_requests: int) -> str:
        found = [self._find() for _ in range(num_requests)]
        requests = [request for request in found if isinstance(request, Request)]
        if not requests:
            return str(found[0])
        wanted = [
            LoadRequest(request.prefix.keys, request.prefix.rows(request.ids, saving=False))
            for request in requests
        ]
        load = self._engine.linker.load_batch(wanted)
        self._tally.began(self._engine.name, "load", len(requests))
        try:
            load.start()
        except TransferFailed as error:
            self._tally.failed(form, f"refused, {error.cause}")
            for request in requests:
                self._end_request(request, "refused", form)
            return "refused"
        cancels_at = self._rng.choice([None] * 9 + [self._rng.randrange(self._layout.num_layers)])
        for layer_id in range(self._layout.num_layers):
            if layer_id == cancels_at:
                self._cancel_some(load, requests, form)
            waited = load.wait_layer(layer_id)
            if waited.state == "landed":
                for request in requests:
                    self._check_early(request, layer_id)
            elif waited.state == "expired":
                self._tally.failed(f"{form}, wait for a layer", "expired")
        outcomes = []
        for request, transfer in zip(requests, load.transfers, strict=True):
            outcome, _ = self._end(form, transfer)
            outcomes.append(outcome)
            if not request.ended:
                self._end_request(request, outcome, form)
        return outcomes[0] if len(set(outcomes)) == 1 else "in part"

    def _cancel_some(self, load: Any, requests: list[Request], form: str) -> None:
        """Cancel the whole load, or one of its requests, whose pages are then out of its hands."""
        if len(requests) > 1 and self._rng.random() < 0.7:
            index = self._rng.randrange(len(requests))
            if load.transfers[index].cancel():
                self._end_request(requests[index], "cancelled", form)
        else:
            load.cancel()

    def _find(self) -> Request | str:
        """Return a request for a prefix that the store has, mostly; else why there is none."""
        prefix = self._prefix()
        if self._rng.random() < 0.95:
            lengths = self._engine.linker.lookup(prefix.keys)
            if not lengths:
                return "nothing to load"
            prefix = Prefix(prefix.chain, self._rng.choice(lengths[-3:]))
        self._engine.hot.extend(prefix.keys)
        ids = self._pages.lend(_counts(prefix, saving=False))
        return Request(prefix, ids) if ids is not None else "no pages free"

    def _check_early(self, request: Request, layer_id: int) -> None:
        if not request.ended:
            for space, pages in request.ids.items():
                tags = request.prefix.tags(space, saving=False)
                try:
                    check_telling(self._layout, space, pages, tags, layers=[layer_id])
                except AssertionError as error:
                    request.early.append(f"layer {layer_id} had landed: {error}")

    def _end_request(self, request: Request, outcome: str, form: str) -> None:
        """Check what was loaded, once its transfer has ended, and let its pages go."""
        request.ended = True
        if outcome == "done":
            for finding in request.early:
                self._tally.found("wrong bytes", f"{form} of {request.prefix}: {finding}")
            for space, pages in request.ids.items():
                tags = request.prefix.tags(space, saving=False)
                try:
                    check_telling(self._layout, space, pages, tags)
                except AssertionError as error:
                    self._tally.found("wrong bytes", f"{form} of {request.prefix}: {error}")
        self._give_back(request.ids, f"a {form} that was {outcome}", watch=outcome != "done")

    # ---- both ----

    @property
    def _layout(self) -> Any:
        return self._engine.linker.layout

    @property
    def _pages(self) -> Any:
        return self._engine.pages

    def _prefix(self) -> Prefix:
        return Prefix(self._rng.randrange(NUM_CHAINS), self._rng.randint(1, CHAIN_PAGES))

    def _lend(self, *, saving: bool) -> tuple[Prefix, Ids | None]:
        prefix = self._prefix()
        return prefix, self._pages.lend(_counts(prefix, saving=saving))

    def _give_back(self, ids: Ids, what: str, *, watch: bool = True) -> None:
        watch_s = self._rng.choice([0.05, 0.3, 2.0]) if watch or self._rng.random() < 0.1 else 0.0
        self._pages.take_back(ids, what, watch_s)

    def _end(self, form: str, transfer: Any) -> tuple[str, Any]:
        """Wait for the end, or force it at a random moment; return the outcome and the result."""
        draw = self._rng.random()
        outcome = "failed"
        try:
            if draw < 0.1:
                time.sleep(self._rng.random() * 0.02)
                transfer.cancel()
            elif draw < 0.2:
                try:
                    return "done", transfer.result(self._rng.random() * 0.02)
                except TimeoutError:
                    transfer.cancel()
            return "done", transfer.result(NO_DEADLINE_S)
        except TransferFailed as error:
            if error.cause in ("cancelled", "deadline"):
                outcome = error.cause
            self._tally.failed(form, error.cause)
            return outcome, None
        except TimeoutError as error:
            self._tally.found("hangs", f"{form}: no end within {NO_DEADLINE_S} s: {error}")
            transfer.cancel()
            return outcome, None


def _counts(prefix: Prefix, *, saving: bool) -> dict[str, int]:
    return {space: len(pages) for space, pages in prefix.wanted(saving=saving).items()}
