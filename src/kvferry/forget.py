"""`python -m kvferry forget`: delete old generations from a store, never under a reader.

What is leased stays, and is counted; `--wait` tries again until the leases have ended. Nothing here
leases an object: what exists is read from the master's HTTP port.
"""

import argparse
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from kvferry.errors import ArgumentError, KVFerryError, StoreUnavailable
from kvferry.linker.keys import check_namespace, key_part, stem_of_parts
from kvferry.linker.mooncake import MooncakeStore
from kvferry.linker.mooncake_config import MooncakeConfig

METRICS_PORT = 9003
"""Where a master serves HTTP unless it is told otherwise (`--metrics_port`)."""

HTTP_TIMEOUT_S = 30.0
POLL_S = 1.0

Stem = tuple[str, str]
"""Model and generation, as they stand in keys."""


@dataclass(frozen=True)
class Deleted:
    """What became of a generation.

    Attributes:
        num_deleted: objects.
        num_left: objects that are still there: leased, or being written.
    """

    num_deleted: int
    num_left: int


class Keeper:
    """A namespace of a store, by model and generation.

    Attributes:
        namespace: the first part of its keys.
    """

    def __init__(self, store: MooncakeStore, metrics: str, namespace: str) -> None:
        """Look at a namespace.

        Args:
            store: connected to the master.
            metrics: `host:port` of the master's HTTP.
            namespace: the first part of its keys.

        Raises:
            ArgumentError: no such namespace can be.
        """
        check_namespace(namespace)
        self.namespace = namespace
        self._store = store
        self._url = f"http://{metrics}/get_all_keys"

    def generations(self) -> Counter[Stem]:
        """Return how many objects there are of each model's generations.

        Raises:
            StoreUnavailable: nobody answers at the HTTP address.
        """
        # No proxy: the master is one of ours.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self._url, timeout=HTTP_TIMEOUT_S) as reply:
                lines = reply.read().decode(errors="replace").split("\n")
        except (OSError, urllib.error.URLError) as error:
            raise StoreUnavailable(
                f"{self._url} does not answer: {error}; wanted the master's HTTP port, see "
                "--metrics_port of mooncake_master"
            ) from error
        parts = (line.split("/", 3) for line in lines)
        return Counter(
            (part[1], part[2]) for part in parts if len(part) == 4 and part[0] == self.namespace
        )

    def delete(self, stem: Stem, wait_s: float = 0.0) -> Deleted:
        """Delete the objects of a generation that nobody has leased.

        Args:
            stem: model and generation.
            wait_s: how long to try again while some are left.

        Raises:
            StoreError: the store refused, or cannot be reached.
        """
        end_s, num_deleted = time.monotonic() + wait_s, 0
        while True:
            num_deleted += self._store.remove_under(stem_of_parts(self.namespace, *stem))
            num_left = self.generations()[stem]
            left_s = end_s - time.monotonic()
            if not num_left or left_s <= 0:
                return Deleted(num_deleted, num_left)
            time.sleep(min(POLL_S, left_s))


def chosen(
    there: Counter[Stem], model: str | None, generations: Sequence[str], keep: Sequence[str]
) -> list[Stem]:
    """Return which generations are to be deleted.

    Args:
        there: what the namespace has.
        model: whose they are; needed where there are several.
        generations: to be deleted.
        keep: or all but these.

    Raises:
        ArgumentError: no model was chosen, or there is nothing of a generation that is to be kept:
            a mistyped one would delete the right one.
    """
    models = sorted({stem[0] for stem in there})
    if model is None and len(models) > 1:
        raise ArgumentError(f"--model is not given, wanted one of {[unquote(m) for m in models]}")
    chosen_model = key_part(model) if model is not None else (models or ["-"])[0]
    mine = sorted(stem for stem in there if stem[0] == chosen_model)
    if generations:
        wanted = {key_part(generation) for generation in generations}
        return [stem for stem in mine if stem[1] in wanted]
    kept = {key_part(generation): generation for generation in keep}
    for part, generation in kept.items():
        if (chosen_model, part) not in there:
            raise ArgumentError(
                f"--keep is {generation!r}, of which there is nothing, wanted one of "
                f"{[unquote(stem[1]) for stem in mine]}"
            )
    return [stem for stem in mine if stem[1] not in kept]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if nothing chosen is left, 1 if some is, 2 if it could not be."""
    options = _parser().parse_args(arguments)
    try:
        if not options.master:
            raise ArgumentError("--master is not given, and MOONCAKE_MASTER not set")
        config = MooncakeConfig(options.master)
        host = options.master.rpartition(":")[0]
        with MooncakeStore(config) as store:
            metrics = options.metrics or f"{host}:{METRICS_PORT}"
            return _run(Keeper(store, metrics, options.namespace), options)
    except KVFerryError as error:
        print(error)
        return 2


def _run(keeper: Keeper, options: argparse.Namespace) -> int:
    there = keeper.generations()
    named = bool(options.generation or options.keep)
    doomed = chosen(there, options.model, options.generation, options.keep) if named else []
    width = max(len(unquote(part)) for stem in [*there, ("model", "generation")] for part in stem)
    print(f"{'model':{width}}  {'generation':{width}}  objects")
    num_left = 0
    for stem in sorted(there):
        told = ""
        if stem in doomed and options.dry_run:
            told = "  would be deleted"
        elif stem in doomed:
            deleted = keeper.delete(stem, options.wait)
            num_left += deleted.num_left
            told = f"  {deleted.num_deleted} deleted"
            if deleted.num_left:
                told += f", {deleted.num_left} left: leased, or being written"
        print(f"{unquote(stem[0]):{width}}  {unquote(stem[1]):{width}}  {there[stem]:7}{told}")
    if not named:
        print("nothing deleted: no --generation and no --keep")
    return 1 if num_left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry forget",
        description="List a namespace's generations, and delete old ones. What readers have leased "
        "stays until its lease ends.",
    )
    parser.add_argument(
        "--master", default=os.environ.get("MOONCAKE_MASTER", ""), help="HOST:PORT of the master"
    )
    parser.add_argument(
        "--metrics", help=f"HOST:PORT of its HTTP; the master's host and {METRICS_PORT} by default"
    )
    parser.add_argument("--namespace", default="kvferry", help="first part of the keys")
    parser.add_argument("--model", help="whose generations; needed where there are several models")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--generation", action="append", default=[], help="to be deleted; may be repeated"
    )
    which.add_argument(
        "--keep", action="append", default=[], help="delete all but these; may be repeated"
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="seconds to wait for leases to end"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    return parser
