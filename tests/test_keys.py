"""Keys: different pages never share one, and bad ones are refused."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from kvferry.errors import ArgumentError, LayoutError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.keys import (
    MAX_KEY_LENGTH,
    MAX_PART_LENGTH,
    KeyScheme,
    check_page_keys,
    key_part,
)
from kvferry.models import description

plain_text = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text)
SPACES = ("full", "swa", "state")
names = plain_text.filter(lambda text: "/" not in text)
origins = st.tuples(st.text("0123456789abcdef", min_size=32, max_size=32), names)
schemes = st.builds(
    lambda namespace, origin, model, generation, sealed: KeyScheme(
        namespace, dict.fromkeys(SPACES, origin), model, generation, sealed
    ),
    names,
    origins,
    plain_text,
    plain_text,
    st.booleans(),
)
parts = st.tuples(schemes, plain_text, st.sampled_from(SPACES))


@given(parts, parts)
def test_one_object_key_means_one_page(
    one: tuple[KeyScheme, str, str], other: tuple[KeyScheme, str, str]
) -> None:
    keys = [scheme.object_keys([key], space)[0] for scheme, key, space in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_a_key_holds_namespace_fingerprint_share_and_space() -> None:
    layout = CacheLayout.from_description(
        description("odd-bytes"), identity=ModelIdentity("m", tp=(1, 4))
    )
    scheme = KeyScheme.of(layout, "prod")
    assert scheme.object_keys(["a/b", "c"], "full") == [
        f"prod/m/-/{layout.fingerprint}/tp1of4-pp0of1-cp0of1-dcp0of1/a/b/full",
        f"prod/m/-/{layout.fingerprint}/tp1of4-pp0of1-cp0of1-dcp0of1/c/full",
    ]


def test_model_and_generation_stand_before_what_ranks_differ_in() -> None:
    """So that one prefix deletes a generation on all ranks, and nothing of another's."""

    def scheme(model: str, generation: str, rank: int = 0) -> KeyScheme:
        identity = ModelIdentity(model, generation=generation, tp=(rank, 2))
        return KeyScheme.of(
            CacheLayout.from_description(description("odd-bytes"), identity=identity), "prod"
        )

    first, other_rank = scheme("org/m", "step 1"), scheme("org/m", "step 1", 1)
    assert first.stem == other_rank.stem == "prod/org%2Fm/step%201/"
    for other in (scheme("org/m", "step 10"), scheme("org/m", ""), scheme("org", "m/step 1")):
        assert not other.object_keys(["k"], "full")[0].startswith(first.stem)
        assert other.fingerprint("full") != first.fingerprint("full")
    for each in (first, other_rank):
        assert each.object_keys(["k"], "full")[0].startswith(first.stem)


@given(st.text(max_size=300), st.text(max_size=300))
def test_parts_of_keys_are_bounded_and_tell_names_apart(one: str, other: str) -> None:
    parts = [key_part(one), key_part(other)]
    assert all(1 <= len(part) <= MAX_PART_LENGTH and part.isascii() for part in parts)
    assert not set("/\0 ") & set("".join(parts))
    assert (parts[0] == parts[1]) == ((one or "-") == (other or "-"))


def test_a_key_is_never_longer_than_the_store_takes() -> None:
    identity = ModelIdentity("/" * 300, generation="\udcff" * 300, tp=(9999, 10000))
    layout = CacheLayout.from_description(description("odd-bytes"), identity=identity)
    scheme = KeyScheme.of(layout, "n" * MAX_PART_LENGTH)
    (key,) = scheme.object_keys(["\U0001f600" * MAX_KEY_LENGTH], "full")
    assert len(key) <= 2048
    key.encode()


