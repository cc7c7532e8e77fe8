"""The charts of `inspect`'s pages, drawn with matplotlib as <svg> elements."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.core.sites import ActivationKey
from pipeline.store.inspection.sample import ActivationView, StoreSample

_LOGARITHMIC_FROM = 20  # axes are logarithmic from this ratio of the largest to the smallest value
_STYLE = {
    **{"font.size": 8, "font.sans-serif": ["DejaVu Sans"], "lines.linewidth": 1.3, "lines.markersize": 3},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 7},
    **{"svg.fonttype": "none", "svg.hashsalt": "charts", "text.parse_math": False},
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Namespaces, which HTML does not need, and numbered ids, which would be the same in every chart.
_NOT_FOR_HTML = re.compile(r' xmlns(?::xlink)?="[^"]*"| id="[\w.]+_\d{1,4}"')
_PIXELS_PER_INCH = 96  # in CSS

styled = rc_context(_STYLE)  # decorates whatever draws charts


@styled
def histogram(
    values: np.ndarray, xlabel: str, ylabel: str, rule: tuple[str, float], size: tuple[int, int] = (300, 180)
) -> str:
    """A histogram of positive values, with a vertical rule: its label and place. size: in CSS pixels."""
    ax = _new_axes(*size, xlabel=xlabel, ylabel=ylabel)
    low, high = float(values.min()), max(float(values.max()), float(values.min()) * 1.001)
    num_bins = min(60, max(12, round(np.sqrt(len(values)))))
    ax.set_xscale(_scale(low, high))
    ax.hist(values, (np.geomspace if ax.get_xscale() == "log" else np.linspace)(low, high, num_bins + 1))
    label, x = rule
    if ax.get_xlim()[0] <= x <= ax.get_xlim()[1]:
        ax.axvline(x, color="#98a3af", linestyle="--", linewidth=1)
        ax.annotate(label, (x, 0.93), xycoords=("data", "axes fraction"))
    return _svg(ax)


@styled
def densities(frequencies: np.ndarray, marked: np.ndarray) -> str:
    """A histogram of how often features fire, without those that never do, and marks at some frequencies."""
    ax = _new_axes(460, 220, xlabel="log10 of the share of tokens", ylabel="features")
    ax.hist(np.log10(frequencies[frequencies > 0]), 60)
    ax.plot(np.log10(marked), np.zeros(len(marked)), "|", color="#c8553d", markersize=9, clip_on=False)
    return _svg(ax)


@styled
def norms_by_layer(views: Sequence[ActivationView]) -> str | None:
    """A line for each site: the mean norm, and the range from 5 to 95 %. None if no array belongs to a layer."""
    keys = [ActivationKey.parse(view.name) for view in views]
    ax = _new_axes(460, 260, xlabel="layer", ylabel="L2 norm")
    for site in dict.fromkeys(key.site for key in keys if key.site.per_layer):
        order = sorted((key.layer, k) for k, key in enumerate(keys) if key.site is site)
        layers, norms = [layer for layer, _ in order], [views[k].finite_norms for _, k in order]
        (line,) = ax.plot(layers, [values.mean() for values in norms], marker="o", label=str(site))
        low, high = np.transpose([np.quantile(values, (0.05, 0.95)) for values in norms])
        ax.fill_between(layers, low, high, color=line.get_color(), alpha=0.16, linewidth=0)
    if not ax.lines:
        return None
    _scale_norms(ax)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return _svg(ax)


@styled
def norms_by_position(views: Sequence[ActivationView], sample: StoreSample) -> str:
    """A line for each array: the mean norm by position in the document. Up to 12 names stand in the legend."""
    positions = sample.text.positions + 1
    edges = np.unique(np.geomspace(1, positions.max() + 2, 40).round().astype(int))
    ax = _new_axes(460, 260, xlabel="position, from 1", ylabel="mean L2 norm", xscale=_scale(1, edges[-1]))
    colours, names_every = colormaps["viridis"](np.linspace(0, 0.9, len(views))), -(-len(views) // 12)
    for k, view in enumerate(views):
        is_token = np.isfinite(view.norms)
        bins = np.digitize(positions[is_token], edges) - 1
        counts, sums = np.bincount(bins), np.bincount(bins, view.norms[is_token])
        filled = np.flatnonzero(counts)
        label = None if k % names_every else view.name
        ax.plot(edges[filled], sums[filled] / counts[filled], color=colours[k], label=label)
    _scale_norms(ax)
    return _svg(ax)


def _new_axes(width: int, height: int, **settings: Any) -> Axes:
    ax = Figure((width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH), layout="constrained").subplots()
    ax.set(**settings)
    return ax


def _scale(low: float, high: float) -> str:
    return "log" if low > 0 and high / low >= _LOGARITHMIC_FROM else "linear"


def _scale_norms(ax: Axes) -> None:
    """A logarithmic y axis, or one from 0."""
    ax.set_yscale(_scale(*ax.dataLim.intervaly))
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0)


def _svg(ax: Axes) -> str:
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda value, _: "")
    text = io.StringIO()
    ax.figure.savefig(text, format="svg", metadata=_NO_METADATA, transparent=True)
    document = text.getvalue()
    return _NOT_FOR_HTML.sub("", document[document.index("<svg") :])
