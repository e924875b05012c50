"""Keys: different pages never share one, and bad ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.identity import ModelIdentity
from kvferry.layout import CacheLayout
from kvferry.linker.keys import MAX_KEY_LENGTH, KeyScheme, check_page_keys
from kvferry.models import description

plain_text = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text)
SPACES = ("full", "swa", "state")
names = plain_text.filter(lambda text: "/" not in text)
origins = st.tuples(st.text("0123456789abcdef", min_size=32, max_size=32), names)
schemes = st.builds(
    lambda namespace, origin: KeyScheme(namespace, dict.fromkeys(SPACES, origin)), names, origins
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
        f"prod/{layout.fingerprint}/tp1of4-pp0of1-cp0of1-dcp0of1/a/b/full",
        f"prod/{layout.fingerprint}/tp1of4-pp0of1-cp0of1-dcp0of1/c/full",
    ]


def test_replicated_spaces_name_no_rank() -> None:
    def scheme(rank: int, size: int) -> KeyScheme:
        identity = ModelIdentity("m", tp=(rank, size), pp=(1, 2))
        layout = CacheLayout.from_description(description("kimi-linear-48b"), identity=identity)
        return KeyScheme.of(layout, "prod", {"full"})

    first, second, alone = scheme(0, 4), scheme(3, 4), scheme(0, 1)
    (full,) = first.object_keys(["k"], "full")
    assert full.split("/")[2] == "tp0of1-pp1of2-cp0of1-dcp0of1"
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
    for bad in ("", "a/b", "a\0"):
        with pytest.raises(ArgumentError, match="namespace is"):
            KeyScheme(bad, {"full": ("f", "s")})
