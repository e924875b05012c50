"""A bar on stderr that says how far a long run is; a line now and then where it is no terminal."""

import sys
import time
from typing import TextIO

_WIDTH = 30
_LINE_EVERY_S = 30.0


class Progress:
    """Shows how many of a number of steps are done, and about how long the others will take.

    The estimate takes each step for as long as those before it were on average.
    """

    def __init__(self, num_steps: int, stream: TextIO = sys.stderr) -> None:
        """Begin; steps that need not be done are not counted."""
        self._num_steps = num_steps
        self._stream = stream
        self._done = 0
        self._begin_s = self._shown_s = time.monotonic()

    def step(self, what: str) -> None:
        """Count a step that is done, and say what the next one is."""
        self._done += 1
        self.show(what)

    def show(self, what: str) -> None:
        """Say what is being done."""
        now_s = time.monotonic()
        if self._stream.isatty():
            full = _WIDTH * self._done // max(self._num_steps, 1)
            bar = "#" * full + "." * (_WIDTH - full)
            self._stream.write(f"\r[{bar}] {self._told(now_s)}  {what:<60.60}\x1b[K")
        elif now_s - self._shown_s >= _LINE_EVERY_S:
            self._shown_s = now_s
            self._stream.write(f"{self._told(now_s)}  {what}\n")
        self._stream.flush()

    def end(self) -> None:
        """Take the bar away."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _told(self, now_s: float) -> str:
        left = "?"
        if self._done:
            left_s = (now_s - self._begin_s) / self._done * (self._num_steps - self._done)
            left = f"{int(left_s) // 60}:{int(left_s) % 60:02}"
        return f"{self._done}/{self._num_steps}, {left} left"
