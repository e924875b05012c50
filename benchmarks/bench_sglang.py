"""kvferry's linker for SGLang beside SGLang 0.5.23's own: `make bench-sglang`.

Both are made in this one process, over the same pools of SGLang's own, and driven through their own
methods by the same `PoolTransfer`s, as the components of SGLang's prefix tree make them; the tree
itself is left out, for it does the same for both. Three parts:

- host: 32K tokens (8K of refused models), against a client that answers at once and moves no bytes
  (`instant_client`). What is left is Python. kvferry's kernels are launched as on a GPU, on a stub
  driver that launches nothing.
- wire: a remote owner over TCP loopback, its segment warm. Every byte of every load is compared
  before a time is taken: source pages tell their place, destinations are poisoned.
- models that SGLang's linker refuses, with what it says.

Mooncake's limits for the TCP transport are read once per process, so both run under the same.
"""

import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_sglang() -> None:
    """Make SGLang importable on a CPU, and fix Mooncake's limits, before either is imported."""
    # Unset, SGLang's loads of 128 pages lose Mooncake's channel for good.
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    sys.path += [str(ROOT / folder) for folder in ("engine_tests/sglang", "engine_tests", "tests")]
    import standins

    standins.install()
    warnings.filterwarnings("ignore", module="sglang")


def main() -> int:
    """Print the tables and the bars."""
    load_sglang()
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang_tables import PLANS, TINY, measure
    from standins import TINY_MODEL

    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(model_path=TINY_MODEL))
        stack.enter_context(get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, tp_size=1))
        return measure(TINY if "--tiny" in sys.argv[1:] else PLANS)


if __name__ == "__main__":
    sys.exit(main())
