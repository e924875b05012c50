"""Every exception that kvferry raises on purpose.

Each message names the argument, what came and what was wanted. Nothing has been launched or
written when an `ArgumentError` or a `LayoutError` is raised.
"""

from collections import Counter

from kvferry.causes import cause_of


class KVFerryError(Exception):
    """Base of all of kvferry's own exceptions."""


class ArgumentError(KVFerryError, ValueError):
    """An argument of a call is wrong; nothing was launched or written."""


class LayoutError(ArgumentError):
    """Pools that cannot be described as a layout, or a tensor that does not fit its pool."""


class StagingTimeout(KVFerryError, TimeoutError):
    """No span of the staging buffer came free within the deadline."""


class ForkedProcess(KVFerryError):
    """What was called was made in a process that this one was forked from; it works only there."""


class StoreError(KVFerryError, RuntimeError):
    """The store refused or failed a whole call.

    Attributes:
        code: the store's own number, 0 where the failure is not a return code of the store.
        code_name: the number's name in the store's sources, for example `RPC_FAIL`.
    """

    def __init__(self, message: str, *, code: int = 0, code_name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.code_name = code_name


class StoreUnavailable(StoreError):
    """The store's master cannot be reached; calls fail at once until a probe finds it again."""


class StoreClosed(StoreError):
    """The store was closed, or is closing."""


class TransferFailed(KVFerryError):
    """A save or load did not complete; `causes` holds a reason for each failed key.

    Attributes:
        causes: object key to reason. Empty when the transfer failed as a whole.
        cause: a word of `kvferry.causes.CAUSES`: why, short enough to be counted by.
    """

    def __init__(
        self, message: str, causes: dict[str, str] | None = None, *, cause: str = ""
    ) -> None:
        """Make the error.

        Args:
            message: what happened, for a person.
            causes: object key to reason.
            cause: the word; by default that of the most objects in `causes`, else the message's.
        """
        super().__init__(message)
        self.causes: dict[str, str] = dict(causes or {})
        words = Counter(cause_of(reason) for reason in self.causes.values())
        self.cause = cause or (words.most_common(1)[0][0] if words else cause_of(message))
