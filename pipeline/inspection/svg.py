"""Charts as inline SVG, without a library: lines, bars and cells on one pair of axes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
COLOURS = ("#2f6db3", "#c8553d", "#3c8d5a", "#8a5aa8", "#b58a1c", "#3b9aa8", "#a8476f", "#6b6b6b")


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, both shown. log: a logarithmic one; whole: ticks at whole numbers only."""

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def share(self, value: np.ndarray | float) -> np.ndarray | float:
        """Where a value is between the ends, 0 to 1."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (np.log(np.maximum(value, self.low)) - low) / max(high - low, 1e-12)
        return (np.asarray(value) - self.low) / max(self.high - self.low, 1e-12)

    def ticks(self) -> list[float]:
        if self.log and self.high / self.low >= 20:
            exponents = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
            multiples = (1, 2, 5) if len(exponents) <= 3 else (1,)
            found = [m * 10.0**e for e in exponents for m in multiples]
            found = [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
            return found[:: -(-len(found) // 8)]
        step = 10.0 ** math.floor(math.log10(max(self.high - self.low, 1e-12)))
        step *= next((m for m in (0.1, 0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (step * m) <= 6), 2.0)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """Marks on a pair of axes. Methods add marks and return the chart; `svg` draws it."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    _marks: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        label: str = "",
        dots: bool = False,
        opacity: float = 1.0,
    ) -> "Chart":
        points = [(self._x(x), self._y(y)) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'stroke="{colour}" stroke-width="1.8" opacity="{opacity:.2f}"'
        self._marks.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        if dots:
            self._marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if label:
            self._legend.append((label, colour))
        return self

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: str) -> "Chart":
        there = [(self._x(x), self._y(y)) for x, y in zip(xs, lows, strict=True)]
        back = [(self._x(x), self._y(y)) for x, y in zip(xs, highs, strict=True)][::-1]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in there + back)
        self._marks.append(f'<polygon points="{path}" fill="{colour}" opacity="0.16"/>')
        return self

    def bars(self, edges: Sequence[float], heights: Sequence[float], colour: str) -> "Chart":
        base = self._y(self.y.low)
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True):
            x, end, y = self._x(left), self._x(right), self._y(height)
            self._marks.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(end - x - 0.6, 0.4):.1f}" height="{max(base - y, 0):.1f}" '
                f'fill="{colour}"><title>{number(left)} to {number(right)}: {number(height)}</title></rect>'
            )
        return self

    def rule(self, x: float, label: str) -> "Chart":
        """A vertical line at x, named."""
        at = self._x(x)
        self._marks.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}" class="rule"/>'
            f'<text x="{at + 3:.1f}" y="{TOP + 9}" class="note">{escape(label)}</text>'
        )
        return self

    def svg(self) -> str:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img">']
        for tick in self.y.ticks():
            y = self._y(tick)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in self.x.ticks():
            x = self._x(tick)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
        parts += self._marks
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
        middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
        parts.append(f'<text x="{middle_x}" y="{self.height - 8}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(
            f'<text transform="translate(12 {middle_y}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'
        )
        return "".join([*parts, "</svg>", legend(self._legend)])

    def _x(self, value: float) -> float:
        return LEFT + float(self.x.share(value)) * (self.width - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return self.height - BOTTOM - float(self.y.share(value)) * (self.height - TOP - BOTTOM)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Labels with their colours, as HTML."""
    items = [f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in entries]
    return f'<div class="legend">{"".join(items)}</div>' if items else ""


def stacked_bar(parts: Sequence[tuple[str, float]], total: float, width: int = 560) -> str:
    """One horizontal bar of named shares of a total, with what is left in grey."""
    x, shapes = 0.0, [f'<rect width="{width}" height="18" class="rest"/>']
    for k, (label, value) in enumerate(parts):
        wide = width * min(1.0, value / max(total, 1e-12))
        title = f"<title>{escape(label)}: {value:.1f} s</title>"
        shapes.append(f'<rect x="{x:.1f}" width="{wide:.1f}" height="18" fill="{COLOURS[k % 8]}">{title}</rect>')
        x += wide
    entries = [(f"{label} {value:.1f} s", COLOURS[k % 8]) for k, (label, value) in enumerate(parts)]
    return f'<svg viewBox="0 0 {width} 18" width="{width}">{"".join(shapes)}</svg>{legend(entries)}'


def number(value: float) -> str:
    """Short: 0.25, 12, 3.4k, 1.2M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):.4g}{suffix}"
    return f"{value:.4g}"