def test_stages_that_are_cut_in_other_places_share_no_key() -> None:
    def keys(first: int, end: int) -> list[str]:
        identity = ModelIdentity("m", pp=(1, 3), layers=(first, end))
        plain = {**description("llama-3.1-8b-nhd"), "num_layers": 20, "object_bytes": {}}
        plain["pools"] = [{**pool, "layers": [*range(20)]} for pool in plain["pools"]]
        layout = CacheLayout.from_description(plain, identity=identity)
        return KeyScheme.of(layout, "prod").object_keys(["k"], "full")

    one, other = keys(20, 40), keys(21, 41)
    assert one == keys(20, 40)
    assert one[0].split("/")[3] != other[0].split("/")[3]
    assert one[0].split("/")[4] == "tp0of1-pp1of3.layers20to39-cp0of1-dcp0of1"
    assert other[0].split("/")[4] == "tp0of1-pp1of3.layers21to40-cp0of1-dcp0of1"


def test_objects_without_trailers_have_keys_of_their_own() -> None:
    layout = CacheLayout.from_description(description("odd-bytes"))
    sealed, unsealed = (
        KeyScheme.of(layout, "prod", sealed=each).object_keys(["k"], "full")[0]
        for each in (True, False)
    )
    assert unsealed == sealed + ".unsealed"


short = st.sampled_from(["", "a", "b", "a/b", "ü"])
pairs = st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 3)])


@st.composite
def identities(draw: st.DrawFn) -> ModelIdentity:
    pp = draw(pairs)
    return ModelIdentity(
        *(draw(short) for _ in range(4)),
        tp=draw(pairs),
        pp=pp,
        cp=draw(pairs),
        dcp=draw(pairs),
        config=draw(short),
        generation=draw(short),
        layers=None if pp[1] == 1 else draw(st.sampled_from([(0, 2), (1, 3), (1, 4)])),
    )


@given(identities(), st.data())
def test_one_key_means_one_identity_or_one_but_for_its_rank(
    one: ModelIdentity, data: st.DataObject
) -> None:
    """Every field tells, of each index space; of a replicated one all but the tensor-parallel."""
    changed = data.draw(st.sets(st.sampled_from([field.name for field in fields(one)]), max_size=2))
    drawn = data.draw(identities())
    try:
        other = replace(one, **{name: getattr(drawn, name) for name in changed})
    except LayoutError:
        reject()
    keys = []
    for identity in (one, other):
        layout = CacheLayout.from_description(description("kimi-linear-48b"), identity=identity)
        scheme = KeyScheme.of(layout, "prod", {"full"})
        keys.append([scheme.object_keys(["k"], space)[0] for space in ("full", "state")])
    assert (keys[0][1] == keys[1][1]) == (one == other)
    assert (keys[0][0] == keys[1][0]) == (replace(one, tp=(0, 1)) == replace(other, tp=(0, 1)))


def test_replicated_spaces_name_no_rank() -> None:
    def scheme(rank: int, size: int) -> KeyScheme:
        identity = ModelIdentity("m", tp=(rank, size), pp=(1, 2), layers=(13, 40))
        layout = CacheLayout.from_description(description("kimi-linear-48b"), identity=identity)
        return KeyScheme.of(layout, "prod", {"full"})

    first, second, alone = scheme(0, 4), scheme(3, 4), scheme(0, 1)
    (full,) = first.object_keys(["k"], "full")
    assert full.split("/")[4] == "tp0of1-pp1of2.layers13to39-cp0of1-dcp0of1"
    for other in (second, alone):
        assert other.object_keys(["k"], "full") == [full]
        assert other.object_keys(["k"], "state") != first.object_keys(["k"], "state")
    with pytest.raises(ArgumentError, match=r"replicated is \['swa'\], wanted index spaces"):
        KeyScheme.of(CacheLayout.from_description(description("llama-3.1-8b-nhd")), "n", {"swa"})


def test_bad_keys_are_refused_by_place() -> None:
    for bad in ("", "a\0b", "x" * (MAX_KEY_LENGTH + 1), 7):
        with pytest.raises(ArgumentError, match=r"keys\[1\] is "):
            check_page_keys(["a", bad])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"keys\[3\] repeats keys\[1\]: 'b'"):
        check_page_keys(["a", "b", "c", "b"])
    with pytest.raises(ArgumentError, match="one string"):
        check_page_keys("abc")
    for bad in ("", "a/b", "a\0", "n" * (MAX_PART_LENGTH + 1), "\ud800"):
        with pytest.raises(ArgumentError, match="namespace is"):
            KeyScheme(bad, {"full": ("f", "s")})
