"""Pages that are handed out and taken back, as an engine's allocator does."""

import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pages:
    """Pages of a prefix, and what they hold.

    Attributes:
        keys: a key for each page.
        tags: what each page tells; see `kvferry.testing`.
        page_ids: where they are, for each index space.
    """

    keys: list[str]
    tags: list[int]
    page_ids: dict[str, list[int]]


class FreePages:
    """The free pages of an index space, in an order that scatters neighbours.

    Attributes:
        num_pages: of the space.
    """

    def __init__(self, num_pages: int, seed: int = 0) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, num_pages: int) -> list[int]:
        """Return pages that nobody else has.

        Raises:
            MemoryError: there are not as many.
        """
        if num_pages > len(self._free):
            raise MemoryError(f"{num_pages} pages wanted, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_pages)]

    def give(self, page_ids: Iterable[int]) -> None:
        """Take pages back; they go to the end of the queue.

        Raises:
            ValueError: a page is not in use, or not one of the space.
        """
        given, free = list(page_ids), set(self._free)
        for page_id in given:
            if page_id in free or not 0 <= page_id < self.num_pages:
                raise ValueError(f"page {page_id} is not in use, wanted one that is")
            free.add(page_id)
        self._free[:0] = given
