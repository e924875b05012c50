"""The GPU check's matrix of moves: has it every variant of the kernels, and does it see a fault?"""

import gpu_matrix
import pytest
import torch
from gpu_cases import CASES, Case

from kvferry.kernels.handles import Launch
from kvferry.kernels.pack import Packer


@pytest.mark.interpreter
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_matrix_has_every_variant(on_gpu: bool) -> None:
    cases = list(gpu_matrix.cases(on_gpu))
    assert len(cases) == gpu_matrix.case_count(on_gpu)
    moved: set[str] = set()
    for case in cases:
        if case.way is not None:
            moved |= gpu_matrix.planned(case)
    # Reading objects for their checksums is soon done, so it is done.
    read = [case for case in cases if case.way is None]
    done = gpu_matrix.run_cases(read, torch.device("cpu"))
    assert done["failures"] == []
    assert done["moves"] == len(read)
    assert gpu_matrix.wanted_variants(on_gpu) <= moved | set(done["seen"])


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", ["packed pages", "checksums"])
def test_the_matrix_finds_a_wrong_byte(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Launch.start

    def spoiled(launch: Launch, device: torch.device) -> None:
        if wrong == "checksums":  # the same bytes, added up twice
            start(launch, device)
        else:  # 16 bytes too far in the objects
            rows, ids, objects, *others = launch.arguments
            launch = launch._replace(arguments=(rows, ids, objects + 16, *others))
        start(launch, device)

    monkeypatch.setattr(Launch, "start", spoiled)
    first = next(case for case in gpu_matrix.cases(False) if case.way and case.way.with_sums)
    with pytest.raises(AssertionError, match=wrong):
        gpu_matrix.run_case(first, torch.device("cpu"))


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_timed_has_moved_right_before(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Launch.start
    device = torch.device("cpu")
    loaded = case.load(device)
    assert loaded.num_bytes == len(loaded.sources) * loaded.layout.object_bytes["full"]

    def spoiled(launch: Launch, device: torch.device) -> None:
        start(launch, device)
        loaded.objects[loaded.stride_bytes + 100] ^= 1

    monkeypatch.setattr(Launch, "start", spoiled)
    with pytest.raises(AssertionError, match=f"{case.name}: the objects of pages"):
        loaded.check_bytes(Packer(loaded.layout, "full"))
