"""Charts as data: marks on one pair of axes. `svg` and `png` draw them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

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


class Line(NamedTuple):
    """Through the points whose y is finite."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    label: str = ""
    dots: bool = False
    opacity: float = 1.0


class Band(NamedTuple):
    """The area between two lines."""

    xs: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    colour: str


class Bars(NamedTuple):
    """A bar between each edge and the next."""

    edges: Sequence[float]
    heights: Sequence[float]
    colour: str


class Rule(NamedTuple):
    """A vertical line at x, named."""

    x: float
    label: str


@dataclass
class Chart:
    """Marks on a pair of axes, under a caption. `size` in pixels."""

    caption: str
    x: Axis
    y: Axis
    size: tuple[int, int] = (460, 260)
    marks: list[Line | Band | Bars | Rule] = field(default_factory=list)

    def add(self, *marks: Line | Band | Bars | Rule) -> "Chart":
        self.marks += marks
        return self


@dataclass(frozen=True)
class Shares:
    """Named shares of a total, in seconds, under a caption: one horizontal bar."""

    caption: str
    parts: Sequence[tuple[str, float]]
    total: float

    @property
    def labels(self) -> list[str]:
        return [f"{label} {value:.1f} s" for label, value in self.parts]


def number(value: float) -> str:
    """Short: 0.25, 12, 3.4k, 1.2M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):.4g}{suffix}"
    return f"{value:.4g}"
