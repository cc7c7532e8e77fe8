"""The charts of a store: norms, variance, packing, documents, and metrics of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.core.sites import ActivationKey
from pipeline.inspection.sample import ActivationView, StoreSample
from pipeline.inspection.summary import Summary
from pipeline.inspection.tables import number

if TYPE_CHECKING:  # matplotlib takes half a second to import, and only drawing needs it
    from matplotlib.axes import Axes

COLOURS = ("#2f6db3", "#c8553d", "#3c8d5a", "#8a5aa8", "#b58a1c", "#3b9aa8", "#a8476f", "#6b6b6b")
GREY = "#e3e7eb"
MAX_HISTOGRAMS = 24
MAX_POINTS = 400
MAX_PACKED_ROWS = 40
_LOGARITHMIC_FROM = 20  # axes are logarithmic from this ratio of the largest to the smallest value


@dataclass(frozen=True)
class Chart:
    """A chart with its caption. `draw` draws it on axes; `size` is in CSS pixels."""

    caption: str
    draw: Callable[[Axes], None]
    size: tuple[int, int] = (460, 260)


def norm_charts(sample: StoreSample) -> list[Chart]:
    """Norms by layer and by position, and the variance spectra, as far as the sample has tokens for them."""
    views = _with_tokens(sample)
    charts = [_by_layer(views), _by_position(views, sample), _spectra(views)] if views else []
    return [chart for chart in charts if chart is not None]


def histograms(sample: StoreSample) -> list[Chart]:
    """Histograms of the norms, for up to MAX_HISTOGRAMS activations."""
    return [_histogram(view) for view in _with_tokens(sample)[:MAX_HISTOGRAMS]]


def _with_tokens(sample: StoreSample) -> list[ActivationView]:
    return [view for view in sample.views if view.valid_norms.size]


def _by_layer(views: Sequence[ActivationView]) -> Chart | None:
    keys = [ActivationKey.parse(view.name) for view in views]
    layers = [key.layer for key in keys if key.site.per_layer]
    if not layers:
        return None
    lows, highs = np.array([np.quantile(view.valid_norms, (0.05, 0.95)) for view in views]).T
    means = np.array([view.valid_norms.mean() for view in views])

    def draw(ax: Axes) -> None:
        set_axis(ax, "x", "layer", min(layers) - 0.5, max(layers) + 0.5)
        _set_norm_axis(ax, "L2 norm", lows.min(), max(highs.max(), means.max()))
        ax.xaxis.get_major_locator().set_params(integer=True)
        for k, site in enumerate(dict.fromkeys(key.site for key in keys if key.site.per_layer)):
            order = sorted((key.layer, index) for index, key in enumerate(keys) if key.site is site)
            xs, indices = [layer for layer, _ in order], [index for _, index in order]
            ax.fill_between(xs, lows[indices], highs[indices], color=COLOURS[k % 8], alpha=0.16, linewidth=0)
            ax.plot(xs, means[indices], color=COLOURS[k % 8], marker="o", label=str(site))
        _draw_legend(ax)

    return Chart("Norm by layer: mean, and 5 to 95 %", draw)


def _by_position(views: Sequence[ActivationView], sample: StoreSample) -> Chart:
    positions = sample.side_arrays.positions + 1
    edges = np.unique(np.geomspace(1, positions.max() + 1, 40).round().astype(int))
    edges = edges if len(edges) > 1 else np.array([1, 2])
    means = []
    for view in views:
        is_token = np.isfinite(view.norms)
        bins = np.digitize(positions[is_token], edges) - 1
        counts = np.bincount(bins, minlength=len(edges) - 1)
        sums = np.bincount(bins, view.norms[is_token], minlength=len(edges) - 1)
        means.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)[: len(edges) - 1])
    centres = np.array([math.sqrt(left * max(left, right - 1)) for left, right in pairwise(edges.tolist())])

    def draw(ax: Axes) -> None:
        set_axis(ax, "x", "position, from 1", 1, max(2, int(edges[-1])))
        _set_norm_axis(ax, "mean L2 norm", np.nanmin(means), np.nanmax(means))
        for style, values in zip(_styles(views), means, strict=True):
            is_filled = np.isfinite(values)
            _draw_line(ax, centres[is_filled], values[is_filled], style, marker="o" if len(views) <= 4 else None)
        _draw_legend(ax)

    return Chart("Mean norm by position in the document", draw)


class _Style(NamedTuple):
    colour: str
    label: str | None
    opacity: float


def _styles(views: Sequence[ActivationView]) -> list[_Style]:
    """How to draw each view's line. Up to six lines have different colours; more lines have their site's colour, with
    higher opacity for deeper layers."""
    if len(views) <= 6:
        return [_Style(COLOURS[k], view.name, 1.0) for k, view in enumerate(views)]
    keys = [ActivationKey.parse(view.name) for view in views]
    sites = list(dict.fromkeys(key.site for key in keys))
    deepest = max(1, *(key.layer for key in keys))
    first = {site: next(k for k, key in enumerate(keys) if key.site is site) for site in sites}
    return [
        _Style(
            COLOURS[sites.index(key.site) % 8],
            f"{key.site}, deeper layers darker" if first[key.site] == k and key.site.per_layer else None,
            0.3 + 0.7 * max(0, key.layer) / deepest,
        )
        for k, key in enumerate(keys)
    ]


def _draw_line(ax: Axes, xs: np.ndarray, ys: np.ndarray, style: _Style, marker: str | None = None) -> None:
    ax.plot(xs, ys, color=style.colour, alpha=style.opacity, label=style.label, marker=marker)


def _draw_legend(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend()


def _spectra(views: Sequence[ActivationView]) -> Chart | None:
    most = max(len(view.spectrum) for view in views)
    if most < 2:
        return None

    def draw(ax: Axes) -> None:
        set_axis(ax, "x", "components", 1, most)
        set_axis(ax, "y", "share of the variance", 0, 1)
        for style, view in zip(_styles(views), views, strict=True):
            if view.spectrum.size:
                components = np.unique(np.geomspace(1, len(view.spectrum), 60).round().astype(int))
                _draw_line(ax, components, np.cumsum(view.spectrum)[components - 1], style)
        _draw_legend(ax)

    return Chart("Variance explained by the first components", draw)


def _histogram(view: ActivationView) -> Chart:
    """A histogram of the norms above 0."""
    norms = view.valid_norms[view.valid_norms > 0]
    low, high = (float(norms.min()), float(norms.max())) if norms.size else (0.0, 1.0)
    spaced = np.geomspace if norms.size and high / low >= _LOGARITHMIC_FROM else np.linspace
    edges = spaced(low, max(high, low * 1.001), 61)

    def draw(ax: Axes) -> None:
        draw_histogram(ax, norms, edges, COLOURS[0], "L2 norm", "tokens")
        if norms.size:
            draw_rule(ax, float(np.median(norms)), "median")

    return Chart(view.name, draw, size=(300, 180))


def packing_chart(sample: StoreSample) -> Chart:
    """A bar for each of up to MAX_PACKED_ROWS rows, with its documents in colours and padding in grey."""
    segments, documents = sample.text.segments[:MAX_PACKED_ROWS], sample.text.documents[:MAX_PACKED_ROWS]
    palette = np.array([[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in (*COLOURS[:7], GREY)], np.uint8)
    image = np.full((3 * len(segments), segments.shape[1], 3), 255, np.uint8)  # two lines per row, then a white line
    image[0::3] = image[1::3] = palette[np.where(segments > 0, documents % 7, 7)]

    def draw(ax: Axes) -> None:
        ax.imshow(image, aspect="auto", interpolation="none")
        ax.set_axis_off()

    return Chart("Packing", draw, size=(900, 20 + 9 * len(segments)))


def document_charts(summary: Summary) -> list[Chart]:
    """Document lengths, and padding by block."""
    charts = []
    lengths = summary.document_tokens[summary.document_tokens > 0]
    if lengths.size:
        charts.append(_document_lengths(lengths, summary.layout.length))
    if len(summary.blocks):
        step = -(-len(summary.blocks) // MAX_POINTS)
        shares = [1 - r.tokens / max(1, r.rows * summary.layout.length) for r in summary.blocks[::step]]
        xs = range(0, len(summary.blocks), step)

        def draw(ax: Axes) -> None:
            set_axis(ax, "x", "block", 0, max(1, xs[-1]))
            set_axis(ax, "y", "padding", 0, max(0.05, *shares))
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.plot(xs, shares, color=COLOURS[3], marker="o" if len(xs) < 60 else None)

        charts.append(Chart("Share of padding by block", draw))
    return charts


def _document_lengths(lengths: np.ndarray, row_length: int) -> Chart:
    high = max(int(lengths.max()), int(lengths.min()) + 1)
    edges = np.unique(np.geomspace(lengths.min(), high, 50).round().astype(int))

    def draw(ax: Axes) -> None:
        draw_histogram(ax, lengths, edges, COLOURS[2], "tokens", "documents")
        if edges[0] < row_length < edges[-1]:
            draw_rule(ax, row_length, "a row")

    return Chart("Document lengths", draw)


def run_charts(snapshots: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts of a run's log: tokens per second, and how each thread spent its time."""
    last = snapshots[-1]
    charts = [_token_rate(snapshots)] if len(snapshots) > 2 else []
    for thread in ("feed", "loop", "writer"):
        stages = sorted(last["seconds"].get(thread, {}).items(), key=lambda stage: -stage[1])
        if stages:
            charts.append(_thread_stages(thread, stages, last["elapsed_s"]))
    return charts


