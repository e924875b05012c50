"""Transfers of every form and end, for a listener to NVTX; prints what each of them came to.

`python tests/ranged_transfers.py` prints a list as JSON, in the order of the calls.
"""

import json
import threading
from typing import Any

import torch
from linker_bed import Bed, ids, keys

from kvferry.errors import TransferFailed
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.linker import Linker
from kvferry.linker.master import LocalMaster
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.owner import LocalOwner
from kvferry.linker.transfer import Transfer

GROUPS = ((0, 1), (1, 3), (3, 5))
NUM_LAYERS = 5


def end_of(name: str, job: Transfer | LayerLoad) -> dict[str, Any]:
    """Wait for a job's end; return what it was to move, and what it moved: None if it failed.

    `end_bytes` are those behind its objects' payloads: checksums and trailers.
    """
    jobs = job.transfers if isinstance(job, LayerLoad) else (job,)
    plans = [plan for one in jobs for plan in one.plans]
    found: dict[str, Any] = {
        "name": name,
        "num_pages": sum(len(plan.keys) for plan in plans),
        "plan_bytes": sum(plan.num_bytes for plan in plans),
        "end_bytes": sum(plan.end_bytes * len(plan.keys) for plan in plans),
        "num_bytes": None,
    }
    try:
        results = job.result(20)
        results = results if isinstance(results, list) else [results]
        found["num_bytes"] = sum(result.num_bytes for result in results)
    except TransferFailed as error:
        found["cause"] = error.cause
    return found


def load_layers(linker: Linker, requests: list[LoadRequest]) -> LayerLoad:
    """Load layer by layer, and wait for every layer."""
    load = linker.load_batch(requests).start()
    for layer in range(NUM_LAYERS):
        load.wait_layer(layer)
    return load


def whole(bed: Bed, linker: Linker) -> list[dict[str, Any]]:
    """Saves and loads of whole objects."""
    found = [
        end_of("save", linker.save(keys(6), bed.fill(0, 6))),
        end_of("load", linker.load(keys(6), ids(bed, 20, 6))),
        end_of("save", linker.save(keys(8), bed.fill(0, 8))),  # two of each index space are new
        end_of("load", linker.load([*keys(2), "nobody"], ids(bed, 20, 3))),
    ]
    begun = threading.Event()
    bed.store.before["put"] = lambda *_: begun.wait(10) and save.cancel() and None
    save = linker.save([f"cancelled-{key}" for key in keys(3)], bed.fill(0, 3))
    begun.set()
    found.append(end_of("save", save))
    bed.store.before.clear()
    return found


def layer_by_layer(bed: Bed, linker: Linker) -> list[dict[str, Any]]:
    """The layer-wise ones."""
    names = [f"layers-{key}" for key in keys(5)]
    save = linker.save(names, bed.fill(8, 5), layerwise=True)
    for layer in range(NUM_LAYERS):
        save.layer_written(layer)
    found = [end_of("save layers", save)]
    requests = [
        LoadRequest(names[:3], ids(bed, 30, 3)),
        LoadRequest(names[2:], ids(bed, 40, 3)),
    ]
    found.append(end_of("load layers", load_layers(linker, requests)))
    lacking = [LoadRequest([*names[:2], "nobody"], ids(bed, 30, 3))]
    found.append(end_of("load layers", load_layers(linker, lacking)))
    found.append(end_of("save layers", cancelled(bed, linker)))
    return found


def cancelled(bed: Bed, linker: Linker) -> LayerSave:
    """Save the first layer, and think better of it while the saver waits for the next."""
    save = linker.save([f"gone-{key}" for key in keys(3)], bed.fill(0, 3), layerwise=True)
    waits = threading.Event()
    wait_written = save.wait_written

    def waiting(group: int, timeout_s: float) -> Any:
        if group == 1:
            waits.set()
        return wait_written(group, timeout_s)

    save.wait_written = waiting  # type: ignore[method-assign]
    save.layer_written(0)
    assert waits.wait(10)
    save.cancel()
    return save


def main() -> None:
    """Carry them out, one after the other."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with (
        LocalMaster() as master,
        LocalOwner(master.address, 64 << 20),
        MooncakeStore(MooncakeConfig(master.address)) as store,
    ):
        bed = Bed(store, device)
        with bed.linker(groups=GROUPS) as linker:
            found = whole(bed, linker) + layer_by_layer(bed, linker)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
