"""Threads that sit in store calls for one direction, so that kernels are launched meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvferry.errors import TransferFailed

ResultT = TypeVar("ResultT")


class Wire:
    """A few threads for store calls. Every call has the store's own bound, so they end.

    More than two gain nothing over TCP: one client moves no more bytes with four.
    """

    def __init__(self, name: str, num_threads: int, begin: Callable[[], None]) -> None:
        """Make the pool; `begin` is called first in each thread."""
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=begin)

    def call(self, work: Callable[[], ResultT]) -> "Future[ResultT]":
        """Have something done by a thread.

        Raises:
            TransferFailed: the threads have ended, or could not begin.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise TransferFailed(f"{self._name}: {error}", cause="thread") from error

    def close(self) -> None:
        """End the threads after the calls that they are in."""
        self._pool.shutdown(wait=False)
