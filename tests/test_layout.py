"""Layouts: sizes that must come out, every refusal by name, fingerprints, views with strides."""

import copy
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.fingerprint import MEANING
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.models import description, descriptions
from kvferry.pools import Pool, PoolTensors
from kvferry.testing import make_tensors

SMALL: dict[str, Any] = {
    "page_size": 4,
    "num_layers": 3,
    "window_tokens": 6,
    "pools": [
        {"name": "k", "index": "full", "rows": "token", "row_shape": [2, 8], "dtype": "bfloat16",
         "layers": [0, 2]},
        {"name": "v", "index": "full", "rows": "token", "row_shape": [2, 4], "dtype": "bfloat16",
         "layers": [0, 2]},
        {"name": "ssm", "index": "state", "rows": "page", "row_shape": [3, 5], "dtype": "float32",
         "layers": [1]},
    ],
}  # fmt: skip


def small(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SMALL), **changes}


def with_pool(number: int, /, **changes: Any) -> dict[str, Any]:
    plain = small()
    plain["pools"][number].update(changes)
    return plain


@pytest.mark.parametrize("model", sorted(descriptions()))
def test_object_sizes_of_real_models(model: str) -> None:
    plain = description(model)
    layout = CacheLayout.from_description(plain)
    assert dict(layout.object_bytes) == plain["object_bytes"]
    for space in layout.spaces:
        offsets = layout.layer_offsets[space]
        assert offsets[0] == 0
        assert offsets[-1] == layout.object_bytes[space]
        assert list(offsets) == sorted(offsets)
        end = 0
        for buffer in layout.buffers[space]:
            assert buffer.object_offset == end
            end += buffer.pool.page_bytes
        assert end == layout.object_bytes[space]


