"""Draws charts with matplotlib: each as SVG for an HTML page, or all of them as one PNG."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from pipeline.inspection.charts import Chart

_STYLE = {
    **{"font.size": 8, "font.sans-serif": ["DejaVu Sans"], "lines.linewidth": 1.3, "lines.markersize": 3},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.titlesize": 9},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "legend.frameon": False, "legend.fontsize": 7},
    **{"svg.fonttype": "none", "svg.hashsalt": "charts", "text.parse_math": False},
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Namespaces, which HTML does not need, and numbered ids, which would be the same in every chart.
_NOT_FOR_HTML = re.compile(r' xmlns(?::xlink)?="[^"]*"| id="[\w.]+_\d{1,4}"')
_PIXELS_PER_INCH = 96  # in CSS
_COLUMNS = 3
_PNG_INCHES, _PNG_DPI = (4.6, 2.9), 110  # per chart


def svg(chart: Chart) -> str:
    """The chart as an <svg> element for an HTML page, without its caption."""
    width, height = chart.size
    with rc_context(_STYLE):
        figure = Figure((width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH), layout="constrained")
        chart.draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA, transparent=True)
    document = text.getvalue()
    return _NOT_FOR_HTML.sub("", document[document.index("<svg") :])


def write_png(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Draws the charts in _COLUMNS columns. Raises OSError."""
    rows = -(-len(charts) // _COLUMNS) or 1
    with rc_context(_STYLE):
        figure = Figure((_COLUMNS * _PNG_INCHES[0], rows * _PNG_INCHES[1] + 0.4), _PNG_DPI, layout="constrained")
        figure.suptitle(title, fontsize=11)
        axes = figure.subplots(rows, _COLUMNS, squeeze=False).flat
        for chart, ax in zip(charts, axes, strict=False):
            ax.set_title(chart.caption)
            chart.draw(ax)
        for ax in axes:  # the remaining axes have no chart
            ax.set_axis_off()
        figure.savefig(path, format="png")
