"""Files of tuned launches: which numbers are picked for a move, and which files are refused."""

import json
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ArgumentError
from kvferry.launch import LaunchConfig
from kvferry.tuned import CONFIGS, DIRECTIONS, for_device, parse, read_folder

CONFIG = {"tile_bytes": 16384, "tile_warps": 4, "units_per_program": 1024, "unit_warps": 4,
          "page_run_bytes": 4096}  # fmt: skip


def entry(direction: str, num_bytes: int, max_programs: int = 0, **config: int) -> dict[str, Any]:
    return {
        "direction": direction,
        "num_bytes": num_bytes,
        "max_programs": max_programs,
        "config": {**CONFIG, **config},
    }


def content(*classes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "gpu": "NVIDIA X1",
        "device_names": ["NVIDIA X1"],
        "origin": "derived",
        "architecture": "sm_90",
        "triton": "3.6.0",
        "classes": list(classes) or [entry("pack", 1 << 20), entry("unpack", 1 << 20)],
        **changes,
    }


def measured() -> dict[str, Any]:
    figures = {"gb_per_s": 1000.0, "share_of_copy": 0.97}
    classes = [{**entry(direction, 1 << 20), **figures} for direction in DIRECTIONS]
    about = {"torch": "2.13", "driver": "580.1", "date": "2026-01-02", "commit": "abc"}
    return content(*classes, origin="measured", **about)


# ---- which entry is picked ----

SIZES = st.integers(1, 1 << 40)
BUDGETS = st.sampled_from([0, 0, 1, 2, 4, 8, 16, 64, 132, 1000])


def apart(a: int, b: int) -> Fraction:
    """How far two numbers are apart by ratio, at least 1."""
    return max(Fraction(a, b), Fraction(b, a))


@given(
    st.lists(st.tuples(st.sampled_from(DIRECTIONS), SIZES, BUDGETS), max_size=12, unique=True),
    st.sampled_from(DIRECTIONS),
    SIZES,
    BUDGETS | st.integers(0, 2000),
    st.booleans(),
)
def test_the_nearest_class_is_chosen(
    keys: list[tuple[str, int, int]], direction: str, size: int, budget: int, on_edge: bool
) -> None:
    keys = list(dict.fromkeys([*keys, ("pack", 1 << 20, 0), ("unpack", 1 << 20, 4)]))
    # Each entry has numbers of its own, by which it is known again.
    marks = {key: 16 + number for number, key in enumerate(keys)}
    tuned = parse(content(*(entry(*key, page_run_bytes=marks[key]) for key in keys)), "it")
    if on_edge:
        size = keys[0][1] * 2
    of_direction = [key for key in keys if key[0] == direction]
    nearest = min((apart(key[1], size), key[1]) for key in of_direction)[1]
    of_size = [key for key in of_direction if key[1] == nearest]
    # No bound counts as a budget beyond all others.
    endless = 1 << 60
    found = min(of_size, key=lambda key: (apart(key[2] or endless, budget or endless), key[2]))
    wanted = LaunchConfig(page_run_bytes=marks[found], max_programs=budget)
    assert tuned.choose(direction, size, budget) == wanted
    assert tuned.choose(direction, size, budget) == wanted


def test_a_move_between_two_classes_as_near_takes_the_smaller() -> None:
    rows = [entry(way, size, page_run_bytes=size) for way in DIRECTIONS for size in (16, 64, 1024)]
    tuned = parse(content(*rows), "it")
    picked = {size: tuned.choose("pack", size).page_run_bytes for size in (0, 32, 33, 256, 257)}
    assert picked == {0: 16, 32: 16, 33: 64, 256: 64, 257: 1024}
    with pytest.raises(ArgumentError, match="direction is 'sum', wanted one of"):
        tuned.choose("sum", 1)


# ---- which file serves a device ----


def folder_of(tmp_path: Path, **names: list[str]) -> Path:
    for stem, device_names in names.items():
        text = json.dumps(content(gpu=stem, device_names=device_names))
        (tmp_path / f"{stem}.json").write_text(text)
    return tmp_path


def test_the_longest_beginning_of_a_name_serves(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, default=[], a=["NVIDIA H100"], b=["NVIDIA H100 PCIe", "NVIDIA B2"], c=["NVIDIA B"]
    )
    wanted = {
        "NVIDIA H100": "a", "NVIDIA H100 80GB HBM3": "a", "NVIDIA H100-SXM": "a",
        "NVIDIA H100 PCIe": "b", "NVIDIA H100 PCIe 94GB": "b", "NVIDIA H100x": "default",
        "NVIDIA H1000": "default", "NVIDIA B200": "default", "GB NVIDIA H100": "default",
        "cpu": "default", "": "default",
    }  # fmt: skip
    assert {name: for_device(name, folder).gpu for name in wanted} == wanted