def test_layers_without_buffers_take_no_bytes() -> None:
    layout = CacheLayout.from_description(SMALL)
    assert layout.layer_offsets["full"] == (0, 192, 192, 384)
    assert layout.layer_offsets["state"] == (0, 0, 60, 60)
    assert layout.window_pages == 2
    assert layout.spaces == ("full", "state")


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (small(page_size=0), ["page_size", "0", "1 .."]),
        (small(num_layers="3"), ["num_layers", "'3'"]),
        (small(pools=[]), ["at least one"]),
        (small(pools=SMALL["pools"][:1] * 2), ["['k', 'k']", "each name once"]),
        (with_pool(0, name=""), ["name", "''"]),
        (with_pool(0, index="half"), ["'k'", "'half'", "full"]),
        (with_pool(0, rows="slot"), ["'k'", "'slot'", "token"]),
        (with_pool(2, rows="token"), ["'ssm'", "state slot"]),
        (with_pool(1, layers=[2, 0]), ["'v'", "(2, 0)", "ascending"]),
        (with_pool(1, layers=[]), ["'v'", "at least one"]),
        (with_pool(1, layers=[0, 3]), ["'v'", "layer 3", "0 .. 2"]),
        (with_pool(1, row_shape=[2, 0]), ["'v'", "(2, 0)"]),
        (with_pool(1, dtype="bfloat17"), ["'v'", "'bfloat17'"]),
        (with_pool(0, page_bytes=127), ["'k'", "127", "128"]),
        (small(object_bytes={"full": 383}), ["'full'", "384", "383"]),
        (with_pool(2, row_shape=[2**30, 5]), ["'state'", "at most"]),
    ],
)
def test_bad_descriptions_are_refused_by_name(plain: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        CacheLayout.from_description(plain)
    for word in words:
        assert word in str(caught.value)


def test_missing_entry_is_named() -> None:
    plain = small()
    del plain["pools"][1]["dtype"]
    with pytest.raises(LayoutError, match=r"'v'.*'dtype'"):
        CacheLayout.from_description(plain)


def test_bind_names_pool_layer_got_and_wanted() -> None:
    layout = CacheLayout.from_description(SMALL)

    def refused(pool: str, layer_id: int, tensor: torch.Tensor, *words: str) -> None:
        tensors = make_tensors(layout, 3)
        tensors[pool][layer_id] = tensor
        with pytest.raises(LayoutError) as caught:
            layout.bind(tensors)
        for word in (pool, f"layer {layer_id}", *words):
            assert word in str(caught.value)

    refused("k", 2, torch.empty(12, 2, 8), "float32", "bfloat16")
    refused("k", 2, torch.empty(12, 8, 2, dtype=torch.bfloat16), "(8, 2)", "(2, 8)")
    refused("v", 0, torch.empty(3, 2, 4, dtype=torch.bfloat16), "3 rows", "4")
    refused("v", 0, torch.empty(12, 1, 4, dtype=torch.bfloat16).expand(12, 2, 4), "overlap")
    refused("v", 0, torch.empty(12, 4, 2, dtype=torch.bfloat16).mT, "order")
    refused("ssm", 1, torch.empty(1, 5, dtype=torch.float32).expand(4, 3, 5), "overlap")
    refused("ssm", 1, torch.empty(4, 3, 5, device="meta"), "meta", "cpu")
    missing = make_tensors(layout, 3)
    del missing["v"][2]
    with pytest.raises(LayoutError, match=r"layers of pool 'v': missing \[2\]"):
        layout.bind(missing)
    foreign = {**make_tensors(layout, 3), "scales": {0: torch.empty(3)}}
    with pytest.raises(LayoutError, match=r"not described \['scales'\]"):
        layout.bind(foreign)


def test_pools_without_memory_are_refused() -> None:
    layout = CacheLayout.from_description(SMALL)
    with pytest.raises(LayoutError, match="is on meta, wanted a CPU or CUDA device"):
        layout.bind(make_tensors(layout, 3, torch.device("meta")))


def test_one_memory_under_two_names_is_refused() -> None:
    layout = CacheLayout.from_description(SMALL)
    tensors = make_tensors(layout, 3)
    tensors["k"][2] = tensors["k"][0]
    with pytest.raises(LayoutError, match="'k' layer 2: shares memory with pool 'k' layer 0"):
        layout.bind(tensors)


def test_strides_and_offsets_come_from_the_tensor() -> None:
    heads, page, width = 2, 4, 8
    storage = torch.empty(2, 5 * page + 3, heads, width, dtype=torch.bfloat16)
    layout = CacheLayout.from_tensors(
        [
            PoolTensors("k", "full", "token", {0: storage[0]}),
            PoolTensors("v", "full", "token", {0: storage[1]}),
        ],
        page_size=page,
        num_layers=1,
    )
    k, v = layout.buffers["full"]
    row_bytes = heads * width * 2
    assert v.address - k.address == storage.shape[1] * row_bytes
    assert k.page_stride_bytes == page * row_bytes
    assert layout.num_pages == {"full": 5}
    assert [run.length_bytes for run in k.runs] == [page * row_bytes]


def test_views_of_a_wider_pool_have_a_pitch() -> None:
    whole = torch.empty(12, 6, 8, dtype=torch.bfloat16)
    layout = CacheLayout.from_tensors(
        [PoolTensors("k", "full", "token", {0: whole[:, 2:4]})], page_size=4, num_layers=1
    )
    (buffer,) = layout.buffers["full"]
    (run,) = buffer.runs
    assert (run.length_bytes, run.count, run.pitch_bytes) == (32, 4, 96)
    assert buffer.address == whole.data_ptr() + 32
    assert layout.num_ranges("full") == 4
    assert layout.object_bytes["full"] == 4 * 32


def test_head_major_and_token_major_differ_in_fingerprint_only_by_strides() -> None:
    token_major = torch.empty(3, 4, 4, 8)
    head_major = torch.empty(3, 4, 4, 8).transpose(1, 2)
    assert token_major.shape == head_major.shape
    layouts = [
        CacheLayout.from_tensors(
            [PoolTensors("k", "full", "page", {0: tensor})], page_size=4, num_layers=1
        )
        for tensor in (token_major, head_major)
    ]
    assert layouts[0].fingerprint != layouts[1].fingerprint
    assert layouts[0].pools[0].order == (0, 1, 2)
    assert layouts[1].pools[0].order == (1, 0, 2)


def test_alignment_class_is_that_of_the_worst_run() -> None:
    layout = CacheLayout.from_description(description("fp4-scales-odd"))
    assert layout.alignment_bytes("k") == 4
    whole = torch.empty(8 * 64 + 64, dtype=torch.uint8)
    for skip, wanted in ((0, 16), (8, 8), (4, 4), (2, 2), (1, 1)):
        start = -whole.data_ptr() % 16 + skip
        bound = CacheLayout.from_tensors(
            [PoolTensors("k", "full", "page", {0: whole[start : start + 512].view(8, 64)})],
            page_size=1,
            num_layers=1,
        )
        assert bound.alignment_bytes("k") == wanted
    with pytest.raises(LayoutError, match=r"'nope'.*'k'"):
        layout.alignment_bytes("nope")


def test_fingerprint_tells_everything_that_changes_the_bytes() -> None:
    identity = ModelIdentity("m", "r1", "fp8", "draft", (1, 2), (0, 2), layers=(0, 3))
    base = CacheLayout.from_description(SMALL, identity=identity).fingerprint
    others = [
        CacheLayout.from_description(plain, identity=identity).fingerprint
        for plain in (
            small(page_size=8),
            small(num_layers=4),
            small(pools=[SMALL["pools"][1], SMALL["pools"][0], SMALL["pools"][2]]),
            with_pool(0, name="key"),
            with_pool(0, index="swa"),
            with_pool(0, row_shape=[4, 4]),
            with_pool(0, dtype="float16"),
            with_pool(0, layers=[0, 1]),
            with_pool(1, rows="page", row_shape=[4, 2, 4]),
            with_pool(1, rows="page", row_shape=[4, 2, 4], token_axis=0),
            with_pool(2, order=[1, 0]),
            with_pool(2, token_planes=[3]),
            with_pool(0, shard_axis=0),
            with_pool(0, shard_axis=1),
            with_pool(0, shard_axis=0, shard_totals=[2]),
            with_pool(0, shard_axis=1, shard_parts=[2, 6]),
            with_pool(0, shard_axis=1, shard_parts=[6, 2]),
        )
    ]
    others += [
        CacheLayout.from_description(SMALL, identity=ModelIdentity(**changed)).fingerprint
        for changed in (
            {**vars(identity), "model": "n"},
            {**vars(identity), "revision": "r2"},
            {**vars(identity), "kv_dtype": "bf16"},
            {**vars(identity), "draft": ""},
            {**vars(identity), "tp": (0, 2)},
            {**vars(identity), "tp": (1, 4)},
            {**vars(identity), "pp": (1, 2), "layers": (3, 6)},
            {**vars(identity), "layers": (0, 4)},
            {**vars(identity), "layers": (1, 3)},
            {**vars(identity), "config": "c"},
            {**vars(identity), "generation": "2"},
            {**vars(identity), "cp": (0, 2)},
            {**vars(identity), "dcp": (0, 2)},
        )
    ]
    assert len({base, *others}) == 1 + len(others)
    assert base == CacheLayout.from_description(small(), identity=identity).fingerprint
    assert len(base) == 32


DECIDED = {
    "page_shape": "page_size, rows and row_shape tell it",
    "page_bytes": "page_shape and dtype tell it",
    "head_group": "pools lie one after another in pool order; part of the canonical fingerprint",
}


def test_every_field_of_a_pool_is_in_the_fingerprint_or_decided_against() -> None:
    assert {field.name for field in fields(Pool)} == {*MEANING, *DECIDED}
    assert not set(MEANING) & set(DECIDED)


shapes = st.permutations([4, 4, 2])
entries = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["k", "v"]),
        "index": st.sampled_from(["full", "swa", "state"]),
        "rows": st.sampled_from(["token", "page"]),
        "row_shape": shapes | shapes.map(lambda shape: [1, *shape]),
        "dtype": st.sampled_from(["float16", "bfloat16", "uint8"]),
        "layers": st.sampled_from([[0], [1], [0, 1]]),
        "token_axis": st.sampled_from([None, 0, 1, 2]),
        "token_planes": st.sampled_from([(), (8,), (4, 4)]),
        "shard_axis": st.sampled_from([None, 0, 1]),
        "shard_parts": st.sampled_from([(), (4,), (1, 3), (3, 1), (2,)]),
        "shard_totals": st.sampled_from([(), (4,), (8,), (1, 3), (2, 6), (2,)]),
        "order": st.sampled_from([None, (0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 3), (2, 1, 3)]),
    }
)


