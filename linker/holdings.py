"""What the threads of a linker hold together, and let go of when the last of them has ended."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from kvferry.errors import KVFerryError
from kvferry.linker.counter_sets import CounterSets
from kvferry.linker.direct import DirectSaver
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.wire import Wire

log = logging.getLogger(__name__)


class Holdings:
    """Registrations, counters, wires. Whoever closes the linker lets go of them, else the threads.

    Attributes:
        is_left: whether nobody waits for the threads' end, so that the last one lets go.
    """

    def __init__(
        self,
        staging: StagingBuffer,
        wires: Sequence[Wire],
        counters: CounterSets,
        direct: DirectSaver | None,
        sharing: SharedReads | None,
    ) -> None:
        """Hold it all; no thread has begun yet."""
        self._is_gone = False
        self.is_left = False
        self._staging = staging
        self._wires = wires
        self._counters = counters
        self._direct = direct
        self._sharing = sharing
        self._num_threads = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count one more thread."""
        with self._lock:
            self._num_threads += 1

    def end(self) -> None:
        """Count one less; called by it, at its end."""
        with self._lock:
            self._num_threads -= 1
            is_last = self._num_threads == 0
        if is_last and self.is_left:
            try:
                self.let_go()
            except KVFerryError as error:
                log.error("a linker that was left open: %s", error)

    def leave(self) -> None:
        """Let go once the last thread has ended, which may be so already."""
        self.is_left = True
        with self._lock:
            is_last = self._num_threads == 0
        if is_last:
            self.let_go()

    def let_go(self) -> None:
        """Let go of everything; no thread may be left. Idempotent, from any thread.

        Raises:
            KVFerryError: the store refused; the rest was let go.
        """
        with self._lock:
            if not self._is_gone:  # staging may be another linker's by now
                self._let_go()
                self._is_gone = True

    def _let_go(self) -> None:
        with ExitStack() as each:  # all of it, the last first
            if self._sharing is not None:
                each.callback(self._sharing.close)
            each.callback(self._staging.unregister)
            if self._direct is not None:
                each.callback(self._direct.close)
            each.callback(self._counters.close)
            for wire in self._wires:
                each.callback(wire.close)
