"""The linker, or the store under it, is closed in mid-flight."""

import threading
import time
from collections.abc import Callable

import pytest
from bed import Bed, words
from cluster import Cluster, wait_until, within
from forms import LAYERS, MOVES, SLACK_S, End, Form, Moving, name_of
from hooked import Pause

from kvferry.errors import TransferFailed
from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker

LAST_S = 1.0 + SLACK_S
"""What `close` may take beyond its limit: it gives its threads 1 s here to come to their ends."""


def check_closed(bed: Bed) -> None:
    """Nothing of a closed linker is left; store and staging serve another."""
    bed.store.before.clear()
    bed.check_pages()
    bed.check_counted()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name in bed.thread_names])
    bed.check_nothing_held()
    with pytest.raises(TransferFailed, match="closed") as caught:
        bed.linker.save(["x"], {"full": [0]})
    assert caught.value.cause == "closed"
    with Linker(
        bed.layout, bed.store, bed.staging, LinkerConfig(namespace=bed.linker.config.namespace)
    ) as another:
        keys, pages = bed.keys(2), bed.sources(2)
        assert another.save(keys, bed.ids(pages)).result().failures == {}
        targets = bed.targets(pages)
        another.load(keys, bed.ids(targets)).result()
        bed.check_loaded(targets)


def test_close_finishes_what_is_in_flight(bed: Bed, form: Form) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    moved = [bed.save(form, bed.keys(4), bed.sources(4)), bed.load(form, keys, targets)]
    with within(10.0):
        bed.linker.close(10.0)
    assert all(handle.done() for moving in moved for handle in moving.handles)
    assert not [word for moving in moved for end in moving.end() for word in words(end)]
    bed.check_loaded(targets)
    check_closed(bed)


@pytest.mark.parametrize(("form", "kind"), MOVES, ids=name_of)
def test_close_in_the_midst_of_a_store_call(bed: Bed, form: Form, kind: str) -> None:
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    call = {
        ("save", False): "put",
        ("save", True): "put",
        ("load", False): "get",
        ("load", True): "read",
    }[kind, form.by_layer]
    pause = bed.store.before[call] = Pause()

    def begin(first: int) -> Moving:
        if kind == "save":
            return bed.save(form, bed.keys(2), bed.sources(2))
        return bed.load(form, keys[first : first + 2], targets[first : first + 2])

    running = begin(0)
    pause.wait()
    queued = begin(2)
    with within(0.3 + LAST_S), pytest.raises(TransferFailed, match="still at work") as caught:
        bed.linker.close(0.3)
    assert caught.value.cause == "closed"
    with within(SLACK_S):
        assert {word for end in queued.end() for word in words(end)} == {"closed"}
    pause.release()
    ends = running.end()
    assert {word for end in ends for word in words(end)} <= {"closed"}
    with within(10.0):
        bed.linker.close(10.0)
    check_closed(bed)


def test_close_does_not_wait_for_a_model_that_writes_nothing(bed: Bed) -> None:
    save = bed.save(LAYERS, keys := bed.keys(4), bed.sources(4), written=False)
    save.whole.layer_written(0)
    wait_until(lambda: bed.staging.num_held_bytes > 0)
    with within(0.3 + LAST_S):
        bed.linker.close(0.3)
    assert [words(end) for end in save.end()] == [["closed"]]
    assert not any(bed.store.store.exists(bed.object_keys(keys)))
    check_closed(bed)


def test_close_lets_a_waiting_model_through(bed: Bed, layered: Form) -> None:
    keys, pages = bed.saved(4)
    pause = bed.store.before["read"] = Pause()
    load = bed.load(layered, keys, bed.targets(pages))
    pause.wait()
    found: list[End] = []
    model = threading.Thread(target=lambda: found.extend(load.end()), name="model")
    model.start()
    time.sleep(0.1)
    with pytest.raises(TransferFailed, match="still at work"):
        bed.linker.close(0.3)
    model.join(SLACK_S)
    assert not model.is_alive()
    assert [words(end) for end in found] == [["closed"]] * len(load.handles)
    assert "landed" not in load.states
    pause.release()
    bed.linker.close(10.0)
    check_closed(bed)


def test_a_store_that_is_closed_under_the_linker(
    cluster: Cluster, make_bed: Callable[..., Bed], form: Form
) -> None:
    store = cluster.client()
    bed = make_bed(store=store)
    keys, pages = bed.saved(4)
    targets = bed.targets(pages)
    store.close()
    with within(SLACK_S):
        moved = [bed.save(form, bed.keys(2), bed.sources(2)), bed.load(form, keys, targets)]
        assert {word for moving in moved for end in moving.end() for word in words(end)} == {
            "closed"
        }
    bed.check_poisoned(targets)
    bed.check_counted()
    assert bed.staging.num_free_bytes == bed.staging.num_bytes
    for name in bed.thread_names:
        assert name in [thread.name for thread in threading.enumerate()]


def test_closing_twice_and_using_after(bed: Bed) -> None:
    bed.saved(1)
    bed.linker.close(5.0)
    with within(1.0):
        bed.linker.close(5.0)
    for begin in (bed.linker.save, bed.linker.load):
        with pytest.raises(TransferFailed, match="closed") as caught:
            begin(["x"], {space: [0] for space in bed.layout.spaces})
        assert caught.value.cause == "closed"
    with pytest.raises(TransferFailed, match="closed"):
        bed.linker.lookup(["x"])
