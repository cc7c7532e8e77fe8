"""An HTML page about an SAE's features: how often they fire, and what some of them fire on. The page is
self-contained."""

from html import escape

import numpy as np

from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.inspection.charts import density_chart, value_histogram
from pipeline.inspection.features import MAX_FIRINGS, Context, FeatureView, SAEView
from pipeline.inspection.page import STYLE, figures, heat, ramp, shown_token
from pipeline.inspection.summary import Summary
from pipeline.inspection.tables import number

_STYLE = """
h1, td { overflow-wrap: anywhere } h2 a { color: inherit; text-decoration: none } table a { color: #2f6db3 }
.feature { display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: flex-start } .feature figure { flex: 0 1 320px }
.contexts { flex: 1 1 440px; min-width: 0 } .context { display: flex; gap: 8px; border-top: 1px solid #eef1f4;
  padding: 5px 0 } .context .text { border: 0; padding: 0; margin: 0; flex: 1; min-width: 0; line-height: 1.6 }
.context > span { flex: 0 0 42px; text-align: right; font-size: 12px; line-height: 20px; color: #55616e;
  font-variant-numeric: tabular-nums } .text u { text-decoration-thickness: 2px; text-underline-offset: 3px }
.wide { overflow-x: auto } .wide td { white-space: nowrap } th { white-space: nowrap }
table.numbers td.token, table.numbers th.token { text-align: left; padding-left: 12px } table.numbers td.token {
  font: 12.5px ui-monospace, monospace; white-space: pre }
@media (max-width: 600px) { body { margin: 14px auto; padding: 0 12px } h1 { font-size: 19px } h2 { margin-top: 26px }
  td, th { padding-right: 9px } }
"""


def render(summary: Summary, sae: SAEView, tokenizer: TextTokenizer | None) -> str:
    """Renders the page. Without a tokenizer, tokens are shown as ids."""
    title = f"Features of {sae.name}"
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{STYLE}{_STYLE}</style>'
    parts = [f"<h1>{escape(title)}</h1>{_facts(summary, sae)}", _density(sae), _table(sae, tokenizer)]
    parts += [_feature(view, tokenizer) for view in sae.features]
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(summary: Summary, sae: SAEView) -> str:
    statistics, described = sae.statistics, sae.description
    never, stored = int((statistics.count == 0).sum()), statistics.count.sum() / max(statistics.tokens, 1)
    facts = {
        "store": summary.path,
        "model": summary.root.metadata.config.get("model", {}).get("path", summary.root.metadata.model.get("family")),
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
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
    return f"<table>{rows}</table>"


def _density(sae: SAEView) -> str:
    shown = np.array([view.frequency for view in sae.features if view.count])
    chart = density_chart(sae.frequencies, shown)
    return f"<h2>Density</h2><p>Red marks: the features on this page.</p>{figures([chart])}"


def _table(sae: SAEView, tokenizer: TextTokenizer | None) -> str:
    rows = []
    for view in sae.features:
        context = view.contexts[0] if view.contexts else None
        token = "" if context is None else shown_token(int(context.tokens[context.strongest]), tokenizer)
        link = f'<a href="#f{view.feature}">{view.feature}</a>'
        cells = [link, _percent(view.frequency), number(view.mean), number(view.maximum)]
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr>{numbers}<td class="token">{escape(token)}</td></tr>')
    header = "".join(f"<th>{name}</th>" for name in ("feature", "in tokens", "mean", "maximum"))
    header += '<th class="token">strongest on</th>'
    return (
        f'<h2>Features on this page</h2><p>Tokens below are coloured by the feature, from 0 <span class="scale" '
        f'style="background:{ramp()}"></span> to its maximum; the strongest is underlined. Hover over a token to see '
        f'its id and value.</p><div class="wide"><table class="numbers"><tr>{header}</tr>{"".join(rows)}'
        f"</table></div>"
    )


def _feature(view: FeatureView, tokenizer: TextTokenizer | None) -> str:
    title = f'<h2 id="f{view.feature}"><a href="#f{view.feature}">Feature {view.feature}</a></h2>'
    if not view.count:
        return f"{title}<p>This feature is not stored for any token.</p>"
    chart = value_histogram(view)
    figure = f"<figure><figcaption>{chart.caption}</figcaption>{chart.svg}</figure>" if chart else ""
    left_out = "" if chart else f" There is no histogram, because it fires more than {MAX_FIRINGS:,} times."
    contexts = "".join(_context(context, view.maximum, tokenizer) for context in view.contexts)
    return (
        f"{title}<p>Stored in {_percent(view.frequency)} of tokens ({view.count:,}); mean {number(view.mean)}, maximum "
        f"{number(view.maximum)}.{left_out} The strongest firings in {len(view.contexts)} different rows:</p>"
        f'<div class="feature"><div class="contexts">{contexts}</div>{figure}</div>'
    )


def _context(context: Context, maximum: float, tokenizer: TextTokenizer | None) -> str:
    """A line of tokens, coloured by value from white (0) to red (the feature's maximum). The strongest is
    underlined."""
    spans = []
    for index, (token, value) in enumerate(zip(context.tokens.tolist(), context.values.tolist(), strict=True)):
        shown = escape(shown_token(token, tokenizer))
        if value > 0:
            tag = "u" if index == context.strongest else "span"
            colour = heat(value / maximum if maximum > 0 else 1.0)
            spans.append(f'<{tag} style="background:{colour}" title="token {token}, {number(value)}">{shown}</{tag}>')
        else:
            spans.append(shown)
    strongest = number(float(context.values[context.strongest]))
    title = f"document {context.document}, position {context.position}, row {context.row}"
    return (
        f'<div class="context"><span title="{title}">{strongest}</span><div class="text">{"".join(spans)}</div></div>'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 1e-4 else f"{100 * share:.2g} %"
