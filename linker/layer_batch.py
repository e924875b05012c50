"""What a layer-wise load has so far: which rows came, which are lacking, what they sum to."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.arguments import shown
from kvferry.errors import TransferFailed
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.linker.layer_load import LayerLoad
from kvferry.linker.layer_plan import GroupPart, Piece, Rows
from kvferry.linker.plan import SpacePlan
from kvferry.linker.ranges import of_part, of_plans, ranged
from kvferry.linker.seal import Checked, Seal, ends_of
from kvferry.linker.staging import Span
from kvferry.linker.store import FETCHED, ObjectResult, Outcome, all_are
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Ended


class Batch:
    """The state of one load; used by one thread.

    A row is **open** while its layers come by ranges. It is **lacking** from some layer on once a
    range could not be had, until the whole object was fetched. Rows whose request has ended are
    neither: their pages are not touched any more.

    Attributes:
        keys: of every object that some request still wants, each once.
    """

    def __init__(
        self,
        load: LayerLoad,
        packers: Mapping[str, Packer],
        seal: Seal | None,
        lane: Lane,
        backend: str,
        trace: Trace | None,
    ) -> None:
        self._load = load
        self._packers = packers
        self._seal = seal
        self._lane = lane
        self._backend = backend
        self._trace = trace
        self._rows = load.rows
        self._closed = {
            space: np.zeros(len(rows), dtype=bool) for space, rows in self._rows.items()
        }
        self._is_any_closed = False
        self._lacking: dict[tuple[str, int], int] = {}
        self._ids: dict[str, PageIds] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._ends: dict[str, torch.Tensor] = {}
        self.keys = list(
            dict.fromkeys(key for rows in self._rows.values() for key in rows.plan.keys)
        )
        with lane.work(Fence()):
            for space, rows in self._rows.items():
                layout = packers[space].layout
                self._ids[space] = PageIds.upload(layout, rows.plan.page_ids, unique=True)
                if seal is not None:
                    self._sums[space] = seal.zeros(len(rows))
                    self._ends[space] = torch.zeros(
                        (len(rows), rows.plan.end_bytes), dtype=torch.uint8, device=layout.device
                    )

    # ---- which rows ----

    def open_rows(self, part: GroupPart) -> list[Sequence[int]]:
        """Return the open rows of each piece of a part."""
        if not self._is_any_closed and all(one.is_wanted for one in self._load.transfers):
            return [range(piece.first_row, piece.end_row) for piece in part.pieces]
        found: list[Sequence[int]] = []
        for piece in part.pieces:
            rows = self._rows[piece.space]
            unwanted = self._closed[piece.space][piece.first_row : piece.end_row].copy()
            for number in np.unique(rows.owners[piece.first_row : piece.end_row]).tolist():
                if not self._load.transfers[number].is_wanted:
                    unwanted |= rows.owners[piece.first_row : piece.end_row] == number
            if unwanted.any():
                found.append((np.flatnonzero(~unwanted) + piece.first_row).tolist())
            else:
                found.append(range(piece.first_row, piece.end_row))
        return found

    @property
    def lacking(self) -> bool:
        """Whether any row that is still wanted is lacking."""
        self._forget_ended()
        return bool(self._lacking)

    def lacks_before(self, end_layer: int) -> bool:
        """Whether any layer before `end_layer` of a wanted row is lacking."""
        self._forget_ended()
        return any(first < end_layer for first in self._lacking.values())

    def lack(self, keys: Iterable[str]) -> None:
        """Say that objects cannot be read by ranges at all."""
        lost = set(keys)
        for space, rows in self._rows.items():
            for row, key in enumerate(rows.plan.keys):
                if key in lost:
                    self._lack_row(space, row, 0)

    def _lack_row(self, space: str, row: int, first_layer: int) -> None:
        self._closed[space][row] = self._is_any_closed = True
        self._lacking[space, row] = min(first_layer, self._lacking.get((space, row), first_layer))

    def _forget_ended(self) -> None:
        if self._lacking:
            self._lacking = {
                (space, row): first
                for (space, row), first in self._lacking.items()
                if not self._is_ended(space, row)
            }

    def _is_ended(self, space: str, row: int) -> bool:
        return not self._load.transfers[int(self._rows[space].owners[row])].is_wanted

    def next_lacking(self, max_bytes: int) -> tuple[SpacePlan | None, list[int]]:
        """Return some lacking rows of one index space, and the rows' numbers; None if none is.

        Args:
            max_bytes: of staging that they may take as whole objects; one may take more.
        """
        self._forget_ended()
        if not self._lacking:
            return None, []
        space = next(iter(self._lacking))[0]
        plan = self._rows[space].plan
        chosen: dict[str, int] = {}  # a key once: one call fills only one place for it
        for of_space, row in self._lacking:
            if of_space == space and len(chosen) < max(1, max_bytes // plan.stride_bytes):
                chosen.setdefault(plan.keys[row], row)
        rows = sorted(chosen.values())
        mask = np.zeros(len(plan.keys), dtype=bool)
        mask[rows] = True
        return plan.select(mask.tolist()), rows

    # ---- bytes ----

    @ranged(lambda _, part, rows, span, results: of_part("unpack", part, rows))
    def unpack(
        self,
        part: GroupPart,
        rows: Sequence[Sequence[int]],
        span: Span,
        results: Sequence[ObjectResult],
    ) -> Fence:
        """Launch the unpack of what came of a part; rows that did not come are lacking from it on.

        Args:
            part: what was fetched.
            rows: of each piece, that were asked for.
            span: the part's memory.
            results: of those rows, one after the other.
        """
        good = rows
        if self._is_any_closed or not all_are(results, FETCHED):
            good = self._good(part, rows, results)
        owners = {
            owner
            for piece, wanted in zip(part.pieces, good, strict=True)
            for owner in self._owners(piece.space, wanted)
        }
        with self._touching(owners) as (touched, alive):
            with self._lane.work(self._load.behind) as fences:
                for piece, wanted in zip(part.pieces, good, strict=True):
                    if len(alive) < len(owners):
                        of_rows = self._rows[piece.space].owners
                        wanted = [row for row in wanted if int(of_rows[row]) in alive]
                    for first, end in self._runs(piece.space, wanted):
                        self._unpack_run(part, piece, span, first, end)
            touched.append(fences[-1])
        if self._trace is not None:
            self._trace.add_fence("unpack", part.name, fences[-1], bytes=part.num_bytes)
        return fences[-1]

    def _good(
        self, part: GroupPart, rows: Sequence[Sequence[int]], results: Sequence[ObjectResult]
    ) -> list[Sequence[int]]:
        """Return the rows of each piece that came and are open; those that did not are lacking."""
        outcomes = iter(results)
        good: list[Sequence[int]] = []
        for piece, asked in zip(part.pieces, rows, strict=True):
            came = [(row, next(outcomes)) for row in asked]
            for row, result in came:
                if result.outcome is not Outcome.FETCHED and not self._closed[piece.space][row]:
                    self._lack_row(piece.space, row, part.first_layer)
            good.append([row for row, _ in came if not self._closed[piece.space][row]])
        return good

    def _owners(self, space: str, rows: Sequence[int]) -> set[int]:
        """Return the numbers of the requests that some rows are of."""
        if len(self._load.transfers) == 1:
            return {0} if rows else set()
        return set(self._rows[space].owners[rows].tolist())

    def _unpack_run(self, part: GroupPart, piece: Piece, span: Span, first: int, end: int) -> None:
        """Unpack consecutive rows of a piece; only the last may be wanted in part."""
        space, plan = piece.space, self._rows[piece.space].plan
        start = piece.base_bytes + (first - piece.first_row) * piece.stride_bytes
        objects = span.tensor[start:]
        tokens, tail = self._rows[space].tails.get(end - 1, (None, "zero"))
        self._packers[space].unpack(
            self._ids[space][first:end],
            objects,
            stride_bytes=piece.stride_bytes,
            layers=range(part.first_layer, part.end_layer),
            origin_bytes=piece.origin_bytes,
            sums=self._sums[space][first:end] if self._seal else None,
            tail_tokens=tokens,
            tail=tail,
            backend=self._backend,
        )
        if piece.has_end:
            behind = plan.object_bytes - piece.origin_bytes
            self._ends[space][first:end].copy_(
                ends_of(objects, end - first, piece.stride_bytes, behind, plan.end_bytes)
            )

    @ranged(lambda _, plan, *rest: of_plans("unpack", [plan], "objects"))
    def unpack_whole(
        self,
        plan: SpacePlan,
        rows: Sequence[int],
        span: Span,
        checked: Checked | None,
        causes: Mapping[str, str],
    ) -> Fence:
        """Launch the unpack of the lacking layers of whole objects; those in `causes` are left out.

        Layers that came by ranges before are not written again: a forward pass may be at them.
        Their sums, as they were received, stand beside this object's in the verdict.

        Args:
            plan: of the rows, from `next_lacking`.
            rows: their numbers.
            span: the objects' memory.
            checked: what verifying them found; None without integrity.
            causes: object key to why it cannot be had.
        """
        space = plan.space
        layout = self._packers[space].layout
        firsts = [self._lacking.pop((space, row), None) for row in rows]
        owners = {int(self._rows[space].owners[row]) for row in rows}
        with self._touching(owners) as (touched, alive):
            with self._lane.work(self._load.behind) as fences:
                ids = PageIds.upload(layout, plan.page_ids, unique=True)
                for place, (row, first_layer) in enumerate(zip(rows, firsts, strict=True)):
                    owner = int(self._rows[space].owners[row])
                    if plan.keys[place] in causes or first_layer is None or owner not in alive:
                        continue
                    tokens, tail = self._rows[space].tails.get(row, (None, "zero"))
                    self._packers[space].unpack(
                        ids[place : place + 1],
                        span.tensor[place * plan.stride_bytes :],
                        stride_bytes=plan.stride_bytes,
                        layers=range(first_layer, layout.num_layers),
                        tail_tokens=tokens,
                        tail=tail,
                        backend=self._backend,
                    )
                    if checked is not None:
                        self._sums[space][row, first_layer:] = checked.sums[place, first_layer:]
                        self._ends[space][row] = checked.ends[place]
            touched.append(fences[-1])
        return fences[-1]

    @contextlib.contextmanager
    def _touching(self, owners: Iterable[int]) -> Iterator[tuple[list[Fence], set[int]]]:
        """Guard a body that launches work on the pages of requests; hand it those not over."""
        with contextlib.ExitStack() as stack:
            each: list[list[Fence]] = []
            alive: set[int] = set()
            for owner in sorted(owners):
                with contextlib.suppress(Ended):
                    transfer = self._load.transfers[owner]
                    each.append(stack.enter_context(transfer.touching_pages()))
                    alive.add(owner)
            touched: list[Fence] = []
            yield touched, alive
            for fences in each:
                fences.extend(touched)

    def _runs(self, space: str, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield `[first, end)` runs of consecutive rows; one wanted in part ends its run."""
        tails = self._rows[space].tails
        if isinstance(rows, range) and not tails:
            if rows:
                yield rows[0], rows[-1] + 1
            return
        start = 0
        for place, row in enumerate(rows):
            if place + 1 == len(rows) or rows[place + 1] != row + 1 or row in tails:
                yield rows[start], row + 1
                start = place + 1

    # ---- the end ----

    def faults(self) -> dict[str, str]:
        """Return what is wrong with the objects of requests that go on: object key to reason."""
        found: dict[str, str] = {}
        if self._seal is None:
            return found
        for space, rows in self._rows.items():
            going = self._going(rows)
            if going.any():
                with self._lane.work(Fence()):
                    wanted = torch.from_numpy(np.flatnonzero(going)).to(self._sums[space].device)
                    ends, sums = self._ends[space][wanted], self._sums[space][wanted]
                found |= self._seal.faults(rows.plan.select(going.tolist()), ends, sums)
        return found

    def _going(self, rows: Rows) -> NDArray[np.bool_]:
        going = np.array([transfer.is_wanted for transfer in self._load.transfers])
        found: NDArray[np.bool_] = going[rows.owners]
        return found

    def fail(self, causes: Mapping[str, str]) -> None:
        """Fail every request that wants one of these objects."""
        for number, transfer in enumerate(self._load.transfers):
            wanted = [
                rows.plan.keys[row]
                for rows in self._rows.values()
                for row in np.flatnonzero(rows.owners == number).tolist()
            ]
            its = {key: causes[key] for key in wanted if key in causes}
            if its:
                first = next(iter(its))
                transfer.fail(
                    TransferFailed(
                        f"load failed: {len(its)} of {len(wanted)} objects could not be had, the "
                        f"first {shown(first)}: {its[first]}",
                        its,
                    )
                )

    def finish(self) -> None:
        """End well every request that goes on."""
        for number, transfer in enumerate(self._load.transfers):
            for rows in self._rows.values():
                num_rows = int((rows.owners == number).sum())
                transfer.progress.num_objects += num_rows
                transfer.progress.num_bytes += num_rows * rows.plan.object_bytes
            transfer.timings.take(self._load.timings)
            transfer.finish()