def _token_rate(snapshots: Sequence[Mapping[str, Any]]) -> Chart:
    times = [snapshot["elapsed_s"] for snapshot in snapshots]
    tokens = [snapshot["tokens"] for snapshot in snapshots]
    rates = np.diff(tokens) / np.maximum(np.diff(times), 1e-9)

    def draw(ax: Axes) -> None:
        set_axis(ax, "x", "seconds", 0, max(times[-1], 1e-9))
        set_axis(ax, "y", "tokens/s", 0, max(1.0, rates.max()))
        ax.plot(times[1:], rates, color=COLOURS[0])

    return Chart("Tokens per second", draw, size=(620, 200))


def _thread_stages(thread: str, stages: Sequence[tuple[str, float]], total_s: float) -> Chart:
    def draw(ax: Axes) -> None:
        set_axis(ax, "x", f"seconds of {total_s:.1f}", 0, max(total_s, 1e-9))
        ax.barh(range(len(stages)), [seconds for _, seconds in stages], color=COLOURS)
        ax.set_yticks(range(len(stages)), [f"{stage} {seconds:.1f} s" for stage, seconds in stages])
        ax.invert_yaxis()
        ax.grid(visible=False)

    return Chart(f"Seconds of the {thread} thread", draw, size=(460, 60 + 22 * len(stages)))


