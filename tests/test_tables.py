"""Tables: tiles that cover every run once, equal and aligned; divisions that are exact."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.device import divide
from kvferry.kernels.tables import TILE_COLUMNS, Tables, build_tables, divisor, layer_ranges
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions
from kvferry.testing import make_tensors


def divided(number: int, by: int) -> int:
    packed = divisor(by)
    multiplier, shift = packed & 0xFFFFFFFF, (packed >> 32) - 1
    return (2 * number * multiplier >> 32) >> shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_division_by_multiplier_is_exact(number: int, by: int) -> None:
    for near in {number, number // by * by, max(0, number // by * by - 1), 0, 2**31 - 1}:
        assert divided(near, by) == near // by


def test_multipliers_fit_their_fields() -> None:
    for by in [*range(1, 3000), *(2**k + d for k in range(2, 31) for d in (-1, 0, 1)), 2**31 - 1]:
        packed = divisor(by)
        assert packed & 0xFFFFFFFF == packed % 2**32
        assert 2**32 <= packed < 2**63
        assert divided(2**31 - 1, by) == (2**31 - 1) // by


@triton.jit
def _divide_kernel(out_ptr, by: tl.int64, first: tl.int32, COUNT: tl.constexpr):
    number = first + tl.arange(0, COUNT)
    tl.store(out_ptr + tl.arange(0, COUNT), divide(number, by.to(tl.int64)))


@pytest.mark.interpreter
@pytest.mark.parametrize("by", [1, 2, 3, 7, 64, 513, 2**31 - 1])
@pytest.mark.parametrize("first", [0, 1000, 2**31 - 256])
def test_division_in_the_kernel(by: int, first: int, device: torch.device) -> None:
    out = torch.empty(256, dtype=torch.int32, device=device)
    _divide_kernel[(1,)](out, divisor(by), first, 256)
    assert torch.equal(out.cpu().long(), torch.arange(first, first + 256) // by)


def tables_of(layout: CacheLayout, space: str, config: LaunchConfig) -> Tables:
    assert layout.device is not None
    return build_tables(layout.segments(space), layout.num_layers, layout.device, 16, config)


@pytest.mark.parametrize("tile_bytes", [1024, 16384])
@pytest.mark.parametrize("model", sorted(descriptions()))
def test_rows_cover_every_object_byte_once(model: str, tile_bytes: int) -> None:
    layout = CacheLayout.from_description(description(model))
    layout = layout.bind(make_tensors(layout, 1))
    for space in layout.spaces:
        tables = tables_of(layout, space, LaunchConfig(tile_bytes=tile_bytes))
        covered = []
        if tables.tiles:
            assert tables.tiles.rows.shape[1] == TILE_COLUMNS
            for address, stride, offset, num_bytes, *_ in tables.tiles.rows.tolist():
                assert address % 16 == stride % 16 == offset % 16 == num_bytes % 16 == 0
                assert 0 < num_bytes <= tile_bytes
                covered.append((offset, num_bytes))
        for table in tables.units:
            for row in table.rows.tolist():
                covered.append((row[2], row[4] * table.unit_bytes))
                assert row[2] % table.unit_bytes == 0
        end = 0
        for offset, num_bytes in sorted(covered):
            assert offset == end
            end += num_bytes
        assert end == layout.object_bytes[space]
        starts = [t.layer_starts for t in (tables.tiles, *tables.units) if t]
        assert all(len(row) == layout.num_layers + 1 for row in starts)
        moved = sum(t.bytes_per_page for t in (tables.tiles, *tables.units) if t)
        assert moved == layout.object_bytes[space]


def test_tiles_of_a_run_are_nearly_equal() -> None:
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    layout = layout.bind(make_tensors(layout, 1))
    tiles = tables_of(layout, "full", LaunchConfig()).tiles
    assert tiles is not None
    sizes = tiles.rows[:4, 3].tolist()
    assert sizes == [14080, 14080, 13824, 8448]


def test_layer_ranges_join_neighbours() -> None:
    assert layer_ranges([0, 1, 2, 5, 7, 8]) == ((0, 3), (5, 6), (7, 9))
    assert layer_ranges([]) == ()
