"""LocalProcess: a program for trials that goes when its handle does, and its log with it."""

import contextlib
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from kvferry.linker.endings import Ending
from kvferry.linker.home import Home
from kvferry.linker.process import Child

_LOG_TAIL_BYTES = 4000
_EXIT_S = 1.0  # then it is killed: nothing that it holds is of use any more

LocalT = TypeVar("LocalT", bound="LocalProcess")


class LocalProcess:
    """What a master and an owner for trials have in common. A context manager, or `start`, `stop`.

    Attributes:
        log_path: what the program wrote. Removed by `stop()`, else with this object or process,
            in whatever way that ends; of a failed start the error quotes its end.
    """

    def __init__(self, name: str) -> None:
        """Describe a program; nothing runs yet."""
        self._home = Home(f"the {name}")
        self.log_path = Path(tempfile.gettempdir()) / f"kvferry-{name}-{secrets.token_hex(6)}.log"
        self._running = _Running(self.log_path)
        # Not by `start`: a master that was started again still ends behind its clients.
        Ending(self, at_exit=LocalProcess._end_at_exit, dropped=self._running.end, is_base=True)

    @property
    def running(self) -> bool:
        """Whether the program is alive."""
        self._home.check()
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int | None:
        """The program's process id, None while none runs; a stopped (SIGSTOP) one counts."""
        return self._child.pid if self._child is not None else None

    def start(self: LocalT) -> LocalT:
        """Start the program and wait until it serves; while it runs already, do nothing.

        Raises:
            StoreError: it did not come to that; the end of its log is in the message.
        """
        if not self.running:
            self._start()
        return self

    def kill(self) -> None:
        """Kill the program as a crash would; what it held is lost. `start()` may follow."""
        self._home.check()
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """End the program and remove its log. Repeating it does nothing."""
        self._home.check()
        self._running.end()

    def __enter__(self: LocalT) -> LocalT:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._home.is_here:
            self.stop()

    @property
    def _child(self) -> Child | None:
        return self._running.child

    def _start(self) -> None:
        """Start it, and `_adopt` it once it serves."""
        raise NotImplementedError

    def _adopt(self, child: Child) -> None:
        self._running.child = child

    def _child_of(
        self,
        command: Sequence[str],
        *,
        stdout: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a program that writes to the log; also its output, unless `stdout` says where."""
        with self.log_path.open("ab") as log:
            out: int | IO[bytes] = log if stdout is None else stdout
            return Child(command, stdout=out, stderr=log, env=env, log_path=self.log_path)

    @property
    def _log_end(self) -> str:
        """What the log ends with, for an error message."""
        if not self.log_path.exists():
            return "it wrote no log"
        end = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return f"its log ends:\n{end}"

    def _end_at_exit(self, timeout_s: float) -> None:
        self._running.end(_EXIT_S)


class _Running:
    """A program that may run, and its log: what outlives the object by a moment."""

    def __init__(self, log_path: Path) -> None:
        self.child: Child | None = None
        self._log_path = log_path

    def end(self, timeout_s: float | None = None) -> None:
        child, self.child = self.child, None
        try:
            if child is not None:
                child.stop() if timeout_s is None else child.stop(timeout_s)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._log_path.unlink()
