"""What makes two layouts' objects exchangeable, as a hash: all that changes the bytes' meaning."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from kvferry.identity import ModelIdentity
from kvferry.object_order import canonical_meaning
from kvferry.pools import Pool

FORMAT_VERSION = 1
"""Version of the object's bytes; part of every fingerprint."""


def fingerprint_of(
    page_size: int,
    num_layers: int,
    pools: tuple[Pool, ...],
    identity: ModelIdentity,
    object_order: str,
) -> str:
    """Return 32 hex digits, equal for layouts whose objects may be exchanged and for no others."""
    meaning: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "page_size": page_size,
        "num_layers": num_layers,
        "padding": "none",
        "pools": [
            [
                pool.name,
                pool.space,
                pool.rows,
                pool.row_shape,
                pool.dtype,
                pool.layer_ids,
                pool.order,
            ]
            for pool in pools
        ],
        "identity": asdict(identity),
    }
    if object_order == "canonical":  # the order in memory no longer matters
        meaning |= {"order": object_order, "pools": [canonical_meaning(pool) for pool in pools]}
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
