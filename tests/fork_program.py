"""A program for the tests of forks: `python fork_program.py MASTER WHAT`; says what it found."""

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from forking import end_of

from kvferry.errors import ForkedProcess
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.linker import Linker
from kvferry.linker.mooncake import MooncakeConfig, MooncakeStore
from kvferry.linker.staging import StagingBuffer
from kvferry.testing import check_telling, make_tensors, write_telling

CACHE: dict[str, Any] = {
    "page_size": 4,
    "num_layers": 2,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [64], "dtype": "bfloat16",
         "layers": [0, 1]},
    ],
}  # fmt: skip
LIMIT_S = 60.0


def connect(address: str, **settings: Any) -> tuple[MooncakeStore, Linker]:
    plain = CacheLayout.from_description(CACHE)
    layout = plain.bind(make_tensors(plain, 16, torch.device("cpu")))
    store = MooncakeStore(MooncakeConfig(address, **settings))
    staging = StagingBuffer(1 << 16, device=torch.device("cpu"))
    return store, Linker(layout, store, staging, LinkerConfig(namespace=f"forks-{os.getpid()}"))


def use(linker: Linker, name: str = "page") -> None:
    """Save pages, and load them back, exactly."""
    pages = [0, 1, 2]
    write_telling(linker.layout, "full", pages, pages)
    keys = [f"{name}-{page}" for page in pages]
    assert linker.save(keys, pages).result(LIMIT_S).failures == {}
    linker.load(keys, [5, 6, 7]).result(LIMIT_S)
    check_telling(linker.layout, "full", [5, 6, 7], pages)


def own(address: str) -> None:
    """Do all of it in this process."""
    store, linker = connect(address)
    with store, linker:
        use(linker)


def refused(address: str) -> None:
    """Find that this child can have no client of its own."""
    try:
        connect(address)
    except ForkedProcess as error:
        assert "Mooncake, once it was connected, belongs to process" in str(error)  # noqa: PT017
    else:
        raise AssertionError("connected")


def leaving(address: str, in_child: Callable[[], None], **settings: Any) -> None:
    """Fork a child that does something and is left by `sys.exit`, amid a parent's transfers."""
    store, linker = connect(address, **settings)
    use(linker)
    held = [linker, store]
    del linker, store
    pid = os.fork()
    if pid == 0:
        in_child()
        print("the child's last words")
        sys.exit(7)
    use(held[0], "meanwhile")
    assert end_of(pid, LIMIT_S) == 7
    use(held[0], "after")
    held[0].close()
    held[1].close()
    print("the parent's last words")


def dropping() -> None:
    """Let go of everything that the frames above do not hold."""
    frame = sys._getframe(1)
    frame.f_locals["held"].clear()
    gc.collect()


def in_fork(work: Callable[[str], None], address: str, method: str = "fork") -> None:
    """Do something in a process that multiprocessing starts, and look at its end."""
    process = multiprocessing.get_context(method).Process(target=work, args=(address,))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0, process.exitcode


def main(address: str, what: str) -> None:
    if what == "own":  # the parent has not used Mooncake
        in_fork(own, address)
        own(address)
    elif what == "refused":
        store, linker = connect(address)
        in_fork(refused, address)
        linker.close()
        store.close()
        in_fork(refused, address)
        own(address)
    elif what == "spawn":
        store, linker = connect(address)
        in_fork(own, address, "spawn")
        ran = subprocess.run(
            [sys.executable, "-c", "print(6 * 7)"], stdout=subprocess.PIPE, check=True
        )
        assert ran.stdout == b"42\n"
        assert os.system("exit 3") == 3 << 8
        use(linker)
        linker.close()
        store.close()
    elif what == "leaving":
        leaving(address, lambda: None)
        leaving(address, dropping, segment_bytes=16 << 20)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
