"""An engine's program from the outside: JSON lines, a limit for each, no process left behind."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

END_LIMIT_S = 30.0
"""From the order to end until the program is killed."""


class EngineError(Exception):
    """The program ended, or gave no answer in time; the message says where its log is."""


class EngineProcess:
    """A running engine. A context manager: leaving it ends the program and all it started.

    Attributes:
        log_path: what the program writes to standard error.
    """

    def __init__(
        self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> None:
        """Start the program in a session of its own.

        Args:
            command: program and arguments.
            log_path: appended to.
            environment: added to this process's own.
        """
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._received = b""

    def order(self, content: Mapping[str, Any]) -> None:
        """Send an order; `answer` waits for what comes of it.

        Raises:
            EngineError: the program has ended.
        """
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(content).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"the engine has ended; its log is {self.log_path}") from error

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next line.

        Raises:
            EngineError: none came in time, or the program has ended. It is killed.
        """
        output = self._popen.stdout
        assert output is not None
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([output], [], [], left_s)
            part = os.read(output.fileno(), 1 << 16) if ready else b""
            if not part:
                self.kill()
                what = "ended" if ready else f"gave no answer within {limit_s:g} s"
                raise EngineError(f"the engine {what}; its log is {self.log_path}")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        content: dict[str, Any] = json.loads(line)
        return content

    def ask(self, content: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send an order and return its answer; as `order` and `answer`."""
        self.order(content)
        return self.answer(limit_s)

    def end(self) -> None:
        """Let the engine shut down, then see that nothing of it is left."""
        with contextlib.suppress(EngineError):
            self.order({"do": "end"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the program and all it started. Repeating it does nothing."""
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        else:
            self.kill()
