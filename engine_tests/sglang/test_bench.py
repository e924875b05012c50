"""The benchmark beside SGLang's own linker: it sees wrong bytes, and judges paired rounds."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention import mha
from prompts import tokens
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.runtime_context import get_parallel
from tree import Engine

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import sglang_sides as sides  # noqa: E402
from sglang_host import HostCost  # noqa: E402
from sglang_models import Model, tiny  # noqa: E402
from sglang_rounds import Rounds  # noqa: E402
from sglang_tables import host_bars, refusal, wire_bars  # noqa: E402
from sglang_wire import Times, run_rounds  # noqa: E402
from thread_clocks import clocked  # noqa: E402

from kvferry.linker.master import LocalMaster  # noqa: E402


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, tp_size=1):
        yield


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalMaster() as master:
        yield master.address


class Careless(sides.Side):
    """kvferry's linker, and afterwards a mistake."""

    def __init__(self, linker: Any, pool: Any, mistake: Callable[[Any, int], None]) -> None:
        super().__init__("careless", linker)
        self._pool = pool
        self._mistake = mistake

    def load(self, transfers: Any) -> tuple[float, float]:
        found = super().load(transfers)
        self._mistake(self._pool, int(transfers[0].device_indices[64]))
        return found


def _flip(tensor: torch.Tensor, row: int) -> None:
    tensor.view(torch.uint8).view(len(tensor), -1)[row, 5] ^= 1


MISTAKES: dict[str, Callable[[Any, int], None]] = {
    "a byte of a page": lambda pool, slot: _flip(pool.kv_buffer[2], slot + 63),
    "a byte of its index keys": lambda pool, slot: _flip(
        pool.index_k_with_scale_buffer[0], slot // 64
    ),
    "a byte of a page that was not loaded": lambda pool, slot: _flip(pool.kv_buffer[1], 3),
}


@pytest.mark.parametrize("mistake", [*MISTAKES, "nothing at all"])
def test_wrong_bytes_end_the_benchmark(mistake: str, address: str) -> None:
    def careless(model: Model, address: str) -> sides.Side:
        linker = sides.kvferry(model, address).linker
        return Careless(linker, model.kvcache, MISTAKES.get(mistake, lambda *_: None))

    def run() -> tuple[Rounds[Times], int]:
        return run_rounds(tiny, 3, 1, address, {"careless": careless})

    if mistake in MISTAKES:
        with pytest.raises(AssertionError, match=r"\b1 of \d+ bytes differ"):
            run()
    else:
        rounds, num_bytes = run()
        assert len(rounds.by_side["careless"]) == 1
        assert num_bytes == 3 * 3 * (64 * 656 + 8448)


def times(*rounds: tuple[float, float, float]) -> list[Times]:
    return [Times(*one) for one in rounds]


def test_ratios_are_of_the_same_round() -> None:
    rounds = Rounds(
        {
            sides.UPSTREAM: times((10, 1, 100), (40, 4, 400), (90, 9, 900)),
            sides.KVFERRY: times((4, 1, 40), (20, 4, 160), (45, 9, 300)),
            sides.PLAIN: times((2, 2, 90), (10, 2, 100), (30, 3, 150)),
        }
    )
    # Medians of each alone would give 40 / 10, 4 / 2 and 400 / 100.
    values = {bar.name: (bar.value, bar.ok) for bar in wire_bars(32, rounds)}
    assert values == {
        "all_layers_32_pages": (4.0, True),
        "layer_0_32_pages": (2.0, True),
        "offload_32_pages": (4.0, True),
        "all_layers_with_checksums_32_pages": (2.5, True),
        "offload_with_checksums_32_pages": (2.0, True),
    }
    rounds.by_side[sides.PLAIN] = times((9, 2, 90), (39, 8, 399), (30, 1, 100))
    values = {bar.name: (bar.value, bar.ok) for bar in wire_bars(32, rounds)}
    assert values["offload_32_pages"] == (pytest.approx(10 / 9), False)
    assert values["layer_0_32_pages"] == (0.5, False)
    assert values["all_layers_32_pages"] == (pytest.approx(100 / 90), False)
    assert rounds.spread(sides.PLAIN, lambda one: one.offload_ms) == "30.0 (9..39)"


