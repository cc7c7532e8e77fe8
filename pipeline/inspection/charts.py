"""The charts of a store's pages: norms, variance, packing, documents, runs and features. Drawn with matplotlib."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.core.sites import ActivationKey
from pipeline.inspection.features import FeatureView
from pipeline.inspection.sample import ActivationView, StoreSample
from pipeline.inspection.summary import Summary

MAX_HISTOGRAMS = 24
MAX_POINTS = 400
MAX_PACKED_ROWS = 40
_BLUE, _RED, _GREEN = "#2f6db3", "#c8553d", "#3c8d5a"
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


class Chart(NamedTuple):
    """svg: an <svg> element for an HTML page."""

    caption: str
    svg: str


def _new_axes(width: int = 460, height: int = 260, **settings: Any) -> Axes:
    """Axes of a size in CSS pixels."""
    ax = Figure((width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH), layout="constrained").subplots()
    ax.set(**settings)
    return ax


def _drawn(caption: str, ax: Axes) -> Chart:
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda value, _: "")
    text = io.StringIO()
    ax.figure.savefig(text, format="svg", metadata=_NO_METADATA, transparent=True)
    document = text.getvalue()
    return Chart(caption, _NOT_FOR_HTML.sub("", document[document.index("<svg") :]))


def _scale(low: float, high: float) -> str:
    return "log" if low > 0 and high / low >= _LOGARITHMIC_FROM else "linear"


def _scale_norms(ax: Axes) -> None:
    """A logarithmic y axis, or one from 0."""
    ax.set_yscale(_scale(*ax.dataLim.intervaly))
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0)


@styled
def norm_charts(sample: StoreSample) -> list[Chart]:
    """Norms by layer and by position, and the variance spectra, as far as the sample has tokens for them."""
    views = _with_tokens(sample)
    charts = [_by_layer(views), _by_position(views, sample), _spectra(views)] if views else []
    return [chart for chart in charts if chart is not None]


@styled
def histograms(sample: StoreSample) -> list[Chart]:
    """Histograms of the norms above 0, for up to MAX_HISTOGRAMS activations."""
    charts = []
    for view in _with_tokens(sample)[:MAX_HISTOGRAMS]:
        ax = _new_axes(300, 180, xlabel="L2 norm", ylabel="tokens")
        if (norms := view.valid_norms[view.valid_norms > 0]).size:
            _draw_histogram(ax, norms, 60, _BLUE)
            _draw_rule(ax, float(np.median(norms)), "median")
        charts.append(_drawn(view.name, ax))
    return charts


def _with_tokens(sample: StoreSample) -> list[ActivationView]:
    return [view for view in sample.views if view.valid_norms.size]


def _by_layer(views: Sequence[ActivationView]) -> Chart | None:
    keys = [ActivationKey.parse(view.name) for view in views]
    ax = _new_axes(xlabel="layer", ylabel="L2 norm")
    for site in dict.fromkeys(key.site for key in keys if key.site.per_layer):
        order = sorted((key.layer, k) for k, key in enumerate(keys) if key.site is site)
        layers, norms = [layer for layer, _ in order], [views[k].valid_norms for _, k in order]
        (line,) = ax.plot(layers, [values.mean() for values in norms], marker="o", label=str(site))
        low, high = np.transpose([np.quantile(values, (0.05, 0.95)) for values in norms])
        ax.fill_between(layers, low, high, color=line.get_color(), alpha=0.16, linewidth=0)
    if not ax.lines:
        return None
    _scale_norms(ax)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return _drawn("Norm by layer: mean, and 5 to 95 %", ax)


def _by_position(views: Sequence[ActivationView], sample: StoreSample) -> Chart:
    positions = sample.side_arrays.positions + 1
    edges = np.unique(np.geomspace(1, positions.max() + 2, 40).round().astype(int))
    ax = _new_axes(xlabel="position, from 1", ylabel="mean L2 norm", xscale=_scale(1, edges[-1]))
    for style, view in zip(_line_styles(views), views, strict=True):
        is_token = np.isfinite(view.norms)
        bins = np.digitize(positions[is_token], edges) - 1
        counts, sums = np.bincount(bins), np.bincount(bins, view.norms[is_token])
        filled = np.flatnonzero(counts)
        ax.plot(edges[filled], sums[filled] / counts[filled], **style)
    _scale_norms(ax)
    return _drawn("Mean norm by position in the document", ax)


def _spectra(views: Sequence[ActivationView]) -> Chart | None:
    most = max(len(view.spectrum) for view in views)
    if most < 2:
        return None
    ax = _new_axes(xlabel="components", ylabel="share of the variance", ylim=(0, 1), xscale=_scale(1, most))
    for style, view in zip(_line_styles(views), views, strict=True):
        if view.spectrum.size:
            components = np.unique(np.geomspace(1, len(view.spectrum), 60).round().astype(int))
            ax.plot(components, np.cumsum(view.spectrum)[components - 1], **style)
    return _drawn("Variance explained by the first components", ax)


def _line_styles(views: Sequence[ActivationView]) -> list[dict[str, Any]]:
    """A colour for each view's line, from the first to the last; up to 12 names stand in the legend."""
    step = -(-len(views) // 12)
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(views)))
    return [
        {"color": colour, "label": None if k % step else view.name}
        for k, (colour, view) in enumerate(zip(colours, views, strict=True))
    ]


