"""Charts as one PNG, by matplotlib, which nothing else needs: the extra `png`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.inspection.chart import COLOURS, Axis, Band, Bars, Chart, Line, Rule, Shares, number

COLUMNS = 3
INCHES = (4.6, 2.9)  # of a chart
DPI = 110


def write_png(path: Path, title: str, charts: Sequence[Chart | Shares]) -> None:
    """Draws the charts, COLUMNS to a row. Raises OSError."""
    rows = -(-len(charts) // COLUMNS) or 1
    figure = Figure((COLUMNS * INCHES[0], rows * INCHES[1] + 0.4), DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for chart, ax in zip(charts, axes, strict=False):
        ax.set_title(chart.caption, fontsize=9)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
        if isinstance(chart, Shares):
            _draw_shares(ax, chart)
        else:
            _draw(ax, chart)
    for ax in axes:  # those that are left
        ax.set_axis_off()
    figure.savefig(path, format="png")


def _draw(ax: Axes, chart: Chart) -> None:
    _set_axis(ax, "x", chart.x)
    _set_axis(ax, "y", chart.y)
    ax.grid(axis="y", alpha=0.3)
    for mark in chart.marks:
        match mark:
            case Line():
                style = {"color": mark.colour, "alpha": mark.opacity, "marker": "o" if mark.dots else None}
                ax.plot(mark.xs, mark.ys, markersize=3, linewidth=1.3, label=mark.label or None, **style)
            case Band():
                ax.fill_between(mark.xs, mark.lows, mark.highs, color=mark.colour, alpha=0.16, linewidth=0)
            case Bars():
                ax.bar(mark.edges[:-1], mark.heights, np.diff(mark.edges), align="edge", color=mark.colour)
            case Rule():
                ax.axvline(mark.x, color="#98a3af", linestyle="--", linewidth=1)
                ax.annotate(mark.label, (mark.x, 0.93), xycoords=("data", "axes fraction"), fontsize=7)
    if any(isinstance(mark, Line) and mark.label for mark in chart.marks):
        ax.legend(fontsize=7, frameon=False)


def _set_axis(ax: Axes, which: str, axis: Axis) -> None:
    if axis.log:
        getattr(ax, f"set_{which}scale")("log")
    getattr(ax, f"set_{which}lim")(axis.low, axis.high)
    ticks = axis.ticks()
    getattr(ax, f"set_{which}ticks")(ticks, [number(tick) for tick in ticks])
    getattr(ax, f"set_{which}ticks")([], minor=True)
    getattr(ax, f"set_{which}label")(axis.label, fontsize=8)


def _draw_shares(ax: Axes, shares: Shares) -> None:
    values = [value for _, value in shares.parts]
    ax.barh(range(len(values)), values, color=[COLOURS[k % 8] for k in range(len(values))])
    ax.set_yticks(range(len(values)), shares.labels)
    ax.invert_yaxis()
    ax.set_xlim(0, max(shares.total, 1e-9))
    ax.set_xlabel("seconds", fontsize=8)
