"""The HTML pages of `inspect`: about a store, and about an SAE's features. Each is one self-contained file."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from jaxtyping import Int16

from pipeline.data.text.labels import Label, Part, Role
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.store import ActivationStore
from pipeline.store.inspection import charts
from pipeline.store.inspection.features import MAX_FIRINGS, Context, FeatureView, SAEView
from pipeline.store.inspection.sample import HEADER, ActivationView, StoreSample, number
from pipeline.store.inspection.summary import document_lengths

MAX_HISTOGRAMS = 24
TEXT_ROWS, TEXT_TOKENS = 3, 256
_LINES = ("#c3cad2", "#8a6fb3", "#b36fa8", "#2f6db3", "#3a9a5b", "#c07a1f")  # by `Role`

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1d2733; background: #fff; max-width: 1000px; margin: 28px auto;
  padding: 0 20px }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere } h2 { font-size: 16px; margin: 34px 0 4px;
  border-top: 1px solid #dde3ea; padding-top: 14px } p { color: #55616e; margin: 2px 0 10px; max-width: 860px }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 12px 3px 0; text-align: left;
  vertical-align: top } td { overflow-wrap: anywhere } th { color: #55616e; font-weight: 500; white-space: nowrap }
.wide { overflow-x: auto } .wide td { white-space: nowrap; text-align: right; border-top: 1px solid #eef1f4;
  font-variant-numeric: tabular-nums } .wide th { text-align: right } .wide .name { text-align: left }
.charts { display: flex; flex-wrap: wrap; gap: 18px 30px } figure { margin: 0 } figcaption { font-weight: 600;
  font-size: 13px } svg { max-width: 100%; height: auto; display: block }
.text { font: 12.5px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 10px }
.text b { color: #2f6db3; font-weight: 600 } .text u { text-decoration-thickness: 2px; text-underline-offset: 3px }
.scale { display: inline-block; width: 160px; height: 10px; vertical-align: middle; margin: 0 6px }
.feature { display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: flex-start } .feature figure { flex: 0 1 320px }
.contexts { flex: 1 1 440px; min-width: 0 } .context { display: flex; gap: 8px; border-top: 1px solid #eef1f4;
  padding: 5px 0 } .context .text { margin: 0; min-width: 0 } .context > span { flex: 0 0 42px; text-align: right;
  font-size: 12px; line-height: 20px; color: #55616e; font-variant-numeric: tabular-nums }
"""


def store_page(
    store: ActivationStore, facts: Mapping[str, str], sample: StoreSample | None, tokenizer: TextTokenizer | None
) -> str:
    """Renders the page about a store. Without a tokenizer, tokens are shown as ids."""
    sections = []
    if sample is not None and sample.views:
        sections += [_activations(sample), _labels(sample)]
        if views := [view for view in sample.views if view.finite_norms.size]:
            sections += [_norms(views, sample), _text(views[-1], sample, tokenizer)]
    if (lengths := document_lengths(store)).size:
        chart = charts.histogram(lengths, "tokens", "documents", ("a row", store.length), (460, 260))
        sections.append(f"<h2>Documents</h2>{_figures([('Document lengths', chart)])}")
    return _page(store.path, facts, sections)


def _page(title: str, facts: Mapping[str, object], sections: Sequence[str]) -> str:
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{_STYLE}</style>'
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
    body = f"<h1>{escape(title)}</h1><table>{rows}</table>{''.join(sections)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int]) -> str:
    """A table of numbers. `rows` are HTML; the columns `texts` are aligned to the left."""

    def row(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="name"' if k in texts else "" for k in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{mark}>{cell}</{tag}>' for mark, cell in zip(marks, cells, strict=True))}</tr>"

    return f'<div class="wide"><table>{row("th", header)}{"".join(row("td", cells) for cells in rows)}</table></div>'


def _figures(figures: Sequence[tuple[str, str | None]]) -> str:
    """HTML for several charts with their captions."""
    parts = (f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in figures if svg)
    return f'<div class="charts">{"".join(parts)}</div>'


