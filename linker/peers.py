"""Ranks that hold the same objects: they agree on what they do together, and send bytes on.

What they tell goes through the key-value store under their process group, not through collectives:
a rank that never comes, or comes late, is noticed without breaking anything. Only bytes travel by
collectives, and only once every rank has said that it is there.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from kvferry.errors import ArgumentError, KVFerryError, TransferFailed
from kvferry.linker.home import Home
from kvferry.linker.memory import flush_gpudirect
from kvferry.linker.streams import Fence, Lane
from kvferry.linker.wire import Wire

_DECISION, _SEND, _ALONE = "decision", "send", "alone"
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 5e-3
_GRACE_S = 1.0
"""For the store's answers, beyond what ranks may wait for each other."""


class PeersLost(KVFerryError):
    """A rank did not come in time, or cannot be reached.

    Attributes:
        still_arriving: whether bytes may still be written to memory that was to be received into.
    """

    def __init__(self, message: str, *, still_arriving: bool = False) -> None:
        super().__init__(message)
        self.still_arriving = still_arriving


@dataclass(frozen=True)
class Agreement:
    """What ranks agreed on.

    Attributes:
        texts: what each of them told, by rank; empty if not all of them did.
        together: whether all go on together; the same on all that return from `Peers.agree`.
    """

    texts: Sequence[str]
    together: bool


