"""What the model's head says of the stored tokens, as the store will hold it.

Letters: B rows, T positions, S slots of a row for activations, D model dim, k likeliest next tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pipeline.models.decoder import Params
from pipeline.models.head import Head
from pipeline.models.token_outputs import token_outputs
from pipeline.step.spec import StepSpec


class StoredTokens:
    """The tokens of a step whose activations are stored: those at `selected` row positions, or all. Traced."""

    def __init__(self, tokens: Int32[Array, "B T"], segments: Int32[Array, "B T"], selected: Sequence[Array]) -> None:
        self._selected = selected
        self.valid: Bool[Array, "B T"] = segments != 0  # of all tokens
        self.exist: Bool[Array, "B S"] = selected[0] >= 0 if selected else self.valid
        self._tokens, self._segments = tokens, segments

    def take(self, values: Shaped[Array, "B T *D"]) -> Shaped[Array, "B S *D"]:
        """The values of these tokens, of those of all positions."""
        for places in self._selected:
            at = jnp.maximum(places, 0)
            values = jnp.take_along_axis(values, at[:, :, None] if values.ndim == 3 else at, axis=1)
        return values

    def following(self) -> tuple[Int32[Array, "B S"], Bool[Array, "B S"]]:
        """The next token in the row, and whether there is one in the same window of a document."""
        following = jnp.roll(self._segments, -1, axis=1).at[:, -1].set(0)
        is_same = (following == self._segments) & self.valid
        return self.take(jnp.roll(self._tokens, -1, axis=1)), self.take(is_same) & self.exist


def head_outputs(
    spec: StepSpec, head: Head, params: Params, x: Float[Array, "B T D"], stored: StoredTokens, mesh: Mesh
) -> tuple[tuple[Shaped[Array, "B S *k"], ...], tuple[Bool[Array, "B S"], ...]]:
    """From the last norm's output x: the specification's arrays, 0 where there is no token; and of each array of
    floats where it is not finite. A loss is NaN where the token has no next one."""
    next_tokens, has_next = stored.following()
    computed = token_outputs(head, params, stored.take(x), next_tokens, spec.num_top, mesh)
    outputs, not_finite = [], []
    with jax.named_scope("store"):
        for array in spec.head_outputs:
            values, is_defined = getattr(computed, array.name), stored.exist
            if array.name == "loss":
                values, is_defined = jnp.where(has_next, values, jnp.nan), has_next
            if jnp.issubdtype(values.dtype, jnp.floating):
                is_finite = jnp.isfinite(values)
                not_finite.append(is_defined & ~(is_finite.all(axis=-1) if values.ndim == 3 else is_finite))
            outputs.append(jnp.where(stored.exist[:, :, None] if values.ndim == 3 else stored.exist, values, 0))
    return tuple(outputs), tuple(not_finite)