def _activations(sample: StoreSample) -> str:
    rows = [[escape(cell) for cell in view.table_row()] for view in sample.views]
    num_tokens = int((sample.text.documents >= 0).sum())
    return (
        f"<h2>Activations</h2><p>L2 norms in {len(sample.rows)} random rows with {num_tokens:,} tokens.</p>"
        f"{_table(HEADER, rows, texts=(0,))}"
    )


def _norms(views: Sequence[ActivationView], sample: StoreSample) -> str:
    figures = [
        ("Norm by layer: mean, and 5 to 95 %", charts.norms_by_layer(views)),
        ("Mean norm by position in the document", charts.norms_by_position(views, sample)),
    ]
    for view in views[:MAX_HISTOGRAMS]:
        if (norms := view.finite_norms[view.finite_norms > 0]).size:
            rule = ("median", float(np.median(norms)))
            figures.append((view.name, charts.histogram(norms, "L2 norm", "tokens", rule)))
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
            title = f"token {token}, position {text['positions'][t]}"
            colour, line = None, None
            if "labels" in text:
                role, part = _roles_and_parts(text["labels"][t]).tolist()
                title += f", message {text['labels'][t][0]}: {Role(role).name}, {Part(part).name}"
                line = _LINES[role]
            if not math.isnan(norm):
                title += f", norm {number(norm)}"
                colour = heat((math.log(max(norm, 1e-9)) - log_low) / log_range)
            spans.append(_token(token, tokenizer, title, colour, line=line))
        rows.append(f'<div class="text" title="row {sample.rows[text_row]}">{"".join(spans)}</div>')
    return (
        f"<h2>Text, coloured by norm</h2><p>{escape(view.name)}, the first {TEXT_TOKENS} tokens of some rows. Colours "
        f"are logarithmic: {number(low)}{_scale()}{number(high)}. Hover over a token to see its id, position and norm; "
        f"<b>▸</b> marks the start of a document, or of a window of a long document.{_legend(sample)}</p>"
        f"{''.join(rows)}"
    )


def _roles_and_parts(labels: Int16[np.ndarray, "*n 5"]) -> Int16[np.ndarray, "*n 2"]:
    """Within the range that they have in a sound store."""
    columns = [Label.role, Label.part]
    return np.clip(labels[..., columns], 0, np.array([max(Role), max(Part)], np.int16))


def _legend(sample: StoreSample) -> str:
    """The colours of the lines below tokens."""
    names = (f'<span style="{_line(_LINES[role])}">{role.name}</span>' for role in Role)
    return "" if sample.text.labels is None else f" Lines below tokens: {', '.join(names)}."


def _labels(sample: StoreSample) -> str:
    """How many tokens have each role and part, if tokens have labels."""
    if sample.text.labels is None:
        return ""
    labels = sample.text.labels[sample.text.documents >= 0]
    counts = np.zeros((len(Role), len(Part)), np.int64)
    np.add.at(counts, tuple(_roles_and_parts(labels).T), 1)
    parts = [part for part in Part if counts[:, part].any()]
    rows = [[role.name, *(f"{counts[role, part]:,}" for part in parts)] for role in Role if counts[role].any()]
    written = f"{labels[:, Label.written].mean():.1%}" if len(labels) else "none"
    return (
        f"<h2>Labels</h2><p>Tokens of these rows by role and part; the assistant wrote {written} of them.</p>"
        f"{_table(['role', *(part.name for part in parts)], rows, texts=(0,))}"
    )


def features_page(store: ActivationStore, sae: SAEView, tokenizer: TextTokenizer | None) -> str:
    """Renders the page about an SAE: how often its features fire, and what some of them fire on."""
    metadata, statistics, described = store.metadata, sae.statistics, sae.description
    never, stored = int((statistics.count == 0).sum()), statistics.count.sum() / max(statistics.tokens, 1)
    facts = {
        "store": store.path,
        "model": metadata.config.get("model", {}).get("path", metadata.model.get("family")),
        "SAE": f"{len(statistics.count):,} features ({described.get('activation')}); the {described['top']} largest "
        f"per token are stored, as {described['dtype']}",
        "tokens": f"{statistics.tokens:,}",
        "L0": f"{statistics.l0:.1f} features fire per token on average, {stored:.1f} of them are stored",
        "never stored": f"{never:,} features ({never / len(statistics.count):.1%})",
    }
    if statistics.explained_variance is not None:
        facts["explains"] = (
            f"{statistics.explained_variance:.1%} of the activations' variance; cosine {statistics.cosine:.3f}"
        )
    shown = np.array([view.frequency for view in sae.features if view.count])
    density = _figures([("How often features fire", charts.densities(sae.frequencies, shown))])
    sections = [f"<h2>Density</h2><p>Red marks: the features on this page.</p>{density}", _overview(sae, tokenizer)]
    sections += [_feature(view, tokenizer) for view in sae.features]
    return _page(f"Features of {sae.name}", facts, sections)


