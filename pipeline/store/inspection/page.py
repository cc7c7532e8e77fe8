"""The HTML page of `inspect`, about a store and the features of an SAE: one self-contained file, with charts by
matplotlib as <img> elements that contain their pictures."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.data.text.labels import Label, Part, Role
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.store import ActivationStore
from pipeline.store.inspection.views import (
    FEATURES_HEADER,
    NORMS_HEADER,
    ActivationView,
    Context,
    FeatureView,
    SAEView,
    StoreSample,
    features_rows,
)
from pipeline.store.read.stored_statistics import FeatureStatistics

MAX_HISTOGRAMS = 24
TEXT_ROWS, TEXT_TOKENS = 3, 256
_LOGARITHMIC_FROM = 20  # axes are logarithmic from this ratio of the largest to the smallest value
_CHART_STYLE = {
    **{"font.size": 8, "lines.linewidth": 1.3, "legend.frameon": False, "legend.fontsize": 7},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "text.parse_math": False},
}
_PIXELS_PER_INCH = 96  # in CSS; pictures have twice as many, for screens that do

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1d2733; background: #fff; max-width: 1000px; margin: 28px auto;
  padding: 0 20px }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere } h2 { font-size: 16px; margin: 34px 0 4px;
  border-top: 1px solid #dde3ea; padding-top: 14px } p { color: #55616e; margin: 2px 0 10px; max-width: 860px }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 12px 3px 0; text-align: left;
  vertical-align: top } td { overflow-wrap: anywhere } th { color: #55616e; font-weight: 500; white-space: nowrap }
.wide { overflow-x: auto } .wide td { white-space: nowrap; text-align: right; border-top: 1px solid #eef1f4 }
.wide th { text-align: right } .wide :first-child { text-align: left }
.charts { display: flex; flex-wrap: wrap; gap: 18px 30px } figure { margin: 0 } figcaption { font-weight: 600;
  font-size: 13px } img { max-width: 100%; display: block }
.text { font: 12.5px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 10px }
.text b { color: #2f6db3; font-weight: 600 } .text u { text-decoration-thickness: 2px; text-underline-offset: 3px }
.scale { display: inline-block; width: 160px; height: 10px; vertical-align: middle; margin: 0 6px }
.feature { display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: flex-start } .feature figure { flex: 0 1 320px }
.contexts { flex: 1 1 440px; min-width: 0 } .context { display: flex; gap: 8px; border-top: 1px solid #eef1f4;
  padding: 5px 0 } .context .text { margin: 0; min-width: 0 } .context > span { flex: 0 0 42px; text-align: right;
  font-size: 12px; line-height: 20px; color: #55616e }
"""


