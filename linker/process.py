"""Starts a program that never outlives its parent, however the parent ends.

A small supervisor (this file, run as a script) sits between the two and holds the reading end of a
pipe from the parent. When the parent goes, SIGKILL included, the pipe ends and the supervisor ends
the program; when the supervisor itself is killed, the kernel kills the program. The kernel's
parent-death signal alone would not do: it fires when the *thread* that started the program ends.

Linux only; imports nothing outside the standard library.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_TERM_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_PARENT_CHECK_MS = 1000  # a forked sibling may hold the pipe open: look at the parent itself too


class Child:
    """A running program; the handle its parent keeps. Dropping the handle ends the program too."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        """Start `command`, its standard input empty, in a process group of its own.

        Args:
            command: program and arguments.
            stdout: as in `subprocess.Popen`.
            stderr: as in `subprocess.Popen`.
            env: the whole environment; this process's own when None.
            log_path: a file that goes with the program, where this process ends before it.
        """
        self.command = list(command)
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                __file__,
                str(os.getpid()),
                str(log_path or ""),
                "--",
                *self.command,
            ],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=None if env is None else dict(env),
            start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle
        )

    @property
    def stdout(self) -> IO[bytes] | None:
        """The program's output, when `stdout=subprocess.PIPE` was asked for."""
        return self._popen.stdout

    @property
    def pid(self) -> int | None:
        """The program's process id; None before it was started, or after it ended."""
        supervisor = self._popen.pid
        try:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return int(children[0]) if children else None

    def poll(self) -> int | None:
        """Return the exit status, 128 + n after signal n; None while the program runs."""
        return self._popen.poll()

    def stop(self, timeout_s: float = _TERM_GRACE_S + 3.0) -> int:
        """Ask the program to end (SIGTERM, SIGKILL 5 s later), and return its exit status."""
        return self._end(b"t", timeout_s)

    def kill(self, timeout_s: float = 5.0) -> int:
        """Kill the program (SIGKILL), as a crash would, and return its exit status."""
        return self._end(b"k", timeout_s)

    def _end(self, order: bytes, timeout_s: float) -> int:
        pipe = self._popen.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # ended on its own already
            if not pipe.closed:
                pipe.write(order)  # closing it says nothing where a forked child has it open too
            pipe.close()
        try:
            status = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # the kernel then kills the program
            status = self._popen.wait(timeout_s)
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        return status


def _die_with_supervisor(supervisor: int) -> None:
    """In the forked program, before exec: die when the supervisor does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the line above
        os._exit(1)


def _supervise(parent: int, log_path: str, command: list[str]) -> int:
    """Run `command` until it ends or the parent wants it to or is gone; return its status.

    Where the parent is gone the log goes too; else that is the parent's to do.
    """
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: received.append(got))
    signal.signal(signal.SIGCHLD, lambda _got, _frame: None)  # only to wake the poll below
    supervisor = os.getpid()
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _die_with_supervisor(supervisor),
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)  # noqa: T201
        return 127
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(wake_out, select.POLLIN)
    kill_at_s = float("inf")
    ending, was_told = False, False
    while program.poll() is None:
        for descriptor, _event in poller.poll(200 if ending else _PARENT_CHECK_MS):
            order = os.read(descriptor, 64)
            if descriptor == 0:
                poller.unregister(0)
                was_told = bool(order)
                received.append(signal.SIGKILL if order == b"k" else signal.SIGTERM)
        if os.getppid() != parent:
            received.append(signal.SIGTERM)
        if signal.SIGKILL in received or time.monotonic() > kill_at_s:
            program.kill()
        elif received and not ending:
            ending = True
            kill_at_s = time.monotonic() + _TERM_GRACE_S
            program.terminate()
    if log_path and received and not was_told:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(log_path)
    status = program.returncode
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[2], sys.argv[4:]))
