"""Draws a measured file's budget curve: the rate under each budget, and what it costs a matmul."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from kvferry.tuning.plans import told_bytes

COLOURS = ("#2e64ad", "#d1495b", "#3f8f4f", "#b98b00", "#7b5ea7", "#00798c")
WIDE = 8
STYLES = {"pack": ("-", "o"), "unpack": ("--", "s")}


def draw(content: Mapping[str, Any], path: Path, warning: str = "") -> None:
    """Write a PNG.

    Args:
        content: of a file of `tuning/configs`, measured.
        path: of the PNG.
        warning: stands under the title, such as that these are no GPU's figures.
    """
    classes = content["classes"]
    beside = [one for one in content["beside_matmul"] if one["matmul_slowdown"]]
    budgets = sorted({one["max_programs"] for one in classes}, key=_last_if_none)
    figure, all_axes = plt.subplots(
        1, 2 if beside else 1, figsize=(11 if beside else 7, 4.2), dpi=110, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    rate = all_axes[0][0]
    sizes = sorted({one["num_bytes"] for one in classes})
    for colour, size in zip(_colours(len(sizes)), sizes, strict=True):
        for direction in STYLES:
            some = [
                one for one in classes if (one["num_bytes"], one["direction"]) == (size, direction)
            ]
            _line(
                rate,
                budgets,
                some,
                "gb_per_s",
                f"{direction}, {told_bytes(size)}",
                colour,
                direction,
            )
    _frame(rate, budgets, "payload, GB/s")
    rates = [one["gb_per_s"] for one in classes]
    if max(rates) > WIDE * min(rates):  # small budgets would lie on the axis
        rate.set_yscale("log")
        rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        rate.yaxis.set_major_formatter("{x:g}")
        rate.yaxis.set_minor_formatter("")
    else:
        rate.set_ylim(bottom=0)
    if beside:
        axes = all_axes[0][1]
        for direction in STYLES:
            some = [one for one in beside if one["direction"] == direction]
            label = f"beside {direction}, {told_bytes(beside[0]['num_bytes'])}"
            _line(axes, budgets, some, "matmul_slowdown", label, COLOURS[0], direction)
        axes.set_ylim(bottom=min(0.95, *(one["matmul_slowdown"] for one in beside)))
        axes.axhline(1, color="#8c8c8c", linewidth=0.8)
        _frame(axes, budgets, "matmul's time, in times of it alone")
    where = f"{content['gpu']}, {content['date']}, Triton {content['triton']}"
    text = "Moves of pages under a budget of programs: " + where
    figure.suptitle(f"{text}\n{warning}" if warning else text, fontsize=10, x=0.01, ha="left")
    figure.savefig(path)
    plt.close(figure)


def _line(
    axes: Axes, budgets: Sequence[int], rows: Sequence[Mapping[str, Any]], key: str, label: str,
    colour: str, direction: str,
) -> None:  # fmt: skip
    rows = sorted(rows, key=lambda one: _last_if_none(one["max_programs"]))
    style, marker = STYLES[direction]
    axes.plot(
        [budgets.index(one["max_programs"]) for one in rows], [one[key] for one in rows],
        linestyle=style, marker=marker, markersize=4, color=colour, label=label,
    )  # fmt: skip


def _frame(axes: Axes, budgets: Sequence[int], what: str) -> None:
    axes.set_xticks(range(len(budgets)), [str(one or "none") for one in budgets])
    axes.set_xlabel("budget, programs")
    axes.set_ylabel(what)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _last_if_none(max_programs: int) -> float:
    return max_programs or float("inf")


def _colours(number: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(number)]
