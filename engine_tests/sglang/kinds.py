"""All kinds of engines by name."""

from collections.abc import Callable

import kinds_attention
import kinds_hybrid
from kind import Kind

KINDS: dict[str, Callable[[], Kind]] = {
    name.removesuffix("_kind"): function
    for module in (kinds_attention, kinds_hybrid)
    for name, function in vars(module).items()
    if name.endswith("_kind")
}