@pytest.mark.parametrize(
    ("device_name", "stem"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100"),
        ("NVIDIA H100 PCIe", "NVIDIA_H100"),
        ("NVIDIA H200", "NVIDIA_H200"),
        ("NVIDIA B200", "NVIDIA_B200"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA_B300"),
        ("NVIDIA GB200", "NVIDIA_GB200"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA_A100"),
        ("AMD Instinct MI300X", "AMD_MI300X"),
        ("NVIDIA GeForce RTX 4090", "default"),
        ("cpu", "default"),
    ],
)
def test_names_that_torch_reports_find_their_file(device_name: str, stem: str) -> None:
    assert for_device(device_name) == read_folder(CONFIGS)[stem]


def test_a_folder_without_a_default_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has \['a'\], wanted default.json too"):
        for_device("cpu", folder_of(tmp_path, a=[]))


# ---- which files are refused ----

REMOVED = object()


def changed(plain: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The content with one place changed or removed."""
    plain = deepcopy(plain)
    inner: Any = plain
    for key in path[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return plain


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "f.json: schema is 2, wanted 1"),
        (("schema",), REMOVED, r"f.json has \[.*\], wanted schema too"),
        (("origin",), "guessed", "f.json: origin is 'guessed', wanted one of"),
        (("triton",), 3.6, "f.json: triton is 3.6, wanted a text"),
        (("device_names",), "NVIDIA X1", "device_names is 'NVIDIA X1', wanted a list"),
        (("device_names",), [""], r"device_names is \[''\], wanted a list of texts"),
        (("classes",), [], r"f.json: classes is \[\], wanted an entry with direction 'pack'"),
        (("classes", 1), 7, r"f.json: classes\[1\] is 7, wanted an object"),
        (("classes", 1, "direction"), "both", r"classes\[1\]: direction is 'both', wanted one of"),
        (("classes", 1, "direction"), "pack", r"classes\[1\] has .*, wanted each once"),
        (("classes", 0, "num_bytes"), 0, r"classes\[0\]: num_bytes is 0, wanted an integer of"),
        (("classes", 0, "num_bytes"), True, r"classes\[0\]: num_bytes is True, wanted an integer"),
        (("classes", 0, "max_programs"), -1, r"max_programs is -1, wanted an integer of at least"),
        (("classes", 0, "max_programs"), 1 << 20, r"classes\[0\].config: max_programs is 1048576"),
        (("classes", 0, "gb_per_s"), 900, "gb_per_s is 900, wanted no such figure"),
        (("classes", 0, "spread"), 0.1, "spread is 0.1, wanted no such figure"),
        (("classes", 0, "config"), None, r"classes\[0\].config is None, wanted an object"),
        (("classes", 0, "config", "tile_warps"), REMOVED, r"config has .*, wanted tile_warps too"),
        (("classes", 0, "config", "tile_bytes"), 5000, "tile_bytes is 5000, wanted a power of two"),
        (("classes", 0, "config", "tiles"), 1, r"config has \['tiles'\], wanted .* alone"),
    ],
)
def test_a_bad_file_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    parse(content(), "f.json")
    with pytest.raises(ArgumentError, match=message):
        parse(changed(content(), path, value), "f.json")


@pytest.mark.parametrize("path", [("date",), ("driver",), ("classes", 0, "share_of_copy")])
def test_a_measurement_says_what_it_was(path: tuple[Any, ...]) -> None:
    assert parse(measured(), "f.json").origin == "measured"
    with pytest.raises(ArgumentError, match=f"wanted {path[-1]} too"):
        parse(changed(measured(), path, REMOVED), "f.json")


def test_a_spread_may_be_missing_and_may_be_zero() -> None:
    place = ("classes", 0, "spread")
    assert parse(changed(measured(), place, 0), "f.json") == parse(measured(), "f.json")
    with pytest.raises(ArgumentError, match=r"classes\[0\]: spread is -0.1, wanted a number of at"):
        parse(changed(measured(), place, -0.1), "f.json")


def test_what_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, default=[])
    (folder / "bad.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"bad\.json cannot be read as JSON"):
        for_device("cpu", folder)
