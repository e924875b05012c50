"""Batches of loads that fail, and what their requests find when SGLang asks once more."""

from typing import Any

import pytest
import torch
from linker_bed import Bed, ids, keys

from kvferry.errors import StoreError
from kvferry.linker.sglang_loads import Loads
from kvferry.linker.sglang_transfers import Pages
from kvferry.linker.store import ObjectResult, Outcome
from kvferry.linker.streams import fence_of_caller

pytestmark = pytest.mark.mooncake

FAILED = ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
MISSING = ObjectResult(Outcome.MISSING)


def pages(bed: Bed, page_keys: list[str], first: int) -> Pages:
    """Pages in all index spaces, to land in page ids `first ..`."""
    rows = ids(bed, first, len(page_keys))
    positions = {space: range(len(page_keys)) for space in rows}
    page_ids = {space: torch.tensor(row) for space, row in rows.items()}
    return Pages(page_keys, positions, page_ids, fence_of_caller(torch.device("cpu")))


@pytest.mark.parametrize(("result", "found"), [(FAILED, []), (MISSING, [1, 2])])
def test_after_a_failure_of_the_store_no_page_of_the_batch_is_found(
    bed: Bed, result: ObjectResult, found: list[int]
) -> None:
    linker = bed.linker(lookup_ttl_s=60.0)
    linker.save(keys(4), bed.fill(0, 4)).result()
    bad = set(linker.keys.object_keys(keys(1), "full"))

    def refuse(*_: Any) -> None:
        raise StoreError("no ranges, only whole objects")

    def get(names: list[str], *rest: Any) -> Any:
        real = bed.store.store.get(names, *rest)
        return [result if name in bad else got for name, got in zip(names, real, strict=True)]

    loads = Loads(linker)
    try:
        bed.store.before.update(get_session=refuse, get=get)
        loads.queue("lost", pages(bed, keys(4)[:2], 32))
        loads.queue("whole", pages(bed, keys(4)[2:], 34))
        assert linker.lookup(keys(4)[2:]) == [1, 2]
        error = loads.finish(loads.start(list))
        assert error is not None
        assert error.cause == ("transport" if result is FAILED else "missing")
        assert linker.lookup(keys(4)[:2]) == []
        assert linker.lookup(keys(4)[2:]) == found
    finally:
        loads.close(10)
