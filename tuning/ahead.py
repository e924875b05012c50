"""Compiles a sweep's candidates before it begins, as many at once as there are processors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, TypeVar

import triton
from triton.backends.compiler import GPUTarget

from kvferry.launch import CACHE_HINTS
from kvferry.tuning.compiled import compile_for
from kvferry.tuning.derive import Candidate, Figures, figures_of
from kvferry.tuning.occupancy import MULTIPROCESSORS

FOUND_BY_LAUNCHES = "3.6."
"""The version of Triton whose launches find what was compiled here; tested."""

_FEW = 4
_Result = TypeVar("_Result")


def is_readable(arch: str) -> bool:
    """Whether figures can be made of an architecture's machine code."""
    number = arch.removeprefix("sm_")
    return number.isdigit() and int(number) in MULTIPROCESSORS


def figures_ahead(
    candidates: Iterable[Candidate], arch: str, known: Mapping[Candidate, Figures]
) -> dict[Candidate, Figures]:
    """Return the figures of candidates: those that are known, the others compiled.

    Args:
        candidates: which.
        arch: an architecture that `is_readable`.
        known: figures by the same version of Triton.
    """
    wanted = list(candidates)
    missing = [one for one in wanted if one not in known]
    if len(missing) <= _FEW:  # sooner done than processes are started
        found = [figures_of(one, arch) for one in missing]
    else:
        found = _in_processes(figures_of, [(one, arch) for one in missing])
    return {one: known[one] for one in wanted if one in known} | dict(
        zip(missing, found, strict=True)
    )


def compile_ahead(candidates: Iterable[Candidate], arch: str) -> None:
    """Fill Triton's cache with candidates under every cache hint, for launches to find there.

    Newer versions of Triton file launches under other keys than compilations without a GPU: there
    it would be for nothing, and nothing is done.
    """
    if not triton.__version__.startswith(FOUND_BY_LAUNCHES):
        return
    hints = range(len(CACHE_HINTS))
    _in_processes(_compile, [(one, hint, arch) for one in candidates for hint in hints])


def _compile(candidate: Candidate, hint: int, arch: str) -> None:
    variant = candidate.variant
    constants = {**variant.constants, "CACHE": hint}
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compile_for(replace(variant, constants=constants), target)


def _in_processes(
    function: Callable[..., _Result], jobs: Sequence[tuple[Any, ...]]
) -> list[_Result]:
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"))
    try:
        return list(pool.map(function, *zip(*jobs, strict=True)))
    finally:
        # Not waited for: whoever ends this early has no time to.
        pool.shutdown(wait=False, cancel_futures=True)
