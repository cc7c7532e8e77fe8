"""The charts of features: how often features fire, and the values of one feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.inspection.charts import COLOURS, Chart, draw_histogram, draw_rule, set_axis
from pipeline.inspection.features import FeatureView

if TYPE_CHECKING:  # as in charts.py
    from matplotlib.axes import Axes

BINS_PER_DECADE, MAX_BINS = 12, 60


def density_chart(frequencies: np.ndarray, shown: np.ndarray) -> Chart:
    """A histogram of how often features fire, without those that never do. `shown` are frequencies to mark."""
    firing = np.log10(frequencies[frequencies > 0])
    low, high = (float(np.floor(firing.min())), min(0.0, float(np.ceil(firing.max())))) if firing.size else (-1.0, 0.0)
    low = min(low, high - 1)
    edges = np.linspace(low, high, int(BINS_PER_DECADE * (high - low)) + 1)

    def draw(ax: Axes) -> None:
        draw_histogram(ax, firing, edges, COLOURS[0], "log10 of the share of tokens", "features")
        ax.plot(np.log10(shown), np.zeros(len(shown)), "|", color=COLOURS[1], markersize=9, clip_on=False)

    return Chart("How often features fire", draw, size=(460, 220))


def value_histogram(view: FeatureView) -> Chart | None:
    """A histogram of a feature's values where it fires, in logarithmic bins. None if the values were not read, or if it
    never fires."""
    values = view.values
    if values is None or not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    num_bins = min(MAX_BINS, max(12, round(np.sqrt(len(values)))))
    edges = np.geomspace(low / 1.01, high * 1.01, num_bins + 1)

    def draw(ax: Axes) -> None:
        draw_histogram(ax, values, edges, COLOURS[2], "value", "tokens")
        set_axis(ax, "x", "value", float(edges[0]), float(edges[-1]), is_logarithmic=True)
        draw_rule(ax, view.mean, "mean")

    return Chart("Values of firings", draw, size=(320, 150))
