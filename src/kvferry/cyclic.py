"""Which tokens of a page a rank owns when pages are dealt out to ranks token by token.

With `size` decode-context ranks a global page has `page_size * size` tokens, and row i of rank r's
own page is token `i * size + r` of it. Global pages of two deployments are equal, or one holds a
whole number of the other's.
"""

import math
from dataclasses import dataclass

from kvferry.errors import LayoutError


@dataclass(frozen=True)
class Deal:
    """One deployment's page: `page_size` rows on each of `size` ranks."""

    page_size: int
    size: int

    @property
    def tokens(self) -> int:
        """Tokens of a global page."""
        return self.page_size * self.size

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.page_size} on each of {self.size} dcp ranks)"


@dataclass(frozen=True)
class Rows:
    """Rows of a reader's page and of a writer's that hold the same tokens.

    Row `reader_first + i * reader_step` is `writer_first + i * writer_step`, for i under `count`.
    """

    count: int
    reader_first: int
    reader_step: int
    writer_first: int
    writer_step: int


def pages_per_page(writer: Deal, reader: Deal) -> tuple[int, int]:
    """Return how many reader pages a writer page holds, and writer pages a reader page.

    Raises:
        LayoutError: neither size divides the other.
    """
    larger, smaller = max(writer.tokens, reader.tokens), min(writer.tokens, reader.tokens)
    if larger % smaller:
        raise LayoutError(
            f"page_size: the reader's pages have {reader}, the writer's {writer}, wanted sizes of "
            "which one divides the other"
        )
    ratio = larger // smaller
    return (ratio, 1) if writer.tokens > reader.tokens else (1, ratio)


def common_rows(
    writer: Deal,
    writer_rank: int,
    reader: Deal,
    reader_rank: int,
    *,
    writer_page: int = 0,
    reader_page: int = 0,
) -> Rows | None:
    """Return the reader's rows that one writer rank's page holds, None if there are none.

    Args:
        writer: the writer's pages.
        writer_rank: whose page.
        reader: the reader's pages.
        reader_rank: whose page.
        writer_page: which of the writer's global pages that a reader's holds.
        reader_page: which of the reader's global pages that a writer's holds.
    """
    # Reader row j is token `j * reader.size + start` of the writer's global page.
    start = reader_rank + reader_page * reader.tokens - writer_page * writer.tokens
    first = max(0, -(start // reader.size))
    end = min(reader.page_size, -((start - writer.tokens) // reader.size))
    common = math.gcd(writer.size, reader.size)
    step = writer.size // common
    for row in range(first, min(end, first + step)):
        token = row * reader.size + start
        if token % writer.size == writer_rank:
            return Rows(
                -(-(end - row) // step), row, step, token // writer.size, reader.size // common
            )
    return None
