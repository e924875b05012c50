"""Which tiny models the demo runs in SGLang, by what attention, and how long their prompts are."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One model and the sizes of its prompts, in tokens.

    Attributes:
        name: of the model, also of its folder.
        attention: SGLang's `attention_backend`. `triton` runs in Triton's interpreter, slowly.
        pools: what of the cache travels, in words.
        dtype: of weights and cache. Not bfloat16 where Triton's interpreter computes: it multiplies
            such numbers as if they were integers.
        page_size: tokens of a page.
        chunk_tokens: longest part of a prompt that is computed at once.
        prompt_tokens: of the first prompt; no whole number of pages.
        tail_tokens: what the longer prompt adds to it; more than a chunk.
        others: lengths of the prompts that come all at once.
        new_tokens: how many are generated.
        settings: more arguments of `sglang.Engine`.
    """

    name: str
    attention: str
    pools: str
    dtype: str = "bfloat16"
    page_size: int = 16
    chunk_tokens: int = 256
    prompt_tokens: int = 600
    tail_tokens: int = 300
    others: tuple[int, ...] = (400, 344, 520)
    new_tokens: int = 4
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def interpreted(self) -> bool:
        """Whether SGLang's kernels run in Triton's interpreter."""
        return self.attention == "triton"

    @property
    def prompt(self) -> list[int]:
        """The first prompt, as token ids."""
        return _tokens("prompt", self.prompt_tokens)

    @property
    def longer(self) -> list[int]:
        """The first prompt and more."""
        return self.prompt + _tokens("tail", self.tail_tokens)

    @property
    def at_once(self) -> list[list[int]]:
        """Prompts that share nothing with the first, nor with each other."""
        return [_tokens(f"other {n}", length) for n, length in enumerate(self.others)]

    @property
    def warm_up(self) -> list[int]:
        """A prompt that is only there to have everything loaded."""
        return _tokens("warm-up", 2 * self.page_size)

    def fault_prompts(self, name: str, number: int) -> list[list[int]]:
        """Return prompts of one fault's own, two thirds as long as the first."""
        length = self.prompt_tokens * 2 // 3
        return [_tokens(f"{name} {n}", length) for n in range(number)]

    def with_other_prefix(self, prompt: list[int], number: int) -> list[int]:
        """Return a prompt whose first `number` tokens are others, and the rest as here."""
        return [*_tokens("other prefix", number), *prompt[number:]]

    def whole_pages(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt can come from a cache: whole pages, never all."""
        return (len(prompt) - 1) // self.page_size * self.page_size


def _tokens(seed: str, number: int) -> list[int]:
    """Return token ids below `VOCABULARY`, the same in every process."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(number)]


VOCABULARY = 512
"""Size of every tiny model's vocabulary."""

# SGLang splits a sequence by how many there are in the batch; sums then come out otherwise.
_UNSPLIT = (("triton_attention_num_kv_splits", 1),)

_SHORT: dict[str, Any] = {
    "settings": _UNSPLIT,
    "chunk_tokens": 64,
    "prompt_tokens": 100,
    "tail_tokens": 72,
    "others": (75, 60),
    "new_tokens": 3,
}

_STATES: dict[str, Any] = {
    "page_size": 1,
    "settings": (
        *_UNSPLIT,
        ("mamba_radix_cache_strategy", "no_buffer"),
        ("disable_overlap_schedule", True),
        ("max_mamba_cache_size", 64),
    ),
}

CASES = {
    case.name: case
    for case in (
        Case("llama", "torch_native", "K and V"),
        Case("qwen3", "torch_native", "K and V"),
        Case("gemma3", "torch_native", "K and V"),
        Case("deepseek_v2", "triton", "MLA latents", "float32", **_SHORT),
        Case("gemma4", "triton", "K and V, full and sliding window", "float32", **_SHORT),
        Case("qwen3_next", "triton", "K and V, GDN states", "float16", **{**_SHORT, **_STATES}),
    )
}
"""By name, in the order in which they run."""
