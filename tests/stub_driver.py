"""A driver for Triton that compiles for sm_90 and launches nothing; made active by its import.

For processes of their own, without TRITON_INTERPRET. `calls` holds what each launch was given.
"""

import contextlib
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

calls: list[tuple[Any, ...]] = []


class Launcher:
    """Notes a launch, between the hooks, as the real one does it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        launch_metadata, enter, leave = arguments[6:9]
        if enter is not None:
            enter(launch_metadata)
        calls.append(arguments)
        if leave is not None:
            leave(launch_metadata)


class Utils:
    """What Triton asks of a device."""

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return (0, 0, 32, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class StubDriver(DriverBase):
    """One H100, as far as compiling goes."""

    launcher_cls, utils = Launcher, Utils()

    def __init__(self) -> None:
        self.get_current_stream = lambda device: 77

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("no GPU")


triton.runtime.driver.set_active(StubDriver())
torch.cuda.device = lambda device: contextlib.nullcontext()
