"""Loads the real SGLang on a CPU, before any test imports it."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # some of SGLang's pools are written by Triton kernels
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import standins  # noqa: E402

standins.install()
warnings.filterwarnings("ignore", module="sglang")

from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402


@pytest.fixture(autouse=True)
def _sglang_context() -> Iterator[None]:
    """The configuration that some pools ask for while they are made."""
    with get_context().override_server_args(), get_parallel().override(attn_dcp_size=1):
        yield
