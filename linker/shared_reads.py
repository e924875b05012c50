"""Reads that ranks share: each fetches a part of the objects, and sends it on to the others.

Where index spaces are equal on every tensor-parallel rank (MLA, DSA, DeepSeek-V4), each rank would
else fetch the same objects. Here a store call of N ranks is cut into N parts of about as many
bytes; each rank fetches one, so that all NICs work, and then every part travels from its rank's
staging to the others' by one contiguous broadcast (NCCL between GPUs, gloo between CPUs).

**A call.** Ranks count loads and calls alike. A rank fetches its part at once, and then tells the
others a digest of the whole call (keys, sizes, offsets, addresses relative to the first) and which
objects it could not have. It waits for the same from them. If all digests agree the bytes are sent,
and all ranks return the same results, so that they take the same branches after it: a failed object
is failed on all. If digests differ each rank fetches the rest by itself; the next call tries again.
Objects of other index spaces, states for one, are fetched by each rank in the same call.

**Who gives up.** At its end, or when it is given up, a load says so in the place of its next call.
The others see that in place of a digest, and read the rest of the load alone, without a wait. A
load that does not begin on a rank says it too (`SharedReads.skip`). A rank whose load is given up
while it waits goes on at once.

**Who is lost.** A rank that says nothing holds up the others for `Peers.timeout_s`, once: then this
rank shares no more reads for good, with an error in the log, and reads by itself what it lacks. A
store's call that takes longer than that counts as lost. A rank that is killed while bytes are sent
is noticed at once by gloo. For NCCL the same bound holds here, but NCCL ends the whole process
some minutes later, as it does for the model's own communication.

Not run on a GPU so far: the tests send bytes by gloo.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

import torch

from kvferry.arguments import one_of, sequence, whole_number
from kvferry.errors import ArgumentError
from kvferry.linker.home import Home
from kvferry.linker.peers import Peers, PeersLost
from kvferry.linker.shared_call import Counts, LoadState, Reader, SharedCall
from kvferry.linker.shared_parts import ENDED
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import GetSession, ObjectResult, Store
from kvferry.pools import SPACES

log = logging.getLogger(__name__)

KEPT_LOADS = 8
"""What was told of a load stays for that many more, for ranks that are late."""


class SharedReads:
    """What loads of one linker share with those of other ranks. Safe from any thread.

    Attributes:
        counts: what became of them.
        is_lost: whether no reads are shared any more.
    """

    def __init__(self, peers: Peers, staging: StagingBuffer, spaces: Collection[str]) -> None:
        """Share reads.

        Args:
            peers: the ranks.
            staging: where all reads go to.
            spaces: index spaces whose objects are equal on all of the ranks.
        """
        self.counts = Counts()
        self._home = Home("what shares reads")
        self._peers = peers
        self.is_lost = False
        self._staging = staging
        self._spaces = frozenset(
            one_of("spaces", space, SPACES) for space in sequence("spaces", spaces, "index spaces")
        )
        self._told: deque[tuple[int, int]] = deque()  # loads, and how many calls each has
        # Calls are made one after the other: bytes must be sent in the same order everywhere.
        self._calling = threading.Lock()

    def begin(self, number: int, store: Store, wanted: Callable[[], bool]) -> "SharedLoad":
        """Return what one load reads through; leaving it ends the load for the other ranks.

        Args:
            number: of the load, counted alike by all ranks; each but once.
            store: what is read.
            wanted: whether the load goes on; asked from several threads.
        """
        self._home.check()
        return SharedLoad(self, whole_number("number", number, 0), store, wanted)

    def skip(self, number: int) -> None:
        """Say that a load does not take place on this rank; does not wait."""
        self.end(whole_number("number", number, 0), 0)

    def close(self) -> None:
        """Share no more reads. No load may be in flight."""
        self._home.check()
        self.is_lost = True
        self._peers.close()

    # ---- for loads and their calls ----

    def call(
        self,
        load: LoadState,
        kind: str,
        read: Reader,
        keys: Sequence[str],
        columns: Sequence[Sequence[int]],
    ) -> list[ObjectResult]:
        """Make a call, together with the other ranks if they make the same.

        Raises:
            ArgumentError: an address outside staging; nothing was read.
            StoreError: as `read`.
        """
        self._home.check()
        for address, num_bytes in zip(*columns[:2], strict=True):
            self._check_address(address, num_bytes)
        with self._calling:
            common = [n for n, key in enumerate(keys) if key.rpartition("/")[2] in self._spaces]
            call = SharedCall(
                self._peers, load, self.counts, self._memory, self._lose,
                kind, read, keys, columns, common,
            )  # fmt: skip
            if common and not self.is_lost and not load.is_alone:
                return call.together()
            self.counts.alone += bool(common)
            return call.alone()

    def end(self, number: int, num_calls: int) -> None:
        """Say that no call follows in a load, and tidy up behind older ones."""
        self._home.check()
        self._peers.tell(number, num_calls, ENDED)  # also by one that is lost: nobody waits for it
        self._told.append((number, num_calls + 1))
        if len(self._told) > KEPT_LOADS:
            self._peers.forget(*self._told.popleft())

    def _check_address(self, address: int, num_bytes: int) -> None:
        offset = address - self._staging.address
        if not 0 <= offset <= offset + num_bytes <= self._staging.num_bytes:
            raise ArgumentError(
                f"addresses has {address:#x} for {num_bytes} bytes, wanted some in staging: "
                f"{self._staging.num_bytes} bytes at {self._staging.address:#x}"
            )

    def _memory(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a part of staging, uint8 `[num_bytes]`."""
        offset = address - self._staging.address
        return self._staging.tensor[offset : offset + num_bytes]

    def _lose(self, error: PeersLost) -> None:
        """Share no reads from now on."""
        if not self.is_lost:
            self.is_lost = True
            log.error("reads are not shared any more, this rank reads by itself: %s", error)


class SharedLoad:
    """One load's reads. A context manager that ends it."""

    def __init__(
        self, shared: SharedReads, number: int, store: Store, wanted: Callable[[], bool]
    ) -> None:
        self._shared = shared
        self._state = LoadState(number, wanted)
        self._store = store
        if shared.is_lost:  # the others need not wait for it
            shared.end(number, 0)

    def get_session(self, keys: Sequence[str]) -> GetSession:
        """Open objects for reading in ranges; each rank holds all of them. As `Store`."""
        return _SharedSession(self._state, self._shared, self._store.get_session(keys))

    def get(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[ObjectResult]:
        """Read whole objects; as `Store`."""
        return self._shared.call(self._state, "get", self._store.get, keys, (addresses, sizes))

    def __enter__(self) -> "SharedLoad":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say that the load is over here; does not wait."""
        self._shared.end(self._state.number, self._state.num_calls)


class _SharedSession:
    """A get session whose reads are shared."""

    def __init__(self, load: LoadState, shared: SharedReads, session: GetSession) -> None:
        self._load = load
        self._shared = shared
        self._session = session

    def start_results(self) -> list[ObjectResult]:
        return self._session.start_results()

    def read(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[ObjectResult]:
        columns = (addresses, sizes, offsets)
        return self._shared.call(self._load, "read", self._session.read, keys, columns)

    def longer(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        return self._session.longer(keys, sizes)

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> "_SharedSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
