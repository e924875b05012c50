"""The end of a stored object: what it is, whose it is, and the checksum of its payload.

64 bytes behind the payload, at a multiple of 16: format version, payload size, fingerprint of the
layout, digest of the object's key, checksum. So an object of another format, layout or key, or with
a changed byte, is told from a good one before any of its bytes is used.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import FORMAT_VERSION

TRAILER_BYTES = 64
_ALIGN_BYTES = 16
_MAGIC = b"KVFERRY"
_FIELDS = np.dtype([
    ("magic", "S8"),
    ("format_version", "<u4"),
    ("trailer_bytes", "<u4"),
    ("object_bytes", "<u8"),
    ("fingerprint", "V16"),
    ("key", "V16"),
    ("checksum", "<u8"),
])  # fmt: skip


def stored_bytes(object_bytes: int) -> int:
    """Return the size of an object with its trailer."""
    return -(-object_bytes // _ALIGN_BYTES) * _ALIGN_BYTES + TRAILER_BYTES


def make_ends(
    fingerprint: str, object_bytes: int, keys: Sequence[str], checksums: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return what follows each payload, uint8 `[len(keys), stored - object_bytes]`.

    Args:
        fingerprint: of the layout, 32 hex digits.
        object_bytes: size of the payloads.
        keys: the objects' keys.
        checksums: of the payloads, `[len(keys)]`, the 64 bits as a signed number.
    """
    ends = np.zeros((len(keys), stored_bytes(object_bytes) - object_bytes), dtype=np.uint8)
    trailers = np.zeros(len(keys), dtype=_FIELDS)
    trailers["magic"] = _MAGIC
    trailers["format_version"] = FORMAT_VERSION
    trailers["trailer_bytes"] = TRAILER_BYTES
    trailers["object_bytes"] = object_bytes
    trailers["fingerprint"] = np.void(bytes.fromhex(fingerprint))
    trailers["key"] = [np.void(_digest(key)) for key in keys]
    trailers["checksum"] = checksums.view(np.uint64)
    ends[:, -TRAILER_BYTES:] = trailers.view(np.uint8).reshape(len(keys), TRAILER_BYTES)
    return ends


def find_faults(
    ends: NDArray[np.uint8],
    fingerprint: str,
    object_bytes: int,
    keys: Sequence[str],
    checksums: NDArray[np.int64],
) -> dict[str, str]:
    """Return what is wrong with fetched objects: key to reason, empty if all are good.

    Args:
        ends: what followed each payload, as `make_ends` returns it.
        fingerprint: that the objects should have.
        object_bytes: size that their payloads should have.
        keys: that they were fetched by.
        checksums: of the payloads as they were received, `[len(keys)]`.
    """
    wanted = make_ends(fingerprint, object_bytes, keys, checksums)
    faults = {}
    for index in np.flatnonzero((ends != wanted).any(axis=1)).tolist():
        got, want = (
            rows[index, -TRAILER_BYTES:].copy().view(_FIELDS)[0] for rows in (ends, wanted)
        )
        faults[keys[index]] = _reason(got, want)
    return faults


def _reason(got: np.void, want: np.void) -> str:
    if got["magic"] != want["magic"] or got["trailer_bytes"] != want["trailer_bytes"]:
        return "foreign: no kvferry object, its trailer is missing or damaged"
    if got["format_version"] != want["format_version"]:
        return (
            f"other format: format version {got['format_version']}, wanted {want['format_version']}"
        )
    if got["fingerprint"] != want["fingerprint"]:
        return (
            f"foreign: fingerprint {got['fingerprint'].tobytes().hex()}, wanted "
            f"{want['fingerprint'].tobytes().hex()}"
        )
    if got["object_bytes"] != want["object_bytes"]:
        return f"foreign: {got['object_bytes']} bytes, wanted {want['object_bytes']}"
    if got["key"] != want["key"]:
        return "foreign: the object of another key"
    return f"corrupted: checksum {got['checksum']:#018x}, its bytes have {want['checksum']:#018x}"


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=16).digest()
