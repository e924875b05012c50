"""All cases by name, and what they are made of."""

from collections.abc import Callable

import attention
import deepseek_v4 as v4
import hybrids
from attention import Case

CASES: dict[str, Callable[[], Case]] = {
    name.removesuffix("_case"): function
    for module in (attention, hybrids, v4)
    for name, function in vars(module).items()
    if name.endswith("_case") and callable(function)
}
