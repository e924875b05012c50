"""Runs a command with a bound: when its time is up, its whole process group is killed."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KILL_S = 5.0
"""How long a killed process may take to go; one that hangs in a driver may never."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit status; negative is a signal's number; None if it would not even die.
        seconds: how long it ran.
        timed_out: whether its time was up.
    """

    code: int | None
    seconds: float
    timed_out: bool

    @property
    def text(self) -> str:
        """The end in words."""
        if self.code is None:
            return "does not die: it may hang in the GPU's driver"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"


def run_bounded(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]
) -> Ended:
    """Run a command in a process group of its own, its output in `log`; leave nothing running.

    Args:
        command: program and arguments.
        log: is written anew.
        limit_s: after so long the group is killed.
        environment: all of it.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also when whoever runs this is interrupted
            # What the process started is in its group, and is still there when it has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_S)
    return Ended(process.poll(), time.monotonic() - begin, timed_out)
