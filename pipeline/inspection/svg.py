"""Charts as inline SVG, without a library."""

import math
from collections.abc import Iterable
from html import escape

from pipeline.inspection.chart import COLOURS, Band, Bars, Chart, Line, Rule, Shares, number

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
SHARES_WIDTH = 560


def chart_svg(chart: Chart) -> str:
    """The chart, and its legend as HTML; not its caption."""
    width, height = chart.size
    right, bottom = width - RIGHT, height - BOTTOM
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">']
    for tick in chart.y.ticks():
        y = _y(chart, tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in chart.x.ticks():
        x = _x(chart, tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    for mark in chart.marks:
        parts += _mark(chart, mark)
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{height - 8}" text-anchor="middle">{escape(chart.x.label)}</text>')
    parts.append(
        f'<text transform="translate(12 {middle_y}) rotate(-90)" text-anchor="middle">{escape(chart.y.label)}</text>'
    )
    labelled = [(mark.label, mark.colour) for mark in chart.marks if isinstance(mark, Line) and mark.label]
    return "".join([*parts, "</svg>", _legend(labelled)])


def _mark(chart: Chart, mark: Line | Band | Bars | Rule) -> Iterable[str]:
    match mark:
        case Line():
            points = [(_x(chart, x), _y(chart, y)) for x, y in zip(mark.xs, mark.ys, strict=True) if math.isfinite(y)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            stroke = f'stroke="{mark.colour}" stroke-width="1.8" opacity="{mark.opacity:.2f}"'
            yield f'<polyline points="{path}" fill="none" {stroke}/>'
            for x, y in points if mark.dots else ():
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{mark.colour}"/>'
        case Band():
            there = [(_x(chart, x), _y(chart, y)) for x, y in zip(mark.xs, mark.lows, strict=True)]
            back = [(_x(chart, x), _y(chart, y)) for x, y in zip(mark.xs, mark.highs, strict=True)][::-1]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in there + back)
            yield f'<polygon points="{path}" fill="{mark.colour}" opacity="0.16"/>'
        case Bars():
            base = _y(chart, chart.y.low)
            for left, right, height in zip(mark.edges[:-1], mark.edges[1:], mark.heights, strict=True):
                x, end, y = _x(chart, left), _x(chart, right), _y(chart, height)
                yield (
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(end - x - 0.6, 0.4):.1f}" '
                    f'height="{max(base - y, 0):.1f}" fill="{mark.colour}">'
                    f"<title>{number(left)} to {number(right)}: {number(height)}</title></rect>"
                )
        case Rule():
            at, bottom = _x(chart, mark.x), chart.size[1] - BOTTOM
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" class="rule"/>'
            yield f'<text x="{at + 3:.1f}" y="{TOP + 9}" class="note">{escape(mark.label)}</text>'


def shares_svg(shares: Shares) -> str:
    """The bar, with what is left of the total in grey, and its legend as HTML."""
    x, shapes = 0.0, [f'<rect width="{SHARES_WIDTH}" height="18" class="rest"/>']
    for k, ((label, value), text) in enumerate(zip(shares.parts, shares.labels, strict=True)):
        wide = SHARES_WIDTH * min(1.0, value / max(shares.total, 1e-12))
        title = f"<title>{escape(label)}: {text.removeprefix(label).strip()}</title>"
        shapes.append(f'<rect x="{x:.1f}" width="{wide:.1f}" height="18" fill="{COLOURS[k % 8]}">{title}</rect>')
        x += wide
    entries = [(text, COLOURS[k % 8]) for k, text in enumerate(shares.labels)]
    return f'<svg viewBox="0 0 {SHARES_WIDTH} 18" width="{SHARES_WIDTH}">{"".join(shapes)}</svg>{_legend(entries)}'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = [f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in entries]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


def _x(chart: Chart, value: float) -> float:
    return LEFT + float(chart.x.share(value)) * (chart.size[0] - LEFT - RIGHT)


def _y(chart: Chart, value: float) -> float:
    return chart.size[1] - BOTTOM - float(chart.y.share(value)) * (chart.size[1] - TOP - BOTTOM)
