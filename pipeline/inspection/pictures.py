"""The charts of a store, as data: norms, variance, documents, and what its runs measured."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.sites import ActivationKey
from pipeline.inspection.chart import COLOURS, Axis, Band, Bars, Chart, Line, Rule, Shares
from pipeline.inspection.sample import ActivationView, StoreSample
from pipeline.inspection.summary import Summary

MAX_HISTOGRAMS = 24
MAX_POINTS = 400


def norm_charts(sample: StoreSample) -> list[Chart]:
    """Norms by layer and by position, and the spectra; those that the sample's tokens are enough for."""
    views = _with_tokens(sample)
    charts = [_by_layer(views), _by_position(views, sample), _spectra(views)] if views else []
    return [chart for chart in charts if chart is not None]


def histograms(sample: StoreSample) -> list[Chart]:
    """Of the norms of each activation, up to MAX_HISTOGRAMS of them."""
    return [_histogram(view) for view in _with_tokens(sample)[:MAX_HISTOGRAMS]]


def _with_tokens(sample: StoreSample) -> list[ActivationView]:
    return [view for view in sample.views if view.valid_norms.size]


def _by_layer(views: Sequence[ActivationView]) -> Chart | None:
    keys = [ActivationKey.parse(view.name) for view in views]
    layers = [key.layer for key in keys if key.site.per_layer]
    if not layers:
        return None
    quantiles = {view.name: np.quantile(view.valid_norms, (0.05, 0.95)) for view in views}
    lowest, highest = min(q[0] for q in quantiles.values()), max(q[1] for q in quantiles.values())
    y = _norm_axis("L2 norm", lowest, max(highest, *(float(view.valid_norms.mean()) for view in views)))
    x = Axis("layer", min(layers) - 0.5, max(layers) + 0.5, whole=True)
    chart = Chart("Norm by layer: mean, and 5 to 95 %", x, y)
    for k, site in enumerate(dict.fromkeys(key.site for key in keys if key.site.per_layer)):
        chosen = sorted((key.layer, view) for key, view in zip(keys, views, strict=True) if key.site is site)
        xs = [layer for layer, _ in chosen]
        bands = np.array([quantiles[view.name] for _, view in chosen])
        means = [view.valid_norms.mean() for _, view in chosen]
        chart.add(Band(xs, bands[:, 0], bands[:, 1], COLOURS[k % 8]))
        chart.add(Line(xs, means, COLOURS[k % 8], str(site), dots=True))
    return chart


def _by_position(views: Sequence[ActivationView], sample: StoreSample) -> Chart:
    place = sample.beside.positions + 1
    edges = np.unique(np.geomspace(1, place.max() + 1, 40).round().astype(int))
    edges = edges if len(edges) > 1 else np.array([1, 2])
    means = []
    for view in views:
        there = np.isfinite(view.norms)
        bins = np.digitize(place[there], edges) - 1
        counts = np.bincount(bins, minlength=len(edges) - 1)
        sums = np.bincount(bins, view.norms[there], minlength=len(edges) - 1)
        means.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)[: len(edges) - 1])
    x = Axis("position, from 1", 1, max(2, int(edges[-1])), log=True)
    y = _norm_axis("mean L2 norm", float(np.nanmin(means)), float(np.nanmax(means)))
    chart = Chart("Mean norm by position in the document", x, y)
    centres = [math.sqrt(left * max(left, right - 1)) for left, right in pairwise(edges.tolist())]
    for style, values in zip(_styles(views), means, strict=True):
        chart.add(Line(centres, values, style.colour, style.label, len(views) <= 4, style.opacity))
    return chart


class _Style(NamedTuple):
    colour: str
    label: str
    opacity: float


def _styles(views: Sequence[ActivationView]) -> list[_Style]:
    """How to draw each view's line: by colour, or many of them by their site's colour, deeper ones stronger."""
    if len(views) <= 6:
        return [_Style(COLOURS[k], view.name, 1.0) for k, view in enumerate(views)]
    keys = [ActivationKey.parse(view.name) for view in views]
    sites = list(dict.fromkeys(key.site for key in keys))
    deepest = max(1, *(key.layer for key in keys))
    first = {site: next(k for k, key in enumerate(keys) if key.site is site) for site in sites}
    return [
        _Style(
            COLOURS[sites.index(key.site) % 8],
            f"{key.site}, deeper layers stronger" if first[key.site] == k and key.site.per_layer else "",
            0.3 + 0.7 * max(0, key.layer) / deepest,
        )
        for k, key in enumerate(keys)
    ]


