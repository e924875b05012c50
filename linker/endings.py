"""How things end that nobody has closed: they were dropped, or the interpreter exits.

At exit the latest ends first: a linker before its store, and that before the master and the owner
of this process. Nothing ends in a forked child, which has it from its parent.
"""

import atexit
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, TypeVar

from kvferry.errors import KVFerryError
from kvferry.linker.home import Home

log = logging.getLogger(__name__)

EXIT_S = 4.0
"""What all that is left open at exit may take together to finish what it is at."""

MadeT = TypeVar("MadeT")


class Ending(Generic[MadeT]):
    """The end of one thing, if nobody comes before it."""

    _left: ClassVar[dict[Any, None]] = {}  # in the order that they were made in

    def __init__(
        self,
        made: MadeT,
        *,
        at_exit: Callable[[MadeT, float], None] | None = None,
        dropped: Callable[[], object] = lambda: None,
        is_base: bool = False,
    ) -> None:
        """Watch over a thing from now on, without keeping it alive.

        Args:
            made: the thing.
            at_exit: ends it within so many seconds, when the interpreter exits.
            dropped: does what is left once nothing refers to it, and must not refer to it itself.
                Called wherever that comes out, in any thread and under any lock: it waits for none
                that another may hold.
            is_base: whether what is made later may need it. Then it ends, once dropped, behind all
                of that: a function's first variables are the first to go.
        """
        self._home = Home("an ending")
        self._made = weakref.ref(made)
        self._at_exit = at_exit
        self._dropped = dropped
        self._is_base = is_base
        self._is_dropped = False
        weakref.finalize(made, self._drop).atexit = False
        Ending._left[self] = None

    def cancel(self) -> None:
        """Do nothing any more: it was closed."""
        Ending._left.pop(self, None)
        self._end_bases()

    def _drop(self) -> None:
        self._is_dropped = True
        if not self._is_base:
            self._end()
        self._end_bases()

    def _end(self) -> None:
        if Ending._left.pop(self, self) is None and self._home.is_here:
            self._dropped()

    @classmethod
    def _end_bases(cls) -> None:
        """End what was dropped and that nothing is left of which was made later."""
        for ending in reversed(list(cls._left)):
            if not ending._is_dropped:
                return
            ending._end()

    def _exit(self, until_s: float) -> None:
        if not self._home.is_here:
            return
        made = self._made()
        try:
            if made is None:
                self._end()
            elif self._at_exit is not None:
                self._at_exit(made, max(0.0, until_s - time.monotonic()))
        except KVFerryError as error:
            log.warning("at exit: %s", error)

    @classmethod
    def _exit_all(cls) -> None:
        until_s = time.monotonic() + EXIT_S
        with ExitStack() as latest_first:  # all of them, whatever one raises
            for ending in list(cls._left):
                latest_first.callback(ending._exit, until_s)
        cls._left.clear()


atexit.register(Ending._exit_all)
