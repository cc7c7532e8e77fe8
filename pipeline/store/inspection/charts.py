"""The charts of `inspect`'s page, drawn with matplotlib as <img> elements that contain their pictures."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.store.inspection.sample import ActivationView, StoreSample

_LOGARITHMIC_FROM = 20  # axes are logarithmic from this ratio of the largest to the smallest value
_STYLE = {
    **{"font.size": 8, "lines.linewidth": 1.3, "legend.frameon": False, "legend.fontsize": 7},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "text.parse_math": False},
}
_PIXELS_PER_INCH = 96  # in CSS; pictures have twice as many, for screens that do

styled = rc_context(_STYLE)  # decorates whatever draws charts


@styled
def histogram(values: np.ndarray, xlabel: str, ylabel: str, size: tuple[int, int] = (300, 180)) -> str:
    """A histogram of positive values. size: in CSS pixels."""
    ax = _new_axes(size, xlabel, ylabel)
    low, high = float(values.min()), max(float(values.max()), float(values.min()) * 1.001)
    num_bins = min(60, max(12, round(np.sqrt(len(values)))))
    ax.set_xscale(_scale(low, high))
    ax.hist(values, (np.geomspace if ax.get_xscale() == "log" else np.linspace)(low, high, num_bins + 1))
    return _image(ax)


@styled
def norms_by_position(views: Sequence[ActivationView], sample: StoreSample) -> str:
    """A line for each array: the mean norm by position in the document. Up to 12 names stand in the legend."""
    positions = sample.text.positions + 1
    edges = np.unique(np.geomspace(1, positions.max() + 2, 40).round().astype(int))
    ax = _new_axes((460, 260), "position, from 1", "mean L2 norm")
    ax.set_xscale(_scale(1, edges[-1]))
    colours, names_every = colormaps["viridis"](np.linspace(0, 0.9, len(views))), -(-len(views) // 12)
    for k, view in enumerate(views):
        is_token = np.isfinite(view.norms)
        bins = np.digitize(positions[is_token], edges) - 1
        counts, sums = np.bincount(bins), np.bincount(bins, view.norms[is_token])
        filled = np.flatnonzero(counts)
        label = None if k % names_every else view.name
        ax.plot(edges[filled], sums[filled] / counts[filled], color=colours[k], label=label)
    ax.set_yscale(_scale(*ax.dataLim.intervaly))
    ax.legend()
    return _image(ax)


def _new_axes(size: tuple[int, int], xlabel: str, ylabel: str) -> Axes:
    inches = (size[0] / _PIXELS_PER_INCH, size[1] / _PIXELS_PER_INCH)
    ax = Figure(inches, dpi=2 * _PIXELS_PER_INCH, layout="constrained").subplots()
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return ax


def _scale(low: float, high: float) -> str:
    return "log" if low > 0 and high / low >= _LOGARITHMIC_FROM else "linear"


def _image(ax: Axes) -> str:
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda value, _: "")
    picture = io.BytesIO()
    ax.figure.savefig(picture, format="png")
    width = round(ax.figure.get_figwidth() * _PIXELS_PER_INCH)
    return f'<img alt="" width="{width}" src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">'