@given(st.data())
def test_what_a_description_says_of_the_bytes_is_in_the_fingerprint(data: st.DataObject) -> None:
    """Two layouts have one fingerprint if all of it agrees, and only then."""
    layouts = []
    entry = data.draw(entries)
    for _ in range(2):
        try:
            layouts.append(
                CacheLayout.from_description(
                    {"page_size": 4, "num_layers": 2, "pools": [entry]},
                    identity=ModelIdentity(tp=(0, 2)),
                )
            )
        except LayoutError:
            reject()
        changed = data.draw(st.sets(st.sampled_from(sorted(entry)), max_size=2))
        other = data.draw(entries)
        entry = {**entry, **{key: other[key] for key in changed}}
    one, other = ([getattr(layout.pools[0], name) for name in MEANING] for layout in layouts)
    assert (layouts[0].fingerprint == layouts[1].fingerprint) == (one == other)


def test_windows_say_what_must_be_there_and_not_what_it_means() -> None:
    wider = CacheLayout.from_description(small(window_tokens=12))
    assert wider.fingerprint == CacheLayout.from_description(SMALL).fingerprint


def test_fingerprint_does_not_change_between_releases_unnoticed() -> None:
    # A stored object is found again only under the same fingerprint: if this value changes,
    # FORMAT_VERSION must change with it, and old caches are lost.
    layout = CacheLayout.from_description(description("deepseek-v3.2-dsa-fp8"))
    assert layout.fingerprint == "29d80b6b92832f545287f9f6817918a0"


