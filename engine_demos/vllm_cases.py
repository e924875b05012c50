"""Which tiny models the demo runs in vLLM, and how long their prompts are."""

from sglang_cases import Case

ATTENTION = "CPU_ATTN"
"""vLLM chooses it by itself on a CPU; MLA has one of its own."""

CASES = {
    case.name: case
    for case in (
        Case("llama", ATTENTION, "K and V", page_size=32),
        Case("gemma3", ATTENTION, "K and V, full and sliding window", page_size=32),
        Case("deepseek_v2", "CPU_MLA", "MLA latents"),
        Case("qwen3_next", ATTENTION, "K and V, GDN states", page_size=128),
    )
}
"""By name, in the order in which they run. `page_size` is vLLM's `block_size`."""
