"""A program for the tests of ends that nobody makes: `python exit_program.py WHAT`."""

import sys
import threading
import time

from fork_program import LIMIT_S, connect, use

from kvferry.linker.master import LocalMaster
from kvferry.linker.owner import LocalOwner


def main(what: str) -> None:
    """Leave everything open, and end or wait for a signal."""
    master = LocalMaster().start()
    owner = LocalOwner(master.address, 64 << 20).start()
    store, linker = connect(master.address)
    use(linker)
    keys, pages = [f"left-{page}" for page in range(3)], [8, 9, 10]
    if what == "open":
        linker.save(keys, pages)
        print("ready", flush=True)
        return
    if what == "daemon":
        threading.Thread(target=lambda: [use(linker) for _ in iter(int, 1)], daemon=True).start()
        time.sleep(0.2)
        print("ready", flush=True)
        return
    save = linker.save(keys, pages, layerwise=True)
    save.layer_written(0)
    unstarted = linker.load([f"page-{page}" for page in range(3)], [12, 13, 14], layerwise=True)
    print("ready", flush=True)
    if what == "in a block":
        with master, owner, store, linker:
            save.result(LIMIT_S)
    elif what == "in a finally":
        try:
            save.result(LIMIT_S)
        finally:
            linker.close()
            store.close()
            owner.stop()
            master.stop()
    else:
        save.result(LIMIT_S)
    raise AssertionError(f"nothing has ended {unstarted!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