class Peers:
    """This rank among those that share reads.

    `agree` and `send` are for one thread at a time, `tell` and `forget` for any.

    Its process group stays until the process ends: torch gives the name of one that was destroyed
    to the next, which would then find old addresses under it.

    Attributes:
        rank: this one, counted within the group.
        size: how many ranks.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(
        self, ranks: Sequence[int], memory: torch.device, *, timeout_s: float = 15.0
    ) -> None:
        """Make a process group of their own; all of the ranks call this at the same time.

        Args:
            ranks: of torch.distributed's default group, this process's among them; the same list
                everywhere.
            memory: where the bytes are that travel: a CPU (gloo) or a GPU (NCCL).
            timeout_s: a few seconds more than the slowest call of the store.

        Raises:
            ArgumentError: a timeout that is not positive, or this torch's groups show no store.
            PeersLost: the others did not come.
        """
        if timeout_s <= 0:
            raise ArgumentError(f"timeout_s is {timeout_s}, wanted a positive number")
        self.timeout_s = timeout_s
        self._home = Home("the group of ranks that share reads")
        self._lane = Lane(memory)
        self._device = memory
        # NCCL's own limit ends the process; ours comes first, and ends the sharing.
        limit = timedelta(seconds=timeout_s) if memory.type == "cpu" else None
        try:
            self._group = dist.new_group(
                list(ranks),
                backend="gloo" if memory.type == "cpu" else "nccl",
                timeout=limit,
                use_local_synchronization=True,
            )
            if not hasattr(self._group, "get_group_store"):
                raise ArgumentError(
                    f"torch {torch.__version__} shows no store under a process group, wanted one "
                    "whose ProcessGroup has get_group_store"
                )
            # A connection of its own: a wait on the engine's would hold the engine up.
            self._store = self._group.get_group_store().clone()
            self.rank, self.size = dist.get_rank(self._group), len(ranks)
            self.send([(0, [torch.zeros(1, dtype=torch.uint8, device=memory)])])  # connects them
        except RuntimeError as error:
            raise PeersLost(f"ranks {list(ranks)} do not come together: {error}") from error
        # A store that hangs, with the process that it lives in, hangs this thread alone.
        self._wire = Wire("kvferry-peers", 1, lambda: None)

    def tell(self, load: int, call: int, text: str) -> None:
        """Tell the others something in the place of a call; waits for nothing.

        A store that cannot be reached shows at the next `agree`.
        """
        self._later(partial(self._store.set, self._key(load, call, self.rank), text))

    def agree(
        self,
        load: int,
        call: int,
        text: str,
        are_same: Callable[[Sequence[str]], bool],
        wanted: Callable[[], bool],
    ) -> Agreement:
        """Tell the others something, wait for what they tell, and agree on whether to go together.

        Args:
            load: a number.
            call: its number in the load.
            text: what this rank tells.
            are_same: whether what all ranks tell lets them go together; the same everywhere.
            wanted: asked now and then while waiting; once it says no, all go alone.

        Raises:
            PeersLost: a rank did not come in time, or the store cannot be reached; the ranks that
                return go alone.
        """
        gone: list[bool] = []  # holds something once nobody waits for the answer any more

        def work() -> Agreement:
            return self._agree(load, call, text, are_same, lambda: not gone and wanted())

        try:
            return self._wire.call(work).result(self.timeout_s + _GRACE_S)
        except NotInTime:
            gone.append(True)
            raise PeersLost(f"the ranks' store hangs, for {self.timeout_s:g} s by now") from None
        except (RuntimeError, TransferFailed) as error:
            raise PeersLost(f"the ranks' store does not answer: {error}") from error

    def forget(self, load: int, num_calls: int) -> None:
        """Take back what this rank told about a load of long ago; waits for nothing."""

        def work() -> None:
            for call in range(num_calls):
                self._store.delete_key(self._key(load, call, self.rank))
                if call % self.size == self.rank:
                    self._store.delete_key(self._key(load, call, _DECISION))

        self._later(work)

    def send(self, shares: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Bring every rank the bytes that one has; all ranks call this with the same shapes.

        Returns once they are here: for a GPU's memory once the GPU has done it.

        Args:
            shares: (rank that has them, contiguous uint8 tensors), the same on every rank but for
                the addresses.

        Raises:
            PeersLost: a rank broke off. What the tensors hold is undefined, and on a GPU they may
                still be written.
        """
        self._home.check()
        if self._device.type == "cuda":
            flush_gpudirect(self._device)  # what a NIC has written is for a kernel to read now
        try:
            # Nothing else touches the spans: the caller holds them, and no kernel works on them.
            with self._lane.work(Fence()) as fences:
                for rank, tensors in shares:
                    for tensor in tensors:
                        dist.broadcast(tensor, group=self._group, group_src=rank)
        except RuntimeError as error:
            still = self._device.type == "cuda"  # some may be under way; gloo has let go of them
            raise PeersLost(f"bytes were not sent: {error}", still_arriving=still) from error
        if not fences[-1].wait(self.timeout_s):
            raise PeersLost(f"bytes were not sent within {self.timeout_s:g} s", still_arriving=True)

    def close(self) -> None:
        """Tell no more; what was told before is still sent. Does not wait."""
        self._wire.close()

    def _later(self, work: Callable[[], object]) -> None:
        try:
            self._wire.call(work)
        except TransferFailed:  # closed: nobody is there to be told
            return

    # ---- in the wire's thread ----

    def _agree(
        self,
        load: int,
        call: int,
        text: str,
        are_same: Callable[[Sequence[str]], bool],
        wanted: Callable[[], bool],
    ) -> Agreement:
        self._store.set(self._key(load, call, self.rank), text)
        late = ""
        texts = None
        try:
            texts = self._texts(load, call, wanted)
        except TimeoutError as error:
            late = str(error)
        if texts is None:
            # Not without a word: the others may think that all go, and wait in a broadcast.
            if self._decide(load, call, _ALONE) == _SEND:
                return Agreement(self._texts(load, call, lambda: True) or (), True)
            if late:
                raise PeersLost(late)
            return Agreement((), False)
        return Agreement(texts, are_same(texts) and self._decide(load, call, _SEND) == _SEND)

    def _texts(self, load: int, call: int, wanted: Callable[[], bool]) -> list[str] | None:
        """Wait for what every rank tells; None if it is not wanted, or all are to go alone.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        keys = [self._key(load, call, rank) for rank in range(self.size)]
        begin_s = time.monotonic()
        while not self._store.check(keys):
            if self._store.check([self._key(load, call, _DECISION)]) or not wanted():
                return None
            waited_s = time.monotonic() - begin_s
            if waited_s > self.timeout_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(f"ranks {missing} did not come within {self.timeout_s:g} s")
            time.sleep(min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, waited_s / 8)))
        return [bytes(text).decode() for text in self._store.multi_get(keys)]

    def _decide(self, load: int, call: int, word: str) -> str:
        """Propose something, and return what was decided: the first proposal of any rank.

        A rank that has waited too long and one that came too late so do the same thing.
        """
        return bytes(self._store.compare_set(self._key(load, call, _DECISION), "", word)).decode()

    def _key(self, load: int, call: int, what: int | str) -> str:
        return f"kvferry/{load}/{call}/{what}"
