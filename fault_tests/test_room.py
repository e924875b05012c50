"""The pool is full, or staging is held by somebody else."""

import time
from collections.abc import Callable

from bed import Bed, succeeded, words
from cluster import LEASE_TTL_S, Filler, within
from forms import SLACK_S, Form


def test_a_full_pool_is_told_by_object(bed: Bed, save_form: Form, filler: Filler) -> None:
    filler.fill()
    keys, pages = bed.keys(4), bed.sources(4)
    with within(LEASE_TTL_S):  # before the pool gives way
        (end,) = bed.save(save_form, keys, pages).end()
    result = succeeded(end)
    assert set(words(end)) == {"no space"}
    assert set(result.failures.values()) == {"no space (NO_AVAILABLE_HANDLE)"}
    assert result.num_objects + len(result.failures) == 12
    assert set(result.failures) <= set(bed.object_keys(keys))
    filler.close()
    assert succeeded(bed.save(save_form, keys, pages).end()[0]).failures == {}
    bed.check_after(save_form)


def test_a_pool_that_gives_way_has_room_again(bed: Bed, save_form: Form, filler: Filler) -> None:
    filler.fill()
    keys, pages = bed.keys(4), bed.sources(4)
    bed.save(save_form, keys, pages).end()
    time.sleep(LEASE_TTL_S + 0.2)  # from now on the filler's objects may be evicted
    for _ in range(50):
        (end,) = bed.save(save_form, keys, pages).end()
        if not words(end):
            break
        time.sleep(0.1)
    assert words(end) == []
    filler.close()
    bed.check_after(save_form)


def test_exhausted_staging_ends_with_the_deadline(make_bed: Callable[..., Bed], form: Form) -> None:
    bed = make_bed(transfer_timeout_s=0.6)
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    with bed.staging.acquire(bed.staging.num_bytes, 1.0):
        with within(0.6 + SLACK_S):
            moved = [bed.save(form, bed.keys(2), bed.sources(2)), bed.load(form, keys, targets)]
            ends = [end for moving in moved for end in moving.end()]
        # Both limits fall on the same moment, and the caller or the linker is first.
        assert {word for end in ends for word in words(end)} <= {"staging", "deadline"}
        assert all(words(end) for end in ends)
        bed.check_poisoned(targets)
        assert bed.staging.num_held_bytes == bed.staging.num_bytes
    bed.check_after(form)


def test_staging_that_comes_free_in_time_is_waited_for(bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    with bed.staging.acquire(bed.staging.num_bytes, 1.0):
        moved = [bed.save(form, bed.keys(2), bed.sources(2)), bed.load(form, keys, targets)]
        time.sleep(0.3)
        assert not any(handle.done() for moving in moved for handle in moving.handles)
    assert [words(end) for moving in moved for end in moving.end()] == [[]] * (
        1 + len(moved[1].handles)
    )
    bed.check_loaded(targets)
    bed.check_after(form)
