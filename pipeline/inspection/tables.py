"""The table of a sample's activations, with a row of numbers per array."""

import math

import numpy as np

from pipeline.inspection.sample import ActivationView

HEADER = ["array", "dtype", "d", "mean norm", "median", "99 %", "maximum", "effective dim.", "not finite"]


def table_row(view: ActivationView) -> list[str]:
    """An array's cells in the order of HEADER."""
    norms = view.valid_norms
    values = [norms.mean(), *np.quantile(norms, (0.5, 0.99)), norms.max()] if norms.size else [math.nan] * 4
    dimension = f"{view.effective_dimension:.1f}"
    return [view.name, view.dtype, str(view.width), *map(number, values), dimension, str(view.non_finite)]


def number(value: float) -> str:
    """A number in short form: 0.25, 12, 3.4k, 1.2M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if suffix == 'k' else scale):.4g}{suffix}"
    return f"{value:.4g}"
