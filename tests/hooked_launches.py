"""Launches of every kernel with a hook and without, on a driver that launches nothing.

Run as a program: prints, as JSON, what the hook was told, and how often it was asked without one.
"""

import json
from collections.abc import Callable
from typing import Any

import stub_driver
import torch
from triton import knobs

from kvferry.kernels import signals, tiles, units
from kvferry.kernels.device import PACK, SUM_ONLY, UNPACK
from kvferry.kernels.handles import Launch
from kvferry.kernels.pack import Packer
from kvferry.kernels.page_ids import PageIds
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.testing import make_tensors

NUM_PAGES = 7
DEVICE = torch.device("cuda", 0)
KERNELS = (
    tiles._move_tiles_kernel, units._move_units_kernel, signals._signal_kernel, signals._wait_kernel
)  # fmt: skip


def layout_of(row_bytes: int) -> CacheLayout:
    """A page of 8 rows in each of 3 layers."""
    pool = {"name": "k", "index": "full", "rows": "token", "row_shape": [row_bytes],
            "dtype": "uint8", "layers": [0, 1, 2]}  # fmt: skip
    plain = CacheLayout.from_description({"page_size": 8, "num_layers": 3, "pools": [pool]})
    return plain.bind(make_tensors(plain, NUM_PAGES, torch.device("cpu")))


def move(row_bytes: int, kind: int, config: LaunchConfig) -> list[Launch]:
    """The launches that move all pages of such a layout; 8 times the row is a page's run."""
    layout = layout_of(row_bytes)
    packer = Packer(layout, "full", config)
    ids = PageIds.check(layout, "full", list(range(NUM_PAGES)), unique=True)
    stride = layout.object_bytes["full"]
    sums = torch.zeros((NUM_PAGES, 3), dtype=torch.int64) if kind == SUM_ONLY else None
    return list(packer.launches(packer.describe(kind, ids, 1 << 40, stride, ((0, 3),), 0, sums)))


def launches() -> dict[str, list[Launch]]:
    """What is launched, by a name of its own."""
    words = torch.zeros(8, dtype=torch.int64)
    burst, budget = LaunchConfig(), LaunchConfig(max_programs=2)
    return {
        "full tiles": move(4096, PACK, burst),
        "tiles of a part": move(2048 + 512, UNPACK, burst),
        "tiles that are summed": move(4096, SUM_ONLY, burst),
        "tiles in a budget": move(4096, PACK, budget),
        "units": move(48, UNPACK, burst),
        "units in a budget": move(48, UNPACK, budget),
        "signal": [signals.signal_launch(words, words, None, 1, 6, 1, scope="gpu")],
        "raise": [signals.signal_launch(words, words.clone(), words, 1, 6, 1, scope="sys")],
        "wait": [signals.wait_launch(words, words, words, words, 2, 1000)],
    }


def main() -> None:
    """Launch all, three times: before there is a hook, with it, and after."""
    told: list[dict[str, Any]] = []
    num_asked = [0]

    def counted(describe: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def call(*arguments: Any) -> dict[str, Any]:
            num_asked[0] += 1
            return describe(*arguments)

        return call

    for kernel in KERNELS:
        kernel.launch_metadata = counted(kernel.launch_metadata)
    by_name = launches()

    def start_all() -> list[tuple[Any, ...]]:
        del stub_driver.calls[:]
        for each in by_name.values():
            for launch in each:
                launch.start(DEVICE)
        return list(stub_driver.calls)

    before = start_all()
    asked_before = num_asked[0]
    hook = lambda metadata: told.append(metadata.get())  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    during = start_all()
    asked_during = num_asked[0]
    knobs.runtime.launch_enter_hook.remove(hook)
    after = start_all()
    print(
        json.dumps(
            {
                "told": [
                    {"what": what, "name": one["name"], "bytes": one.get("bytes")}
                    for what, one in zip(by_name, told, strict=True)
                ],
                "asked": [asked_before, asked_during, num_asked[0]],
                # Metadata and the two hooks are what stands at 6, 7 and 8.
                "bare": all(one[6:9] == (None, None, None) for one in before + after),
                "same": all(
                    (*one[:4], *one[9:]) == (*other[:4], *other[9:])
                    for one, other in zip(before + after, during + during, strict=True)
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
