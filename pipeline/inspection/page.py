"""One HTML page about a store: tables, charts as inline SVG, rows of text coloured by norm. Loads nothing."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.inspection.chart import COLOURS, Axis, Chart, Shares, number
from pipeline.inspection.pictures import MAX_HISTOGRAMS, document_charts, histograms, norm_charts, run_charts
from pipeline.inspection.sample import ActivationView, StoreSample
from pipeline.inspection.summary import Summary
from pipeline.inspection.svg import chart_svg, shares_svg

TEXT_ROWS, TEXT_TOKENS = 3, 256
MAP_ROWS = 40

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1d2733; background: #fff; max-width: 1000px; margin: 28px auto;
  padding: 0 20px }
h1 { font-size: 22px; margin: 0 0 2px } h2 { font-size: 16px; margin: 34px 0 4px; border-top: 1px solid #dde3ea;
  padding-top: 14px }
p { color: #55616e; margin: 2px 0 10px; max-width: 860px } code { font-size: 12px }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 12px 3px 0; text-align: left;
  vertical-align: top } th { color: #55616e; font-weight: 500 } table.numbers td:not(:first-child),
table.numbers th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums }
table.numbers td { border-top: 1px solid #eef1f4 }
.charts { display: flex; flex-wrap: wrap; gap: 18px 30px } figure { margin: 0 } figcaption { font-weight: 600;
  font-size: 13px } svg { max-width: 100%; height: auto; display: block } svg text { font-size: 11px; fill: #55616e }
svg .note { font-size: 10px } .grid { stroke: #e8ecf0 } .axis { stroke: #98a3af } .rule { stroke: #98a3af;
  stroke-dasharray: 3 3 } .rest { fill: #e3e7eb }
.legend { font-size: 12px; color: #55616e; margin: 2px 0 0 50px } .legend span { margin-right: 14px;
  white-space: nowrap } .legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px }
.text { font: 12.5px/1.75 ui-monospace, monospace; border: 1px solid #dde3ea; padding: 8px 10px; margin: 0 0 10px;
  white-space: pre-wrap; overflow-wrap: anywhere } .text b { color: #2f6db3; font-weight: 600 }
.scale { display: inline-block; width: 160px; height: 10px; vertical-align: middle; margin: 0 6px }
"""


def render(summary: Summary, sample: StoreSample | None, tokenizer: TextTokenizer | None) -> str:
    """The page. Without a tokenizer, tokens are shown as ids."""
    title, *facts = summary.lines()
    rows = "".join(f"<tr><th>{escape(f[:14].strip())}</th><td>{escape(f[14:])}</td></tr>" for f in facts)
    parts = [f"<h1>{escape(title)}</h1><table>{rows}</table>"]
    if sample is not None:
        parts += [_activations(sample), _norms(sample), _text(sample, tokenizer), _packing(sample)]
    parts += [_documents(summary), _run(summary)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def statistics(view: ActivationView) -> list[str]:
    """A view's numbers, as under STATISTICS."""
    norms = view.valid_norms
    found = [norms.mean(), *np.quantile(norms, (0.5, 0.99)), norms.max()] if norms.size else [math.nan] * 4
    dimension = f"{view.effective_dimension:.1f}"
    return [view.name, view.dtype, str(view.width), *map(number, found), dimension, str(view.non_finite)]


STATISTICS = ["array", "dtype", "d", "mean norm", "median", "99 %", "greatest", "effective dim.", "not finite"]


def _activations(sample: StoreSample) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in STATISTICS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in statistics(view)) + "</tr>" for view in sample.views
    )
    return (
        "<h2>Activations</h2>"
        f"<p>L2 norms of {int((sample.beside.segments > 0).sum()):,} tokens in {len(sample.rows)} random rows. The "
        "effective dimension is the participation ratio of the variances of principal components.</p>"
        f'<table class="numbers"><tr>{head}</tr>{body}</table>'
    )


def _norms(sample: StoreSample) -> str:
    left_out = len(sample.views) - MAX_HISTOGRAMS
    more = f"<p>{left_out} more arrays have no histogram here.</p>" if left_out > 0 else ""
    return (
        f"<h2>Norms and variance</h2>{_figures(norm_charts(sample))}"
        f"<h2>Histograms of norms</h2>{_figures(histograms(sample))}{more}"
    )


