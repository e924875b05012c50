"""A linker goes over to another generation; what it began before keeps its keys."""

import threading
from typing import Any

import pytest
import torch
from linker_bed import Bed, ids, keys

from kvferry.linker.layer_load import LoadRequest
from kvferry.linker.linker import Linker

pytestmark = pytest.mark.mooncake


@pytest.fixture(params=[True, False], ids=["checksums", "bare"])
def linker(bed: Bed, request: pytest.FixtureRequest) -> Linker:
    return bed.linker(integrity=request.param)


def test_generations_do_not_see_each_other(bed: Bed, linker: Linker) -> None:
    old = linker.keys
    linker.save(keys(4), bed.fill(0, 4)).result()
    assert linker.lookup(keys(4)) == [1, 2, 3, 4]
    linker.renew("v2")
    assert linker.lookup(keys(4)) == []
    for page in range(4):  # what the new weights compute: other bytes under the same page keys
        for space in bed.layout.spaces:
            bed.write(space, [page], [40 + page])
    saved = linker.save(keys(4), ids(bed, 0, 4)).result()
    assert (saved.num_existing, saved.failures) == (0, {})
    linker.load(keys(4), ids(bed, 16, 4)).result()
    bed.check(16, [40, 41, 42, 43])
    linker.renew("")
    assert linker.keys == old
    linker.load(keys(4), ids(bed, 16, 4)).result()
    bed.check(16, [0, 1, 2, 3])


def test_layer_wise_transfers_of_a_new_generation(bed: Bed, linker: Linker) -> None:
    linker.renew("v2")
    save = linker.save(keys(4), bed.fill(0, 4), layerwise=True)
    save.all_written()
    assert save.result(20.0).failures == {}
    load = linker.load(keys(4), ids(bed, 16, 4), layerwise=True).start()
    load.result(20.0)
    bed.check(16, range(4))


def test_a_save_in_flight_ends_under_the_keys_that_it_began_with(bed: Bed, linker: Linker) -> None:
    reached, going_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        reached.set()
        assert going_on.wait(20.0)

    bed.store.before["put"] = hold
    save = linker.save(keys(4), bed.fill(0, 4))
    assert reached.wait(20.0)
    linker.renew("v2")
    going_on.set()
    assert save.result(20.0).failures == {}
    bed.store.before.clear()
    assert linker.lookup(keys(4)) == []
    linker.renew("")
    linker.load(keys(4), ids(bed, 16, 4)).result()  # its trailers are of the old generation too
    bed.check(16, range(4))


def test_a_load_keeps_the_generation_that_it_was_made_with(bed: Bed, linker: Linker) -> None:
    linker.save(keys(4), bed.fill(0, 4)).result()
    load = linker.load_batch([LoadRequest(keys(4), ids(bed, 16, 4))])
    linker.renew("v2")
    load.start().result(20.0)
    bed.check(16, range(4))


def test_failures_of_one_generation_are_none_of_another(bed: Bed) -> None:
    linker = bed.linker(lookup_ttl_s=60.0, miss_ttl_s=60.0)
    linker.save(keys(2), bed.fill(0, 2)).result()
    linker.distrust(keys(2))
    assert linker.lookup(keys(2)) == []
    linker.renew("v2")
    linker.save(keys(2), ids(bed, 0, 2)).result()
    assert linker.lookup(keys(2)) == [1, 2]
    linker.renew("")
    assert linker.lookup(keys(2)) == []


def test_all_requests_of_a_batch_are_of_one_generation(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker = bed.linker()
    linker.save(keys(4), bed.fill(0, 4)).result()
    plan = Linker._plan

    def renewed_between(self: Linker, *arguments: Any, **options: Any) -> Any:
        planned = plan(self, *arguments, **options)
        self.renew("v2")
        return planned

    monkeypatch.setattr(Linker, "_plan", renewed_between)
    requests = [LoadRequest(keys(4), ids(bed, 16, 4)), LoadRequest(keys(4), ids(bed, 32, 4))]
    linker.load_batch(requests).start().result(20.0)
    bed.check(16, range(4))
    bed.check(32, range(4))
    assert torch.equal(bed.page("k", 0, 16), bed.page("k", 0, 32))
