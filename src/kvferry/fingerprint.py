"""What makes two layouts' objects exchangeable, as a hash: all that changes the bytes' meaning.

Two descriptions of the same bytes that say more or less about them (where tokens are, say) have
different fingerprints: what one of them leaves open might be otherwise in the other.
"""

import hashlib
import json
import sys
from dataclasses import asdict
from typing import Any

from kvferry.identity import ModelIdentity
from kvferry.object_order import canonical_meaning
from kvferry.pools import Pool

FORMAT_VERSION = 2
"""Version of the object's bytes; part of every fingerprint."""

MEANING = (
    "name", "space", "rows", "row_shape", "dtype", "layer_ids", "order", "token_axis",
    "token_planes", "shard_axis", "shard_parts", "shard_totals",
)  # fmt: skip
"""Fields of `Pool` that tell what its bytes mean in `pool` order. The others follow from these and
`page_size` (`page_shape`, `page_bytes`), or say nothing of the bytes in this order (`head_group`).
"""


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
        "byte_order": sys.byteorder,
        "pools": [[getattr(pool, name) for name in MEANING] for pool in pools],
        "identity": asdict(identity),
    }
    if object_order == "canonical":  # the order in memory no longer matters
        meaning |= {"order": object_order, "pools": [canonical_meaning(pool) for pool in pools]}
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