def _text(sample: StoreSample, tokenizer: TextTokenizer | None) -> str:
    view = sample.views[-1]
    if not view.valid_norms.size:
        return ""
    low, high = np.quantile(view.valid_norms, (0.02, 0.995))
    blocks = [
        _row_of_text(sample, row, view, float(low), float(high), tokenizer)
        for row in range(min(TEXT_ROWS, len(sample.rows)))
    ]
    ramp = f"linear-gradient(90deg, {', '.join(_heat(share) for share in (0, 0.25, 0.5, 0.75, 1))})"
    return (
        f"<h2>Text, coloured by norm</h2><p>{escape(view.name)}, the first {TEXT_TOKENS} tokens of some rows. Colours "
        f'are logarithmic: {number(float(low))}<span class="scale" style="background:{ramp}"></span>'
        f"{number(float(high))}. Point at a token for its numbers; <b>▸</b> begins a document.</p>{''.join(blocks)}"
    )


def _row_of_text(
    sample: StoreSample, row: int, view: ActivationView, low: float, high: float, tokenizer: TextTokenizer | None
) -> str:
    spans, segment = [], 0
    scale = Axis("", max(low, 1e-9), max(high, low * 1.001, 2e-9), log=True)
    beside, norms = sample.text, sample.norms_in_row(view, row)
    for t in np.flatnonzero(beside.segments[row])[:TEXT_TOKENS].tolist():
        token, norm = int(beside.tokens[row, t]), float(norms[t])
        if beside.segments[row, t] != segment:
            segment = beside.segments[row, t]
            spans.append(f'{"<br>" if spans else ""}<b title="document {beside.documents[row, t]}">▸</b>')
        text = tokenizer.decode([token]) if tokenizer else f"{token} "
        shown = escape(text).replace("\n", "↵")
        title = f"token {token}, position {beside.positions[row, t]}"
        if t not in sample.selected[row]:
            spans.append(f'<span title="{title}">{shown}</span>')
            continue
        share = min(1.0, float(scale.share(norm))) if math.isfinite(norm) else 1.0
        title += f", norm {number(norm)}"
        spans.append(f'<span style="background:{_heat(share)}" title="{title}">{shown}</span>')
    return f'<div class="text" title="row {sample.rows[row]}">{"".join(spans)}</div>'


def _heat(share: float) -> str:
    """From white over yellow to red."""
    stops = np.array([[255, 255, 255], [255, 243, 199], [253, 208, 120], [245, 145, 80], [222, 82, 62]])
    at = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    k = min(int(at), len(stops) - 2)
    red, green, blue = (stops[k] + (stops[k + 1] - stops[k]) * (at - k)).round().astype(int)
    return f"rgb({red},{green},{blue})"


def _packing(sample: StoreSample) -> str:
    """Each row as a line of bars: its document windows."""
    segments = sample.text.segments[:MAP_ROWS]
    width, height, length = 900, 9, segments.shape[1]
    shapes = []
    for r, row in enumerate(segments):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            x, wide = width * start / length, width * (stop - start) / length
            document = int(sample.text.documents[r, start])
            kind = f'fill="{COLOURS[document % 7]}"' if row[start] else 'class="rest"'
            what = f"document {document}" if row[start] else "padding"
            shapes.append(
                f'<rect x="{x:.1f}" y="{r * height}" width="{max(wide - 0.5, 0.3):.1f}" height="{height - 2}" {kind}>'
                f"<title>row {sample.rows[r]}, {what}: {stop - start} tokens</title></rect>"
            )
    svg = f'<svg viewBox="0 0 {width} {len(segments) * height}" width="{width}">{"".join(shapes)}</svg>'
    return (
        f"<h2>Packing</h2><p>{len(segments)} of the sampled rows, {length} slots each. A bar is a document's window in "
        f"the row; padding is grey.</p>{svg}"
    )


def _documents(summary: Summary) -> str:
    return f"<h2>Documents and blocks</h2>{_figures(document_charts(summary))}"


def _run(summary: Summary) -> str:
    parts = []
    for name, snapshots in summary.runs.items():
        last = snapshots[-1]
        figures = (
            f"{last['tokens']:,} tokens in {last['elapsed_s']:.1f} s, {last['tokens_per_s']:,.0f} tokens/s; greatest "
            f"memory {last['peak_rss_mib']} MiB."
        )
        parts.append(f"<p><code>{escape(name)}</code><br>{figures}</p>{_figures(run_charts(snapshots))}")
    return f"<h2>Runs</h2>{''.join(parts) or '<p>No run has left its log.</p>'}"


def _figures(charts: Sequence[Chart | Shares]) -> str:
    figures = (
        f"<figure><figcaption>{escape(chart.caption)}</figcaption>"
        f"{chart_svg(chart) if isinstance(chart, Chart) else shares_svg(chart)}</figure>"
        for chart in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'
