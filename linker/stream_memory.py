"""The driver's stream memory operation that holds a stream until a number in memory is reached."""

import ctypes
from typing import Any, Protocol

from kvferry.errors import KVFerryError

LIBRARY = "libcuda.so.1"
CAN_FLUSH_REMOTE_WRITES = 98
CAN_USE_64_BIT_STREAM_MEM_OPS = 122
WAIT_GEQ = 0
WAIT_FLUSH = 1 << 30
"""Numbers of `CUdevice_attribute` and `CUstreamWaitValue_flags` in cuda.h."""


class StreamOperations(Protocol):
    """What `DeviceWait` needs of a driver.

    Attributes:
        reason: why it cannot be used; None if it can.
    """

    reason: str | None

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """Hold a stream's later work until the int64 at `address` is at least `value`.

        Nothing bounds this wait but the number itself.
        """


class StreamMemory:
    """`cuStreamWaitValue64` of one device, by ctypes.

    Attributes:
        reason: why it cannot be used; None if it can.
        flags: what each wait is given: "at least", and a flush of remote writes where there is one.
    """

    def __init__(self, device_index: int, library: Any = None) -> None:
        """Ask the driver what the device can.

        Args:
            device_index: CUDA's number of the device in this process.
            library: the driver's library; loaded by its name by default.
        """
        self.reason: str | None = None
        self.flags = WAIT_GEQ
        try:
            self._library = library if library is not None else ctypes.CDLL(LIBRARY)
            # The plain name would be the first version, which a newer driver may refuse.
            self._wait = self._library.cuStreamWaitValue64_v2
        except (OSError, AttributeError) as error:
            self.reason = f"the driver cannot be used: {error}"
            return
        device = ctypes.c_int()
        for name, arguments in (("cuInit", (0,)),
                                ("cuDeviceGet", (ctypes.byref(device), device_index))):  # fmt: skip
            status = getattr(self._library, name)(*arguments)
            if status:
                self.reason = f"{name} returned {status}, wanted 0"
                return
        if not self._attribute(device, CAN_USE_64_BIT_STREAM_MEM_OPS):
            self.reason = (
                f"device {device_index} reports no 64-bit stream memory operations "
                f"(attribute {CAN_USE_64_BIT_STREAM_MEM_OPS})"
            )
        # Refused where the device cannot, so it is asked for only where it can.
        if self._attribute(device, CAN_FLUSH_REMOTE_WRITES):
            self.flags |= WAIT_FLUSH

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """Hold a stream's later work until the int64 at `address` is at least `value`.

        Raises:
            KVFerryError: the driver refused.
        """
        status = self._wait(
            ctypes.c_void_p(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint64(value),
            ctypes.c_uint(self.flags),
        )
        if status:
            raise KVFerryError(f"cuStreamWaitValue64 returned {status}, wanted 0")

    def _attribute(self, device: ctypes.c_int, attribute: int) -> bool:
        value = ctypes.c_int()
        status = self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return status == 0 and value.value != 0
