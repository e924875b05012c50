"""Objects that a linker with `integrity=False` has stored, compared with what they were."""

import itertools

import torch
from soak_cluster import CHAIN_PAGES, NUM_CHAINS, Engine, Prefix

from kvferry.errors import StoreError, TransferFailed
from kvferry.linker.store import Outcome
from kvferry.testing import write_telling

_chains = itertools.count(1000 * NUM_CHAINS)


class BareObjects:
    """Objects without a checksum; a load of them would not see that they were overwritten."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        layout = engine.linker.layout
        self._memory = torch.zeros(max(layout.object_bytes.values()), dtype=torch.uint8)
        engine.store.register(self._memory.data_ptr(), self._memory.numel())
        self._contents: dict[str, torch.Tensor] = {}

    @property
    def num_stored(self) -> int:
        """How many there were at first."""
        return len(self._contents)

    def store(self) -> int:
        """Save some pages that nobody has saved; return how many objects came of it."""
        prefix, linker = Prefix(next(_chains), CHAIN_PAGES), self._engine.linker
        wanted = prefix.wanted(saving=True)
        ids = self._engine.pages.lend({space: len(pages) for space, pages in wanted.items()})
        if ids is None:
            return 0
        for space, pages in ids.items():
            write_telling(linker.layout, space, pages, prefix.tags(space, saving=True))
        try:
            linker.save(prefix.keys, prefix.rows(ids, saving=True)).result()
        except TransferFailed:
            return 0  # a fault is still felt
        finally:
            self._engine.pages.take_back(ids, "a bare save")
        self._contents = {
            key: content.clone()
            for space in wanted
            for key in linker.keys.object_keys(prefix.keys, space)
            if (content := self._read(key, linker.layout.object_bytes[space])) is not None
        }
        return len(self._contents)

    def compare(self) -> tuple[int, list[str]]:
        """Return how many are there still, and which of them are not what they were."""
        num_there, wrong = 0, []
        for key, content in self._contents.items():
            # Twice, since its memory may be given away while it is read: then it is gone after.
            got = [self._read(key, len(content)) for _ in range(2)]
            num_there += got[1] is not None
            if got[1] is not None and not torch.equal(got[1], content):
                wrong.append(key)
        return num_there, wrong

    def let_go(self) -> None:
        """Think of them no more."""
        self._contents.clear()

    def _read(self, key: str, num_bytes: int) -> torch.Tensor | None:
        try:
            results = self._engine.store.get([key], [self._memory.data_ptr()], [num_bytes])
        except StoreError:
            return None
        return self._memory[:num_bytes] if results[0].outcome is Outcome.FETCHED else None
