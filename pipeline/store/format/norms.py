"""L2 norms of activations."""

import numpy as np
from jaxtyping import Float32


def l2_norms(activations: np.ndarray) -> Float32[np.ndarray, " n"]:
    """The L2 norm of each row of [n, D], in float32."""
    values = activations.astype(np.float32)
    return np.sqrt(np.einsum("nd,nd->n", values, values))
