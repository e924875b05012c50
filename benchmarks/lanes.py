"""Draws a trace as lanes of bars, and says in numbers what ran beside the compute."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from kvferry.linker.trace import Interval, Trace

COLOURS = {
    "compute": "#8c8c8c",
    "wait": "#d1495b",
    "stall": "#d1495b",
    "check": "#c9c9c9",
    "pack": "#00798c",
    "seal": "#b98b00",
    "wire": "#2e64ad",
    "unpack": "#3f8f4f",
}
OTHER = "#7b5ea7"
ROW_INCHES = 0.42
LEAST_PIXELS = 0.3
"""Narrower bars are not drawn: a wait for a layer that is there would show as a line."""


def overlaps(trace: Trace, beside: str = "compute") -> list[dict[str, Any]]:
    """Return a row for each lane: how long it was busy, and how much of that beside another."""
    return [
        {
            "lane": lane,
            "intervals": len(trace.intervals(lane)),
            "busy ms": trace.busy_us(lane) / 1e3,
            f"beside {beside} ms": trace.overlap_us(lane, beside) / 1e3,
            "share": f"{trace.overlap_us(lane, beside) / max(trace.busy_us(lane), 1e-9):.0%}",
        }
        for lane in trace.lanes()
    ]


def draw(trace: Trace, path: Path | str, title: str) -> None:
    """Write a PNG of a trace: a row for each lane, more where a lane's intervals overlap.

    Args:
        trace: what was recorded; something must have been.
        path: of the PNG.
        title: what is shown; the lanes' overlap with compute stands below it.
    """
    rows = [
        (lane if number == 0 else "", lane, row)
        for lane in trace.lanes()
        for number, row in enumerate(trace.rows(lane))
    ]
    begin_s = min(row[0].begin_s for _, _, row in rows)
    end_s = max(interval.end_s for _, _, row in rows for interval in row)
    width_ms = (end_s - begin_s) * 1e3
    figure, axes = plt.subplots(
        figsize=(12, 1.25 + ROW_INCHES * len(rows)), dpi=110, layout="constrained"
    )
    axes.set_xlim(-0.005 * width_ms, 1.005 * width_ms)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlabel("ms")
    axes.set_title(f"{title}\n{_beside(trace)}", fontsize=10, loc="left")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.canvas.draw()  # lays out the axes, so that a label's room is known
    pixels = axes.get_window_extent().width / (1.01 * width_ms)
    for place, (_, lane, row) in enumerate(rows):
        _draw_row(axes, place, row, COLOURS.get(lane, OTHER), begin_s, pixels)
    figure.savefig(path)
    plt.close(figure)


def _draw_row(
    axes: Axes, place: int, row: list[Interval], colour: str, begin_s: float, pixels: float
) -> None:
    """Draw bars, each with its name's number if there is room; `pixels` are those of a ms."""
    shown = [each for each in row if (each.end_s - each.begin_s) * 1e3 * pixels >= LEAST_PIXELS]
    bars = [((each.begin_s - begin_s) * 1e3, (each.end_s - each.begin_s) * 1e3) for each in shown]
    axes.broken_barh(bars, (place - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.4)
    for (begin, width), each in zip(bars, shown, strict=True):
        label = each.name.removeprefix("layers ").removeprefix("layer ").replace("..", "–")
        first, _, last = label.partition("–")
        label = first if first == last else label
        if width * pixels > 6.5 * len(label) + 3:
            axes.text(
                begin + width / 2, place, label, ha="center", va="center", fontsize=7, color="white"
            )


def _beside(trace: Trace) -> str:
    """Return what share of the other lanes' time ran beside compute, in a line."""
    parts = []
    for row in overlaps(trace):
        if row["lane"] in ("wait", "stall"):
            parts.append(f"{row['lane']} {row['busy ms']:.1f} ms")
        elif row["lane"] not in ("compute", "check"):
            parts.append(f"{row['lane']} {row['busy ms']:.1f} ms, {row['share']} beside compute")
    return "; ".join(parts)
