"""The way without packing, to measure beside: ranges of every layer, straight from the pools.

What SGLang's direct linker sends, written from its description: an object per page holds layer
after layer; each buffer of each layer is one ranged call over all pages. It has no checksums.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import CacheLayout, MooncakeStore


@dataclass(frozen=True)
class Sent:
    """What one transfer took.

    Attributes:
        first_ms: until layer 0 was whole.
        last_ms: until every layer was.
        num_calls: store calls that carried bytes; 0 where the store cut them as it liked.
        num_ranges: pieces of one page that they named.
    """

    first_ms: float
    last_ms: float
    num_calls: int
    num_ranges: int


class PoolRanges:
    """Moves pages of a bound layout's only index space between its pools and a store.

    Calls go to Mooncake's client itself, and their lists are made before the clock starts: both
    are to this way's advantage.

    Attributes:
        num_calls: ranged calls of a transfer.
    """

    def __init__(self, layout: CacheLayout, store: MooncakeStore) -> None:
        """Register every pool tensor with the store."""
        (space,) = layout.spaces
        self._client = store.client
        self._buffers = layout.buffers[space]
        self._object_bytes = layout.object_bytes[space]
        for buffer in self._buffers:
            assert buffer.tensor is not None
            store.register(buffer.address, buffer.tensor.numel() * buffer.tensor.element_size())
        self._num_first = sum(buffer.layer_id == 0 for buffer in self._buffers)

    def put(self, keys: Sequence[str], page_ids: Sequence[int]) -> Sent:
        """Write the pages by ranges: one session, one call for each buffer of each layer."""
        calls = self._calls(page_ids)
        begin = time.perf_counter()
        started = self._client.batch_put_session_start(keys, [self._object_bytes] * len(keys))
        first_ms = 0.0
        answers = []
        for number, call in enumerate(calls):
            answers.append(self._client.batch_put_from_multi_buffer_ranges(keys, *call))
            if number + 1 == self._num_first:
                first_ms = ms_since(begin)
        ended = self._client.batch_put_session_end(keys)
        last_ms = ms_since(begin)
        assert set(started) | set(ended) == {0}, (started, ended)
        self._check(calls, answers)
        return Sent(first_ms, last_ms, len(calls), len(calls))

    def put_fragments(self, keys: Sequence[str], page_ids: Sequence[int]) -> Sent:
        """Write the pages in one call, each as a list of its pieces."""
        calls = self._calls(page_ids)
        pages = range(len(keys))
        addresses = [[call[0][page][0] for call in calls] for page in pages]
        sizes = [[call[1][page][0] for call in calls] for page in pages]
        begin = time.perf_counter()
        answers = self._client.batch_put_from_multi_buffers(keys, addresses, sizes)
        taken_ms = ms_since(begin)
        assert set(answers) == {0}, answers
        return Sent(taken_ms, taken_ms, 1, len(calls))

    def get(self, keys: Sequence[str], page_ids: Sequence[int]) -> Sent:
        """Read the pages by ranges: one session, one call for each buffer of each layer."""
        calls = self._calls(page_ids)
        begin = time.perf_counter()
        started = self._client.batch_get_session_start(keys)
        first_ms = 0.0
        answers = []
        for number, call in enumerate(calls):
            answers.append(self._client.batch_get_into_multi_buffer_ranges(keys, *call))
            if number + 1 == self._num_first:
                first_ms = ms_since(begin)
        last_ms = ms_since(begin)
        self._client.batch_get_session_end(keys)
        assert set(started) == {0}, started
        self._check(calls, answers)
        return Sent(first_ms, last_ms, len(calls), len(calls))

    def _calls(self, page_ids: Sequence[int]) -> list[tuple[list[list[int]], ...]]:
        """Return addresses, sizes and offsets of each call, `[page][0]`, in layer order."""
        return [
            (
                [[buffer.address + page * buffer.page_stride_bytes] for page in page_ids],
                [[buffer.pool.page_bytes] for _ in page_ids],
                [[buffer.object_offset] for _ in page_ids],
            )
            for buffer in self._buffers
        ]

    @staticmethod
    def _check(calls: list[tuple[list[list[int]], ...]], answers: list[list[int]]) -> None:
        for (_, sizes, _), answer in zip(calls, answers, strict=True):
            assert answer == [size for (size,) in sizes], answer


def ms_since(begin: float) -> float:
    """Return the milliseconds since a `time.perf_counter()`."""
    return (time.perf_counter() - begin) * 1e3