@styled
def packing_chart(sample: StoreSample) -> Chart:
    """A bar for each of up to MAX_PACKED_ROWS rows, with its documents in colours and padding in grey."""
    segments, documents = sample.text.segments[:MAX_PACKED_ROWS], sample.text.documents[:MAX_PACKED_ROWS]
    colours = np.vstack([colormaps["tab10"].colors[:7], [0.9, 0.9, 0.9]])
    image = np.ones((3 * len(segments), segments.shape[1], 3))  # two lines per row, then a white line
    image[0::3] = image[1::3] = colours[np.where(segments > 0, documents % 7, 7)]
    ax = _new_axes(900, 20 + 9 * len(segments))
    ax.imshow(image, aspect="auto", interpolation="none")
    ax.set_axis_off()
    return _drawn("Packing", ax)


@styled
def document_charts(summary: Summary) -> list[Chart]:
    """Document lengths, and padding by block."""
    charts = []
    lengths = summary.document_tokens[summary.document_tokens > 0]
    if lengths.size:
        ax = _new_axes(xlabel="tokens", ylabel="documents")
        _draw_histogram(ax, lengths, 49, _GREEN)
        _draw_rule(ax, summary.layout.length, "a row")
        charts.append(_drawn("Document lengths", ax))
    if len(summary.blocks):
        step = -(-len(summary.blocks) // MAX_POINTS)
        shares = [1 - block.tokens / max(1, block.rows * summary.layout.length) for block in summary.blocks[::step]]
        ax = _new_axes(xlabel="block", ylabel="padding")
        ax.plot(range(0, len(summary.blocks), step), shares, color=_RED, marker="o" if len(shares) < 60 else None)
        ax.set_ylim(0, max(0.05, *shares))
        charts.append(_drawn("Share of padding by block", ax))
    return charts


@styled
def run_charts(snapshots: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts of a run's log: tokens per second, and how each thread spent its time."""
    charts = []
    if len(snapshots) > 2:
        times, tokens = ([snapshot[name] for snapshot in snapshots] for name in ("elapsed_s", "tokens"))
        ax = _new_axes(620, 200, xlabel="seconds", ylabel="tokens/s")
        ax.plot(times[1:], np.diff(tokens) / np.maximum(np.diff(times), 1e-9))
        ax.set_ylim(bottom=0)
        charts.append(_drawn("Tokens per second", ax))
    last = snapshots[-1]
    for thread in ("feed", "loop", "writer"):
        stages = sorted(last["seconds"].get(thread, {}).items(), key=lambda stage: stage[1])
        if stages:
            ax = _new_axes(460, 60 + 22 * len(stages), xlabel=f"seconds of {last['elapsed_s']:.1f}")
            ax.barh([f"{stage} {seconds:.1f} s" for stage, seconds in stages], [seconds for _, seconds in stages])
            ax.grid(visible=False)
            charts.append(_drawn(f"Seconds of the {thread} thread", ax))
    return charts


@styled
def density_chart(frequencies: np.ndarray, shown: np.ndarray) -> Chart:
    """A histogram of how often features fire, without those that never do. `shown` are frequencies to mark."""
    ax = _new_axes(460, 220, xlabel="log10 of the share of tokens", ylabel="features")
    ax.hist(np.log10(frequencies[frequencies > 0]), 60, color=_BLUE)
    ax.plot(np.log10(shown), np.zeros(len(shown)), "|", color=_RED, markersize=9, clip_on=False)
    return _drawn("How often features fire", ax)


@styled
def value_histogram(view: FeatureView) -> Chart | None:
    """A histogram of a feature's values where it fires. None if the values were not read, or if it never fires."""
    if view.values is None or not view.values.size:
        return None
    ax = _new_axes(320, 150, xlabel="value", ylabel="tokens")
    _draw_histogram(ax, view.values, min(60, max(12, round(np.sqrt(len(view.values))))), _GREEN)
    _draw_rule(ax, view.mean, "mean")
    return _drawn("Values of firings", ax)


def _draw_histogram(ax: Axes, values: np.ndarray, num_bins: int, colour: str) -> None:
    """Draws a histogram of positive values."""
    low, high = float(values.min()), max(float(values.max()), float(values.min()) * 1.001)
    scale = _scale(low, high)
    ax.set_xscale(scale)
    ax.hist(values, (np.geomspace if scale == "log" else np.linspace)(low, high, num_bins + 1), color=colour)


def _draw_rule(ax: Axes, x: float, label: str) -> None:
    if ax.get_xlim()[0] <= x <= ax.get_xlim()[1]:
        ax.axvline(x, color="#98a3af", linestyle="--", linewidth=1)
        ax.annotate(label, (x, 0.93), xycoords=("data", "axes fraction"))
