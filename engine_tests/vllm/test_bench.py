"""The benchmark beside vLLM's own descriptors: what both sides describe, and that it runs."""

import random

import bench_vllm as bench
import pytest

bench.load_vllm()
import plan  # noqa: E402


def test_both_sides_describe_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of vLLM's for each block and layer is one of kvferry's for each block."""
    monkeypatch.setattr(bench, "NUM_BLOCKS", 16)
    for name, model in bench.models(4, 2).items():
        made = plan.make(model.specs, model.layout, num_blocks=16)
        theirs, ours = bench.Upstream(model, made.caches), bench.Packed(made.read(), 1 << 20)
        block_ids = random.Random(0).choices(range(1, 16), k=40)
        hashes = [index.to_bytes(32, "big") for index in range(40)]
        per_block = 4 if name.startswith("Llama") else 1
        assert theirs.prepare(hashes, block_ids) == 40 * per_block, name
        keys = [one.hex() for one in hashes]
        assert ours.prepare(keys, block_ids, 1 << 30) == 40, name


def test_times_are_of_the_calls_that_count() -> None:
    calls: list[str] = []
    times = bench.in_turn([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert "".join(calls) == "aabb" * 5
    assert [(len(each.cold_ms), len(each.warm_ms)) for each in times] == [(3, 3), (3, 3)]


def test_a_small_run_prints_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_vllm.py", "--tiny"])
    assert bench.main() == 0  # it has no bar at this size
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[1:5]] == [
        "Llama-70B, TP8",
        "Llama-70B, TP1",
        "Llama-70B, TP1, more staging",
        "DeepSeek-V3.2",
    ]
