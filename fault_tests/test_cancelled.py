"""A transfer is cancelled, or its deadline passes, at each stage of its way."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from bed import GROUPS, Bed, words
from cluster import wait_until, within
from forms import BATCH, LAYERS, MOVES, SLACK_S, WHOLE, Form, Moving, end_of, name_of
from hooked import Pause

from kvferry.kernels.pack import Packer
from kvferry.linker.seal import Seal
from kvferry.testing import check_telling, write_telling

# The calls of each form, in their order, and how many calls of that name go before.
SAVE_STAGES = [
    (WHOLE, "exists", 0),
    (WHOLE, "pack", 0),
    (WHOLE, "put", 0),
    (WHOLE, "put", 1),
    (LAYERS, "exists", 0),
    *((LAYERS, "pack", nth) for nth in range(len(GROUPS))),
    (LAYERS, "put", 0),
    (LAYERS, "put_start", 0),
    (LAYERS, "put_write", 0),
    (LAYERS, "put_write", 1),
    (LAYERS, "put_end", 0),
]
LOAD_STAGES = [
    (WHOLE, "get", 0),
    (WHOLE, "verify", 0),
    (WHOLE, "unpack", 0),
    (WHOLE, "get", 1),
    *(
        (form, call, nth)
        for form in (LAYERS, BATCH)
        for call, nth in [
            ("get_session", 0),
            ("read", 0),
            ("unpack", 0),
            ("read", 1),
            ("read", 2),
            ("faults", 0),  # every layer is there, and only the verdict is not
        ]
    ),
]
OTHER_TAG = 1000


@contextmanager
def held(bed: Bed, call: str, nth: int) -> Iterator[Pause]:
    """Hold the linker at a call, of the store or of its own."""
    pause = Pause(nth)
    owner = {"pack": Packer, "unpack": Packer, "verify": Seal, "faults": Seal}.get(call)
    with pytest.MonkeyPatch.context() as patch:
        if owner is None:
            bed.store.before[call] = pause
        else:
            real = getattr(owner, call)

            def slow(self: Any, *arguments: Any, **options: Any) -> Any:
                pause()
                return real(self, *arguments, **options)

            patch.setattr(owner, call, slow)
        try:
            yield pause
        finally:
            pause.release()
            bed.store.before.clear()


def cancel_while_held(moving: Moving, pause: Pause, *, touches: bool) -> None:
    """Cancel; while pages are touched it must wait for that, else it must not wait."""
    canceller = threading.Thread(target=moving.cancel, name="canceller")
    canceller.start()
    canceller.join(0.2 if touches else SLACK_S)
    assert canceller.is_alive() == touches
    if touches:
        pause.release()
        canceller.join(SLACK_S)
        assert not canceller.is_alive()


def overwrite(bed: Bed, pages: Sequence[int]) -> None:
    """What an owner of pages does once he may: write something else."""
    for space in bed.layout.spaces:
        write_telling(bed.layout, space, pages, [OTHER_TAG + page for page in pages])


def check_overwritten(bed: Bed, pages: Sequence[int]) -> None:
    for space in bed.layout.spaces:
        check_telling(bed.layout, space, pages, [OTHER_TAG + page for page in pages])


def check_stored_objects(bed: Bed, keys: Sequence[str], pages: Sequence[int]) -> None:
    """Whatever was stored before the end holds the bytes of the time of the call."""
    for key, page in zip(keys, pages, strict=True):
        if bed.linker.lookup([key]):
            (target,) = bed.targets([page])
            bed.load(WHOLE, [key], [target]).result()
            for space in bed.layout.spaces:
                check_telling(bed.layout, space, [target], [page])


@pytest.mark.parametrize(("form", "call", "nth"), SAVE_STAGES, ids=name_of)
def test_a_save_cancelled_at(
    make_bed: Callable[..., Bed],
    form: Form,
    call: str,
    nth: int,
) -> None:
    bed = make_bed(part_bytes=1 << 15)
    keys, pages = bed.keys(4), bed.sources(4)
    with held(bed, call, nth) as pause:
        save = bed.save(form, keys, pages)
        pause.wait()
        with within(SLACK_S + 0.5):
            cancel_while_held(save, pause, touches=call == "pack")
        assert not save.whole.cancel()  # it has ended already
        assert [words(end) for end in save.end()] == [["cancelled"]]
        overwrite(bed, pages)
    bed.save(WHOLE, bed.keys(1), bed.sources(1)).result()
    wait_until(lambda: bed.staging.num_held_bytes == 0)
    check_overwritten(bed, pages)  # a save writes no page
    for space in bed.layout.spaces:
        write_telling(bed.layout, space, pages, pages)
    check_stored_objects(bed, keys, pages)
    bed.check_after(form)


@pytest.mark.parametrize(("form", "call", "nth"), LOAD_STAGES, ids=name_of)
def test_a_load_cancelled_at(
    make_bed: Callable[..., Bed],
    form: Form,
    call: str,
    nth: int,
) -> None:
    bed = make_bed(part_bytes=1 << 15)
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    with held(bed, call, nth) as pause:
        load = bed.load(form, keys, targets)
        pause.wait()
        with within(SLACK_S + 0.5):
            cancel_while_held(load, pause, touches=call == "unpack")
        bed.poison(targets)
        with within(SLACK_S):  # whoever waits for a layer is let through
            assert [words(end) for end in load.end()] == [["cancelled"]] * len(load.handles)
    # Behind it in the same thread: by then the cancelled one would have written.
    others = bed.targets(pages[:1])
    bed.load(form, keys[:1], others).result()
    bed.check_loaded(others)
    bed.check_poisoned(targets)
    bed.check_after(form)


def test_a_transfer_cancelled_while_it_is_queued(bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    for kind, call in (("save", "exists"), ("load", "get_session" if form.by_layer else "get")):
        pause = bed.store.before[call] = Pause()
        if kind == "save":
            running = bed.save(form, bed.keys(1), bed.sources(1))
        else:
            running = bed.load(form, keys[:2], targets[:2])
        pause.wait()
        num_calls = len(bed.store.calls)
        if kind == "save":
            queued = bed.save(form, bed.keys(1), bed.sources(1))
        else:
            queued = bed.load(form, keys[2:], targets[2:])
        with within(SLACK_S):
            queued.cancel()
            assert [words(end) for end in queued.end()] == [["cancelled"]] * len(queued.handles)
        assert len(bed.store.calls) == num_calls
        pause.release()
        assert [words(end) for end in running.end()] == [[]] * len(running.handles)
    bed.check_poisoned(targets[2:])
    bed.check_after(form)


@pytest.mark.parametrize("num_written", [0, 1, 3, 4])
def test_a_save_cancelled_between_layers(bed: Bed, num_written: int) -> None:
    keys, pages = bed.keys(4), bed.sources(4)
    save = bed.save(LAYERS, keys, pages, written=False)
    for layer in range(num_written):
        save.whole.layer_written(layer)
    wait_until(lambda: not num_written or bed.staging.num_held_bytes > 0)
    with within(SLACK_S):
        save.cancel()
        assert [words(end) for end in save.end()] == [["cancelled"]]
    overwrite(bed, pages)
    wait_until(lambda: bed.store.store.num_open_puts == 0)
    assert not any(bed.store.store.exists(bed.object_keys(keys)))
    for space in bed.layout.spaces:
        write_telling(bed.layout, space, pages, pages)
    bed.check_after(LAYERS)


def test_a_model_that_never_writes_its_layers_ends_with_the_deadline(
    make_bed: Callable[..., Bed],
) -> None:
    bed = make_bed(transfer_timeout_s=0.6)
    keys = bed.keys(4)
    save = bed.save(LAYERS, keys, bed.sources(4), written=False)
    save.whole.layer_written(0)
    with within(0.6 + SLACK_S):
        while not save.whole.done():
            threading.Event().wait(0.02)
    assert [words(end) for end in save.end()] == [["deadline"]]
    wait_until(lambda: bed.store.store.num_open_puts == 0)
    assert not any(bed.store.store.exists(bed.object_keys(keys)))
    bed.check_after(LAYERS)


def test_a_cancelled_request_of_a_batch_leaves_the_others_alone(bed: Bed) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    pause = bed.store.before["read"] = Pause(1)
    load = bed.load(BATCH, keys, targets)
    pause.wait()
    assert load.handles[0].cancel()
    bed.poison(targets[:2])
    pause.release()
    assert [words(end) for end in load.end()] == [["cancelled"], []]
    bed.check_loaded(targets[2:])
    bed.check_poisoned(targets[:2])
    assert load.states == ["landed"] * 5
    bed.check_after(BATCH)


class Slow:
    """A lock that is not had by `acquire` until somebody lets it; `with` takes it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.let = threading.Event()

    def acquire(self, timeout: float) -> bool:
        return self.let.wait(timeout) and self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_request_that_is_being_given_up_is_not_judged(bed: Bed) -> None:
    """On a busy machine a load can come to its verdict while one of its requests is cancelled."""
    keys, pages = bed.saved(4)
    pause = bed.store.before["read"] = Pause(1)
    load = bed.load(BATCH, keys, bed.targets(pages))
    pause.wait()
    slow = load.handles[0]._touching = Slow()  # type: ignore[assignment]
    canceller = threading.Thread(target=load.handles[0].cancel)
    canceller.start()
    wait_until(lambda: load.handles[0]._is_given_up)
    pause.release()
    assert words(end_of(load.handles[1])) == []
    assert not load.handles[0].is_over
    slow.let.set()
    canceller.join(SLACK_S)
    assert [words(end) for end in load.end()] == [["cancelled"], []]
    # Else these objects would be taken for spoilt, and removed under their readers' feet.
    again = bed.save(WHOLE, keys, pages).result()
    assert (again.num_objects, again.num_existing) == (0, 12)
    bed.check_after(BATCH)


@pytest.mark.parametrize(("form", "kind"), MOVES, ids=name_of)
def test_cancelled_while_staging_is_exhausted(bed: Bed, form: Form, kind: str) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    with bed.staging.acquire(bed.staging.num_bytes, 1.0):
        if kind == "save":
            moving = bed.save(form, bed.keys(2), bed.sources(2))
        else:
            moving = bed.load(form, keys, targets)
        wait_until(lambda: len(bed.staging._waiting) > 0)
        with within(SLACK_S):
            moving.cancel()
            assert {word for end in moving.end() for word in words(end)} == {"cancelled"}
        wait_until(lambda: len(bed.staging._waiting) == 0, SLACK_S)  # nor does its thread wait
    bed.check_poisoned(targets)
    bed.check_after(form)
