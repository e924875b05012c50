"""What two answers of an engine have in common: tokens, and log-probabilities to the last digit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def difference(answer: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return the largest difference between two answers' log-probabilities.

    Args:
        answer: `tokens` were generated; `top` is, for each, a list of `[log-probability, token]`,
            the most probable first.
        reference: likewise.

    Returns:
        0.0 only if all is the same; infinity if other tokens were generated, or if one of them is
        no answer.
    """
    mine, theirs = answer.get("top"), reference.get("top")
    if not mine or not theirs or answer["tokens"] != reference["tokens"]:
        return math.inf
    if mine == theirs:
        return 0.0
    values = [[value for place in top for value, _ in place] for top in (mine, theirs)]
    largest = max(abs(value - wanted) for value, wanted in zip(*values, strict=True))
    return largest if largest > 0.0 else math.inf  # NaN, or other tokens are as probable


def furthest(
    answers: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> float:
    """Return the largest `difference` of answers to their references."""
    return max(difference(*pair) for pair in zip(answers, references, strict=True))