def draw_histogram(ax: Axes, values: np.ndarray, edges: np.ndarray, colour: str, x_label: str, y_label: str) -> None:
    heights = np.histogram(values, edges)[0]
    set_axis(ax, "x", x_label, float(edges[0]), float(edges[-1]))
    set_axis(ax, "y", y_label, 0, 1.15 * max(1, heights.max()))
    ax.stairs(heights, edges, color=colour, fill=True)


def draw_rule(ax: Axes, x: float, label: str) -> None:
    ax.axvline(x, color="#98a3af", linestyle="--", linewidth=1)
    ax.annotate(label, (x, 0.93), xycoords=("data", "axes fraction"))


def set_axis(ax: Axes, name: str, label: str, low: float, high: float, is_logarithmic: bool | None = None) -> None:
    """Sets limits and label of the axis `name`, x or y. By default, it is logarithmic if the limits differ by a factor
    of 20 or more."""
    if is_logarithmic is None:
        is_logarithmic = low > 0 and high / low >= _LOGARITHMIC_FROM
    ax.set(**{f"{name}scale": "log" if is_logarithmic else "linear", f"{name}lim": (low, high), f"{name}label": label})
    axis = ax.xaxis if name == "x" else ax.yaxis
    if is_logarithmic:
        axis.get_major_locator().set_params(subs=(1, 2, 5) if high / low < 1000 else (1,))
    axis.set_major_formatter(lambda value, _: number(value))
    axis.set_minor_formatter(lambda value, _: "")


def _set_norm_axis(ax: Axes, label: str, low: float, high: float) -> None:
    """Sets the y axis for norms from `low` to `high`. It starts at 0 unless it is logarithmic."""
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        set_axis(ax, "y", label, low / 1.1, high * 1.1)
    else:
        set_axis(ax, "y", label, 0, max(high * 1.05, 1e-9))
