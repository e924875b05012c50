"""The few words by which failures are counted, and how a reason in full maps to one of them."""

CAUSES = (
    "missing",  # no such object, or evicted
    "lease expired",  # its bytes came too late to be trusted
    "no space",  # the store is full
    "pending",  # another writer has the key open
    "wrong size",
    "corrupted",
    "foreign",  # no kvferry object, another layout's, or another key's
    "other format",
    "transport",  # the store moved no bytes: an owner is gone, frozen or cut off
    "session too old",
    "session lost",  # the master was away, or another client took the key over
    "incomplete",  # not every byte of the object was written
    "cancelled",
    "deadline",
    "busy",  # too many transfers in flight already
    "staging",  # no span came free in time
    "unavailable",  # the master does not answer
    "closed",
    "thread",  # the thread at work on it died
    "other",
)
"""Every value of `TransferFailed.cause`, and of the label `cause` in a linker's counters."""

# The store's own words, which stand in brackets behind an outcome.
_OF_CODE = {
    "SESSION_TOO_OLD": "session too old",
    "SESSION_LOST": "session lost",
    "ILLEGAL_CLIENT": "session lost",
    "INCOMPLETE": "incomplete",
    "REVOKED": "cancelled",
    "SHORT_WRITE": "incomplete",
    "TRANSFER_FAIL": "transport",
    "RPC_FAIL": "unavailable",
    "RPC_TIMEOUT": "unavailable",
}

# How reasons begin that are one of the words, with more behind it.
_STARTS = ("missing", "lease expired", "no space", "pending", "wrong size", "corrupted", "foreign",
           "other format")  # fmt: skip

# In this order: a message may hold another one, as "... was cancelled, and its pages ...".
_PARTS = (
    ("was cancelled", "cancelled"),
    ("not done within", "deadline"),
    ("no span of", "staging"),
    ("does not answer", "unavailable"),
    ("cannot be reached", "unavailable"),
    ("nobody listens", "unavailable"),
    ("linker is closed", "closed"),
    ("linker was closed", "closed"),
    ("store is closed", "closed"),
    ("thread died", "thread"),
)


def cause_of(reason: str) -> str:
    """Return the word of `CAUSES` for a reason as the linker words it; `other` for an unknown one.

    Args:
        reason: of an object, for example `failed (SESSION_TOO_OLD)`, or the message of a transfer.
    """
    if reason in CAUSES:
        return reason
    _, bracket, code = reason.rpartition("(")
    if bracket and code.endswith(")") and code[:-1] in _OF_CODE:
        return _OF_CODE[code[:-1]]
    for word in _STARTS:
        if reason.startswith((f"{word}:", f"{word} (")):
            return word
    return next((word for part, word in _PARTS if part in reason), "other")