def _spectra(views: Sequence[ActivationView]) -> Chart | None:
    most = max((len(view.spectrum) for view in views), default=0)
    if most < 2:
        return None
    x, y = Axis("components", 1, most, log=True), Axis("share of the variance", 0, 1)
    chart = Chart("Variance that the first components explain", x, y)
    for style, view in zip(_styles(views), views, strict=True):
        at = np.unique(np.geomspace(1, max(1, len(view.spectrum)), 60).round().astype(int))
        shares = np.cumsum(view.spectrum)[at - 1] if view.spectrum.size else np.full(len(at), np.nan)
        chart.add(Line(at.tolist(), shares, style.colour, style.label, opacity=style.opacity))
    return chart


def _histogram(view: ActivationView) -> Chart:
    """Of the norms that are not 0."""
    norms = view.valid_norms[view.valid_norms > 0]
    low, high = (float(norms.min()), float(norms.max())) if norms.size else (0.0, 1.0)
    log = norms.size > 0 and high / low > 20
    high = max(high, low * 1.001)
    edges = np.geomspace(low, high, 61) if log else np.linspace(low, high, 61)
    heights = np.histogram(norms, edges)[0]
    y = Axis("tokens", 0, 1.15 * max(1, heights.max()))
    chart = Chart(view.name, Axis("L2 norm", low, high, log), y, size=(300, 180))
    chart.add(Bars(edges, heights, COLOURS[0]))
    return chart.add(Rule(float(np.median(norms)), "median")) if norms.size else chart


def document_charts(summary: Summary) -> list[Chart]:
    """Lengths of documents, and padding by block."""
    charts = []
    lengths = summary.document_tokens[summary.document_tokens > 0]
    if lengths.size:
        high = max(int(lengths.max()), int(lengths.min()) + 1)
        edges = np.unique(np.geomspace(lengths.min(), high, 50).round().astype(int)).tolist()
        heights = np.histogram(lengths, edges)[0]
        y = Axis("documents", 0, 1.15 * max(1, heights.max()))
        chart = Chart("Lengths of documents", Axis("tokens", edges[0], edges[-1], log=True), y)
        charts.append(chart.add(Bars(edges, heights, COLOURS[2])))
        if edges[0] < summary.layout.length < edges[-1]:
            chart.add(Rule(summary.layout.length, "a row"))
    if summary.blocks:
        every = -(-len(summary.blocks) // MAX_POINTS)
        shares = [1 - r.tokens / max(1, r.rows * summary.layout.length) for r in summary.blocks[::every]]
        xs = list(range(0, len(summary.blocks), every))
        x, y = Axis("block", 0, max(1, xs[-1]), whole=True), Axis("padding", 0, max(0.05, *shares))
        chart = Chart("Share of padding by block", x, y)
        charts.append(chart.add(Line(xs, shares, COLOURS[3], dots=len(xs) < 60)))
    return charts


def run_charts(snapshots: Sequence[Mapping[str, Any]]) -> list[Chart | Shares]:
    """Of one run's log: tokens per second, and what each thread waited for."""
    charts: list[Chart | Shares] = []
    last = snapshots[-1]
    if len(snapshots) > 2:
        times = [snapshot["elapsed_s"] for snapshot in snapshots]
        tokens = [snapshot["tokens"] for snapshot in snapshots]
        rates = [
            (b - a) / max(end - start, 1e-9)
            for (a, b), (start, end) in zip(pairwise(tokens), pairwise(times), strict=True)
        ]
        x, y = Axis("seconds", 0, times[-1]), Axis("tokens/s", 0, max(1.0, *rates))
        charts.append(Chart("Tokens per second", x, y, size=(620, 200)).add(Line(times[1:], rates, COLOURS[0])))
    for thread in ("feed", "loop", "writer"):
        stages = sorted(last["seconds"].get(thread, {}).items(), key=lambda stage: -stage[1])
        if stages:
            charts.append(Shares(f"Seconds of the {thread} thread", stages, last["elapsed_s"]))
    return charts


def _norm_axis(label: str, low: float, high: float) -> Axis:
    """From 0; logarithmic where the norms differ by more than a factor of 20."""
    if low > 0 and high / low > 20:
        return Axis(label, low / 1.1, high * 1.1, log=True)
    return Axis(label, 0, max(high * 1.05, 1e-9))