def test_identity_is_checked_and_names_the_share() -> None:
    assert ModelIdentity(tp=(3, 8)).share == "tp3of8-pp0of1-cp0of1-dcp0of1"
    stage = ModelIdentity(pp=(1, 3), layers=(20, 40))
    assert stage.share == "tp0of1-pp1of3.layers20to39-cp0of1-dcp0of1"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"tp": (8, 8)}, r"tp is \(rank 8, size 8\)"),
        ({"dcp": [0, 1]}, r"dcp is \[0, 1\], wanted a tuple of two integers"),
        ({"cp": (0, True)}, r"cp is \(0, True\), wanted a tuple"),
        ({"generation": 3}, "generation is 3, wanted a string"),
        ({"config": None}, "config is None, wanted a string"),
        ({"pp": (1, 3)}, r"layers is None, wanted \(first, end\) of this stage: pp is \(1, 3\)"),
        (
            {"pp": (1, 3), "layers": (20, 20)},
            r"layers is \(first 20, end 20\), wanted 0 <= first <",
        ),
        ({"pp": (1, 3), "layers": (20, 40.0)}, r"layers is \(20, 40.0\), wanted a tuple of two"),
        ({"layers": (0, 32)}, r"layers is \(0, 32\), wanted None: pp is \(0, 1\)"),
    ],
)
def test_identities_that_could_not_tell_bytes_apart_are_refused(
    wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        ModelIdentity(**wrong)


def test_num_pages_is_the_smallest_pool() -> None:
    layout = CacheLayout.from_description(SMALL)
    tensors = make_tensors(layout, 6)
    tensors["v"][2] = tensors["v"][2][: 4 * 4 + 3]
    assert layout.bind(tensors).num_pages == {"full": 4, "state": 6}
    assert math.prod(layout.pools[0].page_shape) * 2 == layout.pools[0].page_bytes
