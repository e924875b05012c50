"""A load fails at some layer: a range that cannot be had, an object that is not what it should be.

Bad objects are made by hand, from a good one's bytes: no store on loopback makes any.
"""

from collections.abc import Callable

import pytest
import torch
from bed import GROUPS, Bed, reasons, words
from cluster import LEASE_TTL_S, wait_until, within
from forms import SLACK_S, Form
from hooked import Do

from kvferry.linker.eviction import evict
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.store import ObjectResult, Outcome

Change = Callable[[torch.Tensor, Bed], torch.Tensor]


def flip_in_layer(layer: int) -> Change:
    """Return what changes one bit of a layer of an object of `full`."""

    def change(data: torch.Tensor, bed: Bed) -> torch.Tensor:
        offsets = bed.layout.layer_offsets["full"]
        data[(offsets[layer] + offsets[layer + 1]) // 2] ^= 4
        return data

    return change


def flip_version(data: torch.Tensor, _: Bed) -> torch.Tensor:
    data[-56] ^= 1
    return data


def flip_key(data: torch.Tensor, _: Bed) -> torch.Tensor:
    data[-20] ^= 1
    return data


def zeros(data: torch.Tensor, _: Bed) -> torch.Tensor:
    return torch.zeros_like(data)


def shorten(data: torch.Tensor, _: Bed) -> torch.Tensor:
    return data[:-16]


def lengthen(data: torch.Tensor, _: Bed) -> torch.Tensor:
    return torch.cat([data, torch.zeros(16, dtype=torch.uint8)])


CHANGES: dict[str, tuple[Change, str]] = {
    "layer-0": (flip_in_layer(0), "corrupted"),
    "layer-2": (flip_in_layer(2), "corrupted"),
    "layer-4": (flip_in_layer(4), "corrupted"),
    "version": (flip_version, "other format"),
    "key": (flip_key, "foreign"),
    "zeros": (zeros, "foreign"),
    "short": (shorten, "wrong size"),
    "long": (lengthen, "wrong size"),
}


def replace(bed: Bed, key: str, change: Change) -> None:
    """Put a changed copy of an object in its place."""
    store = bed.store.store
    staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
    staging.register(store)
    size = store.client.get_size(key)
    assert store.get([key], [staging.address], [size])[0].outcome is Outcome.FETCHED
    changed = change(staging.tensor[:size].clone(), bed)
    staging.tensor[: len(changed)] = changed
    evict(store, [key])
    assert store.put([key], [staging.address], [len(changed)])[0].outcome is Outcome.STORED
    staging.unregister()


@pytest.mark.parametrize("name", CHANGES)
def test_a_bad_object_fails_its_request_alone(bed: Bed, form: Form, name: str) -> None:
    change, cause = CHANGES[name]
    keys, pages = bed.saved(4)
    (bad,) = bed.linker.keys.object_keys(keys[3:], "full")
    replace(bed, bad, change)
    targets = bed.targets(pages)
    load = bed.load(form, keys, targets)
    with within(SLACK_S):
        ends = load.end()
    assert words(ends[-1]) == [cause]
    assert list(reasons(ends[-1])) == [bad]
    if form.name == "batch":
        assert words(ends[0]) == []
        bed.check_loaded(targets[:2])
        assert load.states == ["landed"] * 5  # the others need their layers
    if form.name == "whole":
        bed.check_poisoned_in("full", targets[3:])
    # By layer, wrong bytes may have landed; the verdict says so, and the pages are written anew.
    bed.poison(targets)
    evict(bed.store.store, [bad])
    bed.save(form, keys, pages).result()
    bed.load(form, keys, targets).result()
    bed.check_loaded(targets)
    bed.check_after(form)


def test_a_bad_object_that_is_read_stays_until_its_lease_ends(bed: Bed, form: Form) -> None:
    """Its memory must not go to another object while a reader holds it."""
    keys, pages = bed.saved(4)
    (bad,) = bed.linker.keys.object_keys(keys[3:], "full")
    replace(bed, bad, flip_in_layer(2))
    targets = bed.targets(pages)
    assert words(bed.load(form, keys, targets).end()[-1]) == ["corrupted"]
    bed.poison(targets)
    staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
    staging.register(bed.store.store)
    size = bed.layout.object_bytes["full"]
    with bed.store.store.get_session([bad]) as reader:
        before, after = staging.tensor[:size], staging.tensor[1 << 15 :][:size]
        assert reader.read([bad], [before.data_ptr()], [size], [0])[0].outcome is Outcome.FETCHED
        with within(SLACK_S):
            saved = bed.save(form, keys, pages).result()
        assert words(saved) == ["corrupted"]
        assert list(saved.failures) == [bad]
        assert reader.read([bad], [after.data_ptr()], [size], [0])[0].outcome is Outcome.FETCHED
        assert torch.equal(before, after)
    staging.unregister()
    # Nothing here leases it anew, so that it can be removed, and be written by who has the page.
    wait_until(
        lambda: bed.save(form, keys, pages).result().failures == {}, limit_s=2 * LEASE_TTL_S + 1
    )
    bed.load(form, keys, targets).result()
    bed.check_loaded(targets)
    bed.check_after(form)


@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.LEASE_EXPIRED, Outcome.MISSING])
def test_a_range_that_fails_is_fetched_whole(
    bed: Bed, layered: Form, group: int, outcome: Outcome
) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    answers = iter(range(100))

    # A fake answer: at which of its ranges a real one fails is chance.
    def fail_one_group(names: list[str], *_: object) -> list[ObjectResult] | None:
        return [ObjectResult(outcome)] * len(names) if next(answers) == group else None

    bed.store.before["read"] = fail_one_group
    load = bed.load(layered, keys, targets)
    assert [words(end) for end in load.end()] == [[]] * len(load.handles)
    assert load.states == ["landed"] * 5
    bed.check_loaded(targets)
    assert bed.store.count("get") > 0
    bed.check_after(layered)


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_load_that_fails_at_a_layer_for_good(bed: Bed, layered: Form, group: int) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    answers = iter(range(100))

    def fail_from_group(names: list[str], *_: object) -> list[ObjectResult] | None:
        failed = ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")
        return [failed] * len(names) if next(answers) >= group else None

    bed.store.before["read"] = fail_from_group
    bed.store.before["get"] = lambda names, *_: (
        [ObjectResult(Outcome.FAILED, "TRANSFER_FAIL")] * len(names)
    )
    load = bed.load(layered, keys, targets)
    with within(SLACK_S):
        ends = load.end()
    assert [words(end) for end in ends] == [["transport"]] * len(ends)
    # Layers of the groups that came are right, those after them are let through as failed.
    num_landed = GROUPS[group][0]
    assert load.states[num_landed:] == ["failed"] * (5 - num_landed)
    bed.check_after(layered)


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_an_object_that_goes_between_two_groups(bed: Bed, layered: Form, group: int) -> None:
    keys, pages = bed.saved(4)
    (gone,) = bed.linker.keys.object_keys(keys[3:], "full")
    targets = bed.targets(pages)
    bed.store.before["read"] = Do(lambda: evict(bed.store.store, [gone]), nth=group)
    load = bed.load(layered, keys, targets)
    with within(SLACK_S):
        ends = load.end()
    # Its memory is still there, so that most often it comes whole; what came is verified.
    assert {word for end in ends for word in words(end)} <= {"missing", "corrupted"}
    if not any(words(end) for end in ends):
        bed.check_loaded(targets)
    bed.check_after(layered)
