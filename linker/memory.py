"""Memory that a transport can register: a GPU's, pinned host memory, or a CPU's."""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvferry.errors import ArgumentError, StoreError
from kvferry.linker.home import Home

PAGE_ALIGN_BYTES = 4096


def allocate(num_bytes: int, device: torch.device, memory: str) -> torch.Tensor:
    """Return uint8 `[num_bytes]`, its first byte at a multiple of 4096. The tensor owns it.

    Args:
        num_bytes: at least 1.
        device: of the pools that will be packed into it.
        memory: `device`, `pinned` or `cpu`; see `StagingBuffer`.

    Raises:
        ArgumentError: the memory does not fit the device.
        StoreError: the driver has not that much memory.
    """
    if memory == "device" and device.type == "cuda":
        return _driver_memory(num_bytes, device)
    if memory == "pinned" and device.type == "cuda":
        return _aligned(
            torch.empty(num_bytes + PAGE_ALIGN_BYTES, dtype=torch.uint8, pin_memory=True)
        )
    if memory == "cpu" and device.type == "cpu":
        # Zeroed, so that the system's page faults are paid here and not by the first transfer.
        return _aligned(torch.zeros(num_bytes + PAGE_ALIGN_BYTES, dtype=torch.uint8).zero_())
    wanted = "'device' or 'pinned'" if device.type == "cuda" else "'cpu'"
    raise ArgumentError(f"memory is {memory!r} for pools on {device}, wanted {wanted}")


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    skip = -tensor.data_ptr() % PAGE_ALIGN_BYTES
    return tensor[skip : tensor.numel() - PAGE_ALIGN_BYTES + skip]


class _DriverAllocation:
    """Memory of `cuMemAlloc`, shown to torch by the array interface, freed with its last tensor.

    Not from torch's allocator: with expandable segments its memory is mapped piece by piece, which
    RDMA registration of a whole range does not survive everywhere (Mooncake pull request 3538).
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        with _primary_context(device):
            code = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        if code:
            raise StoreError(
                f"cuMemAlloc of {num_bytes} bytes failed with CUDA error {code}", code=code
            )
        # At exit the driver frees it with the context; before that, with the last tensor.
        weakref.finalize(self, _free, Home("memory"), driver, address, device).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }


@contextmanager
def _primary_context(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the runtime makes its context current by use
        yield


def _free(home: Home, driver: ctypes.CDLL, address: ctypes.c_uint64, device: torch.device) -> None:
    if home.is_here:  # no driver works in a forked child
        with _primary_context(device):
            driver.cuMemFree_v2(address)


def _driver_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_DriverAllocation(num_bytes, device), device=device)


def flush_gpudirect(device: torch.device) -> None:
    """Make what a NIC has written to the GPU's memory visible to kernels launched after this.

    A completion on the host is not yet visibility on the device. Where the platform has no such
    flush it orders those writes itself.

    Raises:
        StoreError: the driver failed.
    """
    not_supported = 801
    with torch.cuda.device(device):
        # target: the current context; scope: its own device (cuda.h, CUflushGPUDirectRDMAWrites*)
        code = ctypes.CDLL("libcuda.so.1").cuFlushGPUDirectRDMAWrites(0, 100)
    if code not in (0, not_supported):
        raise StoreError(f"cuFlushGPUDirectRDMAWrites failed with CUDA error {code}", code=code)
