"""The end of a stored object: what it is, whose it is, and the checksum of its payload.

Behind the payload, at a multiple of 16: the checksum of each layer, then 64 bytes that end the
object: format version, payload size, fingerprint of the layout, digest of the object's key, sum of
the layers' checksums. So an object of another format, layout or key, or with a changed byte, is
told from a good one before any of its bytes is used, layer by layer if need be.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvferry.fingerprint import FORMAT_VERSION

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


def stored_bytes(object_bytes: int, num_layers: int) -> int:
    """Return the size of an object with its layers' checksums and its trailer."""
    payload, sums = (
        -(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in (object_bytes, 8 * num_layers)
    )
    return payload + sums + TRAILER_BYTES


def make_ends(
    fingerprint: str, object_bytes: int, keys: Sequence[str], checksums: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return what follows each payload, uint8 `[len(keys), stored - object_bytes]`.

    Args:
        fingerprint: of the layout, 32 hex digits.
        object_bytes: size of the payloads.
        keys: the objects' keys.
        checksums: of the layers, `[len(keys), num_layers]`, the 64 bits as a signed number.
    """
    num_layers = checksums.shape[1]
    size = stored_bytes(object_bytes, num_layers)
    ends = np.zeros((len(keys), size - object_bytes), dtype=np.uint8)
    sums = -object_bytes % _ALIGN_BYTES
    ends[:, sums : sums + 8 * num_layers] = np.ascontiguousarray(checksums).view(np.uint8)
    trailers = np.zeros(len(keys), dtype=_FIELDS)
    trailers["magic"] = _MAGIC
    trailers["format_version"] = FORMAT_VERSION
    trailers["trailer_bytes"] = TRAILER_BYTES
    trailers["object_bytes"] = object_bytes
    trailers["fingerprint"] = np.void(bytes.fromhex(fingerprint))
    trailers["key"] = np.frombuffer(b"".join(map(_digest, keys)), dtype="V16")
    trailers["checksum"] = checksums.astype(np.uint64).sum(axis=1)
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
        checksums: of the layers as they were received, `[len(keys), num_layers]`.
    """
    wanted = make_ends(fingerprint, object_bytes, keys, checksums)
    faults = {}
    for index in np.flatnonzero((ends != wanted).any(axis=1)).tolist():
        got, want = (
            rows[index, -TRAILER_BYTES:].copy().view(_FIELDS)[0] for rows in (ends, wanted)
        )
        faults[keys[index]] = _reason(got, want) or _wrong_layers(
            ends[index], checksums[index], -object_bytes % _ALIGN_BYTES
        )
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
    return ""


def _wrong_layers(end: NDArray[np.uint8], checksums: NDArray[np.int64], start: int) -> str:
    """Say which layers' bytes are not those that were stored."""
    stored = end[start : start + checksums.nbytes].copy().view(np.int64)
    wrong = np.flatnonzero(stored != checksums).tolist()
    if not wrong:
        return "corrupted: the checksums do not add up, or filling bytes were changed"
    return f"corrupted: checksums of layers {wrong[:8]}{' and more' * (len(wrong) > 8)} differ"


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=16).digest()