def store_page(
    store: ActivationStore,
    facts: Mapping[str, str],
    sample: StoreSample | None,
    sae: SAEView | None,
    tokenizer: TextTokenizer | None,
) -> str:
    """Renders the page. Without a tokenizer, tokens are shown as ids."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    sections = [f"<h1>{escape(store.path)}</h1><table>{rows}</table>"]
    if sample is not None and sample.views:
        sections.append(_activations(sample))
        if views := [view for view in sample.views if view.finite_norms.size]:
            sections += [_norms(views, sample), _text(views[-1], sample, tokenizer)]
    if sae is not None:
        sections += [_features(store, sae), *(_feature(view, sae.statistics, tokenizer) for view in sae.features)]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(store.path)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _figures(figures: Sequence[tuple[str, str]]) -> str:
    """HTML for several charts with their captions."""
    parts = (f"<figure><figcaption>{escape(caption)}</figcaption>{image}</figure>" for caption, image in figures)
    return f'<div class="charts">{"".join(parts)}</div>'


def _activations(sample: StoreSample) -> str:
    num_tokens = int((sample.text.documents >= 0).sum())
    return (
        f"<h2>Activations</h2><p>L2 norms in {len(sample.rows)} random rows with {num_tokens:,} tokens.</p>"
        f"{_table(NORMS_HEADER, [view.table_row() for view in sample.views])}"
    )


def _norms(views: Sequence[ActivationView], sample: StoreSample) -> str:
    figures = [("Mean norm by position in the document", _norms_by_position(views, sample))]
    for view in views[:MAX_HISTOGRAMS]:
        if (norms := view.finite_norms[view.finite_norms > 0]).size:
            figures.append((view.name, _histogram(norms, "L2 norm", "tokens")))
    left_out = len(views) - MAX_HISTOGRAMS
    more = f"<p>The histograms of {left_out} more arrays are not shown.</p>" if left_out > 0 else ""
    return f"<h2>Norms</h2>{_figures(figures)}{more}"


def _text(view: ActivationView, sample: StoreSample, tokenizer: TextTokenizer | None) -> str:
    low, high = map(float, np.quantile(view.finite_norms, (0.02, 0.995)))
    log_low = math.log(max(low, 1e-9))
    log_range = math.log(max(high, low * 1.001, 2e-9)) - log_low
    rows = []
    for text_row in range(min(TEXT_ROWS, len(sample.rows))):
        text = {name: values[text_row] for name, values in vars(sample.text).items() if values is not None}
        spans, window = [], None
        for t in np.flatnonzero(text["documents"] >= 0)[:TEXT_TOKENS].tolist():
            token, norm = int(text["tokens"][t]), float(view.norms[text_row, t])
            if (text["segments"][t], text["documents"][t]) != window:  # joined documents share a segment
                window = (text["segments"][t], text["documents"][t])
                spans.append(f'{"<br>" if spans else ""}<b title="document {text["documents"][t]}">▸</b>')
            title, colour = f"token {token}, position {text['positions'][t]}", None
            if "labels" in text:
                label = text["labels"][t]
                role, part = (np.clip(label[Label.role], 0, max(Role)), np.clip(label[Label.part], 0, max(Part)))
                title += f", message {label[Label.message]}: {Role(role).name}, {Part(part).name}"
            if not math.isnan(norm):
                title += f", norm {norm:.4g}"
                colour = heat((math.log(max(norm, 1e-9)) - log_low) / log_range)
            spans.append(_token(token, tokenizer, title, colour))
        rows.append(f'<div class="text" title="row {sample.rows[text_row]}">{"".join(spans)}</div>')
    return (
        f"<h2>Text, coloured by norm</h2><p>{escape(view.name)}, the first {TEXT_TOKENS} tokens of some rows. Colours "
        f"are logarithmic: {low:.4g}{_scale()}{high:.4g}. Hover over a token to see its id, position and norm; "
        f"<b>▸</b> marks the start of a document, or of a window of a long document.</p>{''.join(rows)}"
    )


def _features(store: ActivationStore, sae: SAEView) -> str:
    frequency = sae.statistics.count / max(sae.statistics.tokens, 1)
    figures = []
    if frequency.any():
        chart = _histogram(frequency[frequency > 0], "share of tokens", "features", (460, 220))
        figures.append(("How often features fire", chart))
    return (
        f"<h2>Features of {escape(sae.name)}</h2>{_table(FEATURES_HEADER, features_rows(store))}{_figures(figures)}"
        f"<p>Tokens below are coloured by the feature, from 0 {_scale()} to its maximum; the strongest is underlined. "
        "Hover over a token to see its id and value.</p>"
    )


def _feature(view: FeatureView, statistics: FeatureStatistics, tokenizer: TextTokenizer | None) -> str:
    values = (values[view.feature] for values in (statistics.count, statistics.mean, statistics.maximum))
    count, mean, maximum = map(float, values)
    contexts = "".join(_context(context, maximum, tokenizer) for context in view.contexts)
    figures = []
    if 0 < len(view.values) == count:
        figures.append(("Values of firings", _histogram(view.values, "value", "tokens", (320, 150))))
    return (
        f"<h2>Feature {view.feature}</h2><p>Stored in {100 * count / max(statistics.tokens, 1):.3g} % of tokens "
        f"({count:,.0f}); mean {mean:.4g}, maximum {maximum:.4g}. The strongest firings in "
        f'{len(view.contexts)} different rows:</p><div class="feature"><div class="contexts">{contexts}</div>'
        f"{_figures(figures)}</div>"
    )


def _context(context: Context, maximum: float, tokenizer: TextTokenizer | None) -> str:
    """A line of tokens, coloured by value from white (0) to red (the feature's maximum)."""
    spans = []
    for index, (token, value) in enumerate(zip(context.tokens.tolist(), context.values.tolist(), strict=True)):
        title = f"token {token}, {value:.4g}" if value > 0 else ""
        colour = heat(value / max(value, maximum)) if title else None
        spans.append(_token(token, tokenizer, title, colour, "u" if index == context.strongest else "span"))
    title = f"document {context.document}, position {context.position}, row {context.row}"
    strongest = f"{context.values[context.strongest]:.4g}"
    return (
        f'<div class="context"><span title="{title}">{strongest}</span><div class="text">{"".join(spans)}</div></div>'
    )


def _token(token: int, tokenizer: TextTokenizer | None, title: str, colour: str | None, tag: str = "span") -> str:
    """A token's text, or its id without a tokenizer, in an element if it has a title."""
    shown = escape(tokenizer.decode([token]).replace("\n", "↵") if tokenizer else f"{token} ")
    style = f' style="background:{colour}"' if colour else ""
    return f'<{tag}{style} title="{title}">{shown}</{tag}>' if title else shown


def heat(share: float) -> str:
    """A colour between white (0), yellow and red (1)."""
    stops = np.array([[255, 255, 255], [255, 243, 199], [253, 208, 120], [245, 145, 80], [222, 82, 62]])
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    red, green, blue = (round(np.interp(place, range(len(stops)), channel)) for channel in stops.T)
    return f"rgb({red},{green},{blue})"


def _scale() -> str:
    """A bar of the colours of `heat`."""
    colours = ", ".join(heat(share) for share in (0, 0.25, 0.5, 0.75, 1))
    return f'<span class="scale" style="background:linear-gradient(90deg, {colours})"></span>'


@rc_context(_CHART_STYLE)
def _histogram(values: np.ndarray, xlabel: str, ylabel: str, size: tuple[int, int] = (300, 180)) -> str:
    """A histogram of positive values. size: in CSS pixels."""
    ax = _new_axes(size, xlabel, ylabel)
    low, high = float(values.min()), max(float(values.max()), float(values.min()) * 1.001)
    num_bins = min(60, max(12, round(np.sqrt(len(values)))))
    ax.set_xscale(_axis_scale(low, high))
    ax.hist(values, (np.geomspace if ax.get_xscale() == "log" else np.linspace)(low, high, num_bins + 1))
    return _image(ax)


@rc_context(_CHART_STYLE)
def _norms_by_position(views: Sequence[ActivationView], sample: StoreSample) -> str:
    """A line for each array: the mean norm by position in the document. Up to 12 names stand in the legend."""
    positions = sample.text.positions + 1
    edges = np.unique(np.geomspace(1, positions.max() + 2, 40).round().astype(int))
    ax = _new_axes((460, 260), "position, from 1", "mean L2 norm")
    ax.set_xscale(_axis_scale(1, edges[-1]))
    colours, names_every = colormaps["viridis"](np.linspace(0, 0.9, len(views))), -(-len(views) // 12)
    for k, view in enumerate(views):
        is_token = np.isfinite(view.norms)
        bins = np.digitize(positions[is_token], edges) - 1
        counts, sums = np.bincount(bins), np.bincount(bins, view.norms[is_token])
        filled = np.flatnonzero(counts)
        label = None if k % names_every else view.name
        ax.plot(edges[filled], sums[filled] / counts[filled], color=colours[k], label=label)
    ax.set_yscale(_axis_scale(*ax.dataLim.intervaly))
    ax.legend()
    return _image(ax)


def _new_axes(size: tuple[int, int], xlabel: str, ylabel: str) -> Axes:
    inches = (size[0] / _PIXELS_PER_INCH, size[1] / _PIXELS_PER_INCH)
    ax = Figure(inches, dpi=2 * _PIXELS_PER_INCH, layout="constrained").subplots()
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return ax


def _axis_scale(low: float, high: float) -> str:
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
