"""A store call that ranks make together: each fetches a part, tells how it went, and sends it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.linker.attempts import STILL_ARRIVING, chosen_of
from kvferry.linker.peers import Peers, PeersLost
from kvferry.linker.shared_parts import (
    ENDED,
    Told,
    are_same,
    cut_evenly,
    digest_of,
    runs_of,
)
from kvferry.linker.store import FETCHED, ObjectResult, Outcome

log = logging.getLogger(__name__)

Reader = Callable[..., list[ObjectResult]]
"""A store's call: keys, addresses, sizes and maybe offsets to a result for each."""


@dataclass
class LoadState:
    """Where a load stands on this rank.

    Attributes:
        number: of the load, the same on all ranks.
        wanted: whether it goes on.
        num_calls: that this rank has made together with others, or tried to.
        is_alone: whether another rank has ended it, so that the rest is read alone.
        has_differed: whether the log says so already.
    """

    number: int
    wanted: Callable[[], bool]
    num_calls: int = 0
    is_alone: bool = False
    has_differed: bool = False


@dataclass
class Counts:
    """What became of reads.

    Attributes:
        shared: calls whose bytes were sent from rank to rank.
        differed: calls that were not the same on all ranks.
        alone: calls that a rank made alone for another reason.
        fetched_bytes: that this rank has read from the store.
        received_bytes: that came from other ranks.
    """

    shared: int = 0
    differed: int = 0
    alone: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0


class SharedCall:
    """One call of the store, that other ranks may make too."""

    def __init__(
        self,
        peers: Peers,
        load: LoadState,
        counts: Counts,
        memory: Callable[[int, int], torch.Tensor],
        lose: Callable[[PeersLost], None],
        kind: str,
        read: Reader,
        keys: Sequence[str],
        columns: Sequence[Sequence[int]],
        common: Sequence[int],
    ) -> None:
        """Describe a call.

        Args:
            peers: the ranks.
            load: that it is part of.
            counts: to be kept.
            memory: gives the bytes at an address.
            lose: called once no bytes can be shared any more.
            kind: `read` or `get`.
            read: the store's call.
            keys: of objects.
            columns: addresses, sizes and maybe offsets.
            common: indices of the objects that all ranks have alike.
        """
        self._peers = peers
        self._load = load
        self._counts = counts
        self._memory = memory
        self._lose = lose
        self._kind = kind
        self._reader = read
        self._keys = keys
        self._columns = columns
        self._common = common
        self._results: dict[int, ObjectResult] = {}

    def alone(self) -> list[ObjectResult]:
        """Fetch what is lacking by this rank, and return all results."""
        lacking = [n for n in range(len(self._keys)) if n not in self._results]
        self._fetch(lacking)
        return [self._results[n] for n in range(len(self._keys))]

    def together(self) -> list[ObjectResult]:
        """Fetch this rank's part, tell the others, and have their parts sent."""
        load, peers = self._load, self._peers
        number, load.num_calls = load.num_calls, load.num_calls + 1
        parts = cut_evenly(chosen_of(self._columns[1], self._common), peers.size)
        # In turns: a part may be empty, and others longer.
        turn = (load.number + number) % peers.size
        parts = parts[turn:] + parts[:turn]
        others = {
            self._common[place]
            for rank in range(peers.size)
            if rank != peers.rank
            for place in parts[rank]
        }
        failure: Exception | None = None
        mine = [n for n in range(len(self._keys)) if n not in others]
        try:
            self._fetch(mine)
        except Exception as error:  # noqa: BLE001  raised below, once the others know
            failure = error
            self._results |= dict.fromkeys(mine, ObjectResult(Outcome.FAILED, type(error).__name__))
        try:
            self._meet(number, parts)
        except PeersLost as error:
            self._lose(error)
            if error.still_arriving:  # not to be read into by anybody now
                lost = ObjectResult(Outcome.FAILED, STILL_ARRIVING)
                self._results |= dict.fromkeys(others, lost)
        if failure is not None:
            raise failure
        if not load.wanted():  # nobody looks at them
            given_up = ObjectResult(Outcome.FAILED, "GIVEN_UP")
            self._results = dict.fromkeys(others, given_up) | self._results
        return self.alone()

    def _fetch(self, which: Sequence[int]) -> None:
        if not which:
            return
        columns = [chosen_of(column, which) for column in self._columns]
        results = self._reader(chosen_of(self._keys, which), *columns)
        self._results |= dict(zip(which, results, strict=True))
        self._counts.fetched_bytes += self._fetched_bytes(which)

    def _fetched_bytes(self, which: Sequence[int]) -> int:
        return sum(
            self._columns[1][n] for n in which if self._results[n].outcome is Outcome.FETCHED
        )

    def _meet(self, number: int, parts: Sequence[range]) -> None:
        """Exchange parts with the other ranks, if they make this call too.

        Raises:
            PeersLost: a rank did not come.
        """
        load, peers = self._load, self._peers
        columns = [chosen_of(column, self._common) for column in self._columns]
        digest = digest_of(self._kind, chosen_of(self._keys, self._common), *columns)
        failures = {
            place: self._results[self._common[place]]
            for place in parts[peers.rank]
            if self._results[self._common[place]].outcome is not Outcome.FETCHED
        }
        agreed = peers.agree(
            load.number, number, Told(digest, failures).text(), are_same, load.wanted
        )
        if agreed.together:
            self._send([Told.of_text(text) for text in agreed.texts], parts)
            return
        if not agreed.texts or ENDED in agreed.texts:
            load.is_alone = bool(agreed.texts)
            self._counts.alone += 1
            return
        self._counts.differed += 1
        if not load.has_differed:
            log.warning(
                "call %d of load %d is not the same on all ranks: each reads by itself",
                number, load.number,
            )  # fmt: skip
        load.has_differed = True

    def _send(self, told: Sequence[Told], parts: Sequence[range]) -> None:
        """Have every rank's part sent to all, and take over what became of the objects in it."""
        counts, peers = self._counts, self._peers
        addresses, sizes = (chosen_of(column, self._common) for column in self._columns[:2])
        shares: list[tuple[int, list[torch.Tensor]]] = []
        received: dict[int, ObjectResult] = {}
        for rank, (each, part) in enumerate(zip(told, parts, strict=True)):
            came = [place for place in part if place not in each.failures]
            runs = runs_of(chosen_of(addresses, came), chosen_of(sizes, came))
            shares.append((rank, [self._memory(*run) for run in runs]))
            received |= {
                self._common[place]: each.failures.get(place, FETCHED)
                for place in part
                if rank != peers.rank
            }
        peers.send(shares)
        self._results |= received
        counts.shared += 1
        counts.received_bytes += self._fetched_bytes(list(received))
