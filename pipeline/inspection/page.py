"""An HTML page about a store: tables, charts as inline SVG, and text coloured by norm. The page is self-contained."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.inspection.charts import (
    MAX_HISTOGRAMS,
    MAX_PACKED_ROWS,
    Chart,
    document_charts,
    histograms,
    norm_charts,
    packing_chart,
    run_charts,
)
from pipeline.inspection.sample import ActivationView, StoreSample
from pipeline.inspection.summary import Summary
from pipeline.inspection.tables import HEADER, number, table_row

TEXT_ROWS, TEXT_TOKENS = 3, 256

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
  font-size: 13px } svg { max-width: 100%; height: auto; display: block }
.text { font: 12.5px/1.75 ui-monospace, monospace; border: 1px solid #dde3ea; padding: 8px 10px; margin: 0 0 10px;
  white-space: pre-wrap; overflow-wrap: anywhere } .text b { color: #2f6db3; font-weight: 600 }
.scale { display: inline-block; width: 160px; height: 10px; vertical-align: middle; margin: 0 6px }
"""


def render(summary: Summary, sample: StoreSample | None, tokenizer: TextTokenizer | None) -> str:
    """Renders the page. Without a tokenizer, tokens are shown as ids."""
    title, *facts = summary.lines()
    rows = "".join(f"<tr><th>{escape(f[:14].strip())}</th><td>{escape(f[14:])}</td></tr>" for f in facts)
    parts = [f"<h1>{escape(title)}</h1><table>{rows}</table>"]
    if sample is not None:
        parts += [_activations(sample), _norms(sample), _text(sample, tokenizer)] if sample.views else []
        parts += [_packing(sample)]
    parts += [_documents(summary), _run(summary)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _activations(sample: StoreSample) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in table_row(view)) + "</tr>" for view in sample.views
    )
    return (
        "<h2>Activations</h2>"
        f"<p>L2 norms of {int((sample.side_arrays.segments > 0).sum()):,} tokens in {len(sample.rows)} random rows. "
        "The effective dimension is the participation ratio of the variances of principal components.</p>"
        f'<table class="numbers"><tr>{head}</tr>{body}</table>'
    )


def _norms(sample: StoreSample) -> str:
    left_out = len(sample.views) - MAX_HISTOGRAMS
    more = f"<p>The histograms of {left_out} more arrays are not shown.</p>" if left_out > 0 else ""
    return (
        f"<h2>Norms and variance</h2>{figures(norm_charts(sample))}"
        f"<h2>Histograms of norms</h2>{figures(histograms(sample))}{more}"
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
    return (
        f"<h2>Text, coloured by norm</h2><p>{escape(view.name)}, the first {TEXT_TOKENS} tokens of some rows. Colours "
        f'are logarithmic: {number(float(low))}<span class="scale" style="background:{ramp()}"></span>'
        f"{number(float(high))}. Hover over a token to see its id, position and norm; <b>▸</b> marks the start of a "
        "document, or of a window of a long document.</p>"
        f"{''.join(blocks)}"
    )


def _row_of_text(
    sample: StoreSample, row: int, view: ActivationView, low: float, high: float, tokenizer: TextTokenizer | None
) -> str:
    spans, segment = [], 0
    log_low = math.log(max(low, 1e-9))
    log_range = math.log(max(high, low * 1.001, 2e-9)) - log_low
    text, norms = sample.text, sample.norms_in_row(view, row)
    for t in np.flatnonzero(text.segments[row])[:TEXT_TOKENS].tolist():
        token, norm = int(text.tokens[row, t]), float(norms[t])
        if text.segments[row, t] != segment:
            segment = text.segments[row, t]
            spans.append(f'{"<br>" if spans else ""}<b title="document {text.documents[row, t]}">▸</b>')
        shown = escape(shown_token(token, tokenizer))
        title = f"token {token}, position {text.positions[row, t]}"
        if t not in sample.selected[row]:
            spans.append(f'<span title="{title}">{shown}</span>')
            continue
        share = (math.log(max(norm, 1e-9)) - log_low) / log_range if math.isfinite(norm) else 1.0
        title += f", norm {number(norm)}"
        spans.append(f'<span style="background:{heat(share)}" title="{title}">{shown}</span>')
    return f'<div class="text" title="row {sample.rows[row]}">{"".join(spans)}</div>'


def shown_token(token: int, tokenizer: TextTokenizer | None) -> str:
    """A token's text, or its id without a tokenizer."""
    return tokenizer.decode([token]).replace("\n", "↵") if tokenizer else f"{token} "


def heat(share: float) -> str:
    """A colour between white (0), yellow and red (1)."""
    stops = np.array([[255, 255, 255], [255, 243, 199], [253, 208, 120], [245, 145, 80], [222, 82, 62]])
    offset = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    k = min(int(offset), len(stops) - 2)
    red, green, blue = (stops[k] + (stops[k + 1] - stops[k]) * (offset - k)).round().astype(int)
    return f"rgb({red},{green},{blue})"


def ramp() -> str:
    """The colours of `heat`, as a CSS background."""
    return f"linear-gradient(90deg, {', '.join(heat(share) for share in (0, 0.25, 0.5, 0.75, 1))})"


def _packing(sample: StoreSample) -> str:
    chart = packing_chart(sample)
    num_rows = min(MAX_PACKED_ROWS, len(sample.rows))
    return (
        f"<h2>Packing</h2><p>{num_rows} of the sampled rows, {sample.text.segments.shape[1]} slots each. Each colour "
        f"is a window of a document; padding is grey.</p>{chart.svg}"
    )


def _documents(summary: Summary) -> str:
    return f"<h2>Documents and blocks</h2>{figures(document_charts(summary))}"


def _run(summary: Summary) -> str:
    parts = []
    for name, snapshots in summary.runs.items():
        last = snapshots[-1]
        rate = (
            f"{last['tokens']:,} tokens in {last['elapsed_s']:.1f} s, {last['tokens_per_s']:,.0f} tokens/s; peak "
            f"memory {last['peak_rss_mib']} MiB."
        )
        parts.append(f"<p><code>{escape(name)}</code><br>{rate}</p>{figures(run_charts(snapshots))}")
    return f"<h2>Runs</h2>{''.join(parts) or '<p>The store has no log of a run.</p>'}"


def figures(charts: Sequence[Chart]) -> str:
    """HTML for several charts with their captions."""
    figures = (f"<figure><figcaption>{escape(c.caption)}</figcaption>{c.svg}</figure>" for c in charts)
    return f'<div class="charts">{"".join(figures)}</div>'