def test_host_bars_are_of_all_threads_and_of_the_same_round() -> None:
    rounds = Rounds(
        {
            sides.UPSTREAM: [HostCost(1, 99, 0, 0, 100, 9, 9), HostCost(1, 299, 0, 0, 100, 9, 9)],
            sides.KVFERRY: [HostCost(1, 1, 0, 0, 51, 3, 3), HostCost(1, 2, 0, 0, 51, 3, 3)],
        }
    )
    python, keys = host_bars(rounds)
    assert (python.value, python.ok) == (75.0, True)
    assert (keys.value, keys.ok) == (0.51, False)


def test_clocks_count_work_and_not_waiting() -> None:
    def work() -> None:
        begun.wait()
        while time.thread_time() < 0.05:
            pass
        worked.set()
        ended.wait()

    begun, worked, ended = threading.Event(), threading.Event(), threading.Event()
    threads = [threading.Thread(target=call, name=call.__name__) for call in (work, ended.wait)]
    for thread in threads:
        thread.start()
    with clocked() as spent:
        begun.set()
        worked.wait()
    ended.set()
    by_name = {name: ms for (_, name), ms in spent.ms.items()}
    assert 45 < by_name["work"] < 60
    assert by_name.get("wait", 0.0) < 5
    ident = next(ident for ident, name in spent.ms if name == "work")
    assert spent.less({ident: 0.04}) == pytest.approx(sum(spent.ms.values()) - 40)


def test_a_refusal_is_sglangs_own(address: str) -> None:
    assert "does not support the direct external linker" in refusal("DeepSeek-V3", address)
    with pytest.raises(AssertionError, match="wanted a refusal"):
        refusal("DeepSeek-V3.2", address)


def test_transfers_are_those_of_the_tree(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("mha")
    seen: dict[str, PoolTransfer] = {}
    for name in ("offload", "load"):
        method = getattr(engine.linker, name)

        def watched(*arguments: Any, _name: str = name, _method: Any = method, **more: Any) -> Any:
            transfers = arguments[-1] if _name == "load" else arguments[0]
            (seen[_name],) = transfers
            return _method(*arguments, **more)

        monkeypatch.setattr(engine.linker, name, watched)
    prompt = tokens(4 * engine.kind.page_size)
    engine.prefill(prompt)
    engine.settle()
    engine.flush()
    request = engine.match(prompt)
    engine.load(request)
    model = Model(mha(), engine.kind.page_size)
    for name, transfer in seen.items():
        pages = engine.pages("full", transfer.device_indices)
        (own,) = model.transfers(transfer.keys, {"full": pages})
        assert own.name == transfer.name, name
        assert own.keys == list(transfer.keys)
        assert torch.equal(own.device_indices, transfer.device_indices)
        assert own.device_indices.dtype == transfer.device_indices.dtype


def test_it_runs() -> None:
    """All of it, small; compiled kernels, so in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_sglang.py"), "--tiny"],
        capture_output=True, text=True, timeout=110, env=environment, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    bars = [line.split() for line in lines if line.startswith("bar ")]
    assert [words[1] for words in bars] == [
        "python_ms_of_a_load_sglang_over_kvferry",
        "keys_over_sglang",
        "all_layers_8_pages",
        "layer_0_8_pages",
        "offload_8_pages",
        "all_layers_with_checksums_8_pages",
        "offload_with_checksums_8_pages",
    ], done.stderr
    assert done.returncode == int(any(words[-1] == "short" for words in bars))
    rows = [line.split() for line in lines if line.startswith("tiny")]
    assert {tuple(words[1:3]) for words in rows} >= {("SGLang", "512"), ("kvferry", "512")}
    host = {words[1]: words[3:6] for words in rows if words[2] == "512"}
    # Keys, calls, ranges: two objects a page and a range for each layer's buffer, or one object,
    # and an empty range behind each that asks whether there is more.
    assert host == {"SGLang": ["16", "8", "48"], "kvferry": ["8", "4", "24"]}
