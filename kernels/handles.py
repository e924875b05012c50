"""Compiled kernels by a cached handle: 2 µs a launch, where `kernel[grid]` takes 11."""

import threading
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction

# The interpreter patches the language while it runs: two launches at once disturb each other.
_interpreter = threading.Lock()
_handles: dict[tuple[Any, ...], Any] = {}


def is_interpreted(kernel: Any) -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1, and so runs on CPU tensors."""
    return isinstance(kernel, InterpretedFunction)


def has_hooks() -> bool:
    """Whether a profiler wants to know of launches."""
    # A chain of hooks in Triton 3.6; one that knows no `calls` is called.
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return leave is not None and bool(getattr(leave, "calls", True))


class Launch(NamedTuple):  # made in 0.2 µs, where a frozen dataclass takes 1.5
    """One launch of one kernel, ready to start: all that the host has to compute.

    Every run-time argument is an integer whose width the kernel's annotations fix, and none is
    specialised, so one compilation serves every launch with the same constants.

    Attributes:
        kernel: a `@triton.jit` function whose parameters are `arguments`, then `constants`.
        grid: programs along both axes.
        arguments: the run-time arguments, in order.
        constants: the compile-time ones, in order.
        num_warps: warps per program.
    """

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[int, ...]
    constants: tuple[int, ...]
    num_warps: int

    def start(self, device: torch.device) -> None:
        """Start on the current stream of `device`, compiling on the first use of the constants.

        An interpreted kernel runs here and now, on CPU memory.
        """
        kernel, grid, arguments, constants, num_warps = self
        if is_interpreted(kernel):
            with _interpreter:
                kernel[grid](*arguments, *constants, num_warps=num_warps)
            return
        # By the plain function: the hash of what Triton wraps it in takes longer than all of this.
        key = (kernel.fn, device.index, num_warps, constants)
        with torch.cuda.device(device):
            handle = _handles.get(key)
            if handle is None:
                handle = kernel.warmup(*arguments, *constants, grid=(1,), num_warps=num_warps)
                _handles[key] = handle
            if has_hooks():
                handle[(*grid, 1)](*arguments, *constants)
                return
            # What the line above comes to, less what is prepared for hooks alone: half of its time.
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            handle.run(
                *grid, 1, stream, handle.function, handle.packed_metadata, None, None, None,
                *arguments, *constants,
            )  # fmt: skip
