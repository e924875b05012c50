"""Which tiny models the demo runs in vLLM, and how long their prompts are."""

from sglang_cases import Case

ATTENTION = "CPU_ATTN"
"""What vLLM chooses by itself on a CPU; MLA has one of its own."""

CASES = {
    case.name: case
    for case in (
        Case("llama", ATTENTION, "K and V", page_size=32),
        Case("gemma3", ATTENTION, "K and V, full and sliding window", page_size=32),
        Case("deepseek_v2", "CPU_MLA", "MLA latents", page_size=16),
        Case("qwen3_next", ATTENTION, "K and V, GDN states", page_size=256),
    )
}
"""By name, in the order in which they run. `page_size` is the `block_size` that vLLM comes to: with
states it makes blocks of attention as long as a state."""
