"""Side arrays of the selected tokens, where only some tokens' activations are stored.

Shapes: R rows, T positions of a row, K slots of a row for selected tokens (-1 where there are fewer).
"""

import numpy as np
from jaxtyping import Int32, Shaped


def at_selected(
    values: Shaped[np.ndarray, "R T"], selected: Int32[np.ndarray, "R K"], fill: int
) -> Shaped[np.ndarray, "R K"]:
    """The values at the selected positions, `fill` in the slots that hold none."""
    chosen = np.take_along_axis(values, np.maximum(selected, 0), axis=1)
    return np.where(selected >= 0, chosen, np.array(fill, values.dtype))