def _overview(sae: SAEView, tokenizer: TextTokenizer | None) -> str:
    rows = []
    for view in sae.features:
        context = view.contexts[0] if view.contexts else None
        token = "" if context is None else _token(int(context.tokens[context.strongest]), tokenizer)
        link = f'<a href="#f{view.feature}">{view.feature}</a>'
        rows.append([link, _percent(view.frequency), number(view.mean), number(view.maximum), token])
    table = _table(("feature", "in tokens", "mean", "maximum", "strongest on"), rows, texts=(4,))
    return (
        f"<h2>Features on this page</h2><p>Tokens below are coloured by the feature, from 0 {_scale()} to its maximum; "
        f"the strongest is underlined. Hover over a token to see its id and value.</p>{table}"
    )


def _feature(view: FeatureView, tokenizer: TextTokenizer | None) -> str:
    title = f'<h2 id="f{view.feature}">Feature {view.feature}</h2>'
    if not view.count:
        return f"{title}<p>This feature is not stored for any token.</p>"
    if view.values is None:
        figures, left_out = "", f" There is no histogram, because it fires more than {MAX_FIRINGS:,} times."
    elif not view.values.size:  # of a damaged store
        figures, left_out = "", ""
    else:
        chart = charts.histogram(view.values, "value", "tokens", ("mean", view.mean), (320, 150))
        figures, left_out = _figures([("Values of firings", chart)]), ""
    contexts = "".join(_context(context, view.maximum, tokenizer) for context in view.contexts)
    return (
        f"{title}<p>Stored in {_percent(view.frequency)} of tokens ({view.count:,}); mean {number(view.mean)}, maximum "
        f"{number(view.maximum)}.{left_out} The strongest firings in {len(view.contexts)} different rows:</p>"
        f'<div class="feature"><div class="contexts">{contexts}</div>{figures}</div>'
    )


def _context(context: Context, maximum: float, tokenizer: TextTokenizer | None) -> str:
    """A line of tokens, coloured by value from white (0) to red (the feature's maximum)."""
    spans = []
    for index, (token, value) in enumerate(zip(context.tokens.tolist(), context.values.tolist(), strict=True)):
        if value > 0:
            tag = "u" if index == context.strongest else "span"
            colour = heat(value / max(value, maximum))
            spans.append(_token(token, tokenizer, f"token {token}, {number(value)}", colour, tag))
        else:
            spans.append(_token(token, tokenizer))
    title = f"document {context.document}, position {context.position}, row {context.row}"
    strongest = number(float(context.values[context.strongest]))
    return (
        f'<div class="context"><span title="{title}">{strongest}</span><div class="text">{"".join(spans)}</div></div>'
    )


def _token(
    token: int,
    tokenizer: TextTokenizer | None,
    title: str = "",
    colour: str | None = None,
    tag: str = "span",
    line: str | None = None,
) -> str:
    """A token's text, or its id without a tokenizer, in an element if it has a title. line: the colour of a line below
    it."""
    shown = escape(tokenizer.decode([token]).replace("\n", "↵") if tokenizer else f"{token} ")
    if not title:
        return shown
    styles = ([] if colour is None else [f"background:{colour}"]) + ([] if line is None else [_line(line)])
    style = f' style="{";".join(styles)}"' if styles else ""
    return f'<{tag}{style} title="{title}">{shown}</{tag}>'


def _line(colour: str) -> str:
    return f"border-bottom:2px solid {colour}"


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


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 1e-4 else f"{100 * share:.2g} %"
