"""What SAEs and the model's head compute for the stored tokens, in its stored form.

Letters: B rows, T positions, S slots of a row for activations, D width of the site or model, k features or tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pipeline.core.sites import ActivationKey
from pipeline.models.decoder import Params
from pipeline.models.exchange.context import in_device_order, in_row_order, take_positions
from pipeline.models.head import Head
from pipeline.models.partition import Partition
from pipeline.models.sae.encoding import encode
from pipeline.models.token_outputs import token_outputs
from pipeline.step.spec import StepSpec


class StoredTokens:
    """The tokens of a step whose activations are stored: those at `selected` row positions, or all tokens. Traced."""

    def __init__(
        self, tokens: Int32[Array, "B T"], segments: Int32[Array, "B T"], selected: Sequence[Array], mesh: Mesh
    ) -> None:
        self._selected, self._mesh = selected, mesh
        self.valid: Bool[Array, "B T"] = segments != 0  # all tokens, not only stored ones
        self.exist: Bool[Array, "B S"] = selected[0] >= 0 if selected else self.valid
        self._tokens, self._segments = tokens, segments

    def take(self, values: Shaped[Array, "B T *D"]) -> Shaped[Array, "B S *D"]:
        """The values of the stored tokens, from the values of all positions."""
        for selected in self._selected:
            values = take_positions(values, jnp.maximum(selected, 0), self._mesh)
        return values

    def next_tokens(self) -> tuple[Int32[Array, "B S"], Bool[Array, "B S"]]:
        """The next token in the row, and whether it belongs to the same segment."""
        tokens, segments = (in_row_order(values, self._mesh) for values in (self._tokens, self._segments))
        next_segments = jnp.roll(segments, -1, axis=1).at[:, -1].set(0)
        is_same = in_device_order((next_segments == segments) & (segments != 0), self._mesh)
        next_tokens = in_device_order(jnp.roll(tokens, -1, axis=1), self._mesh)
        return self.take(next_tokens), self.take(is_same) & self.exist


def head_outputs(
    spec: StepSpec, head: Head, params: Params, x: Float[Array, "B T D"], stored: StoredTokens, partition: Partition
) -> tuple[tuple[Shaped[Array, "B S *k"], ...], tuple[Bool[Array, "B S"], ...]]:
    """Computes the spec's arrays from the last norm's output x, with 0 in empty slots. A token without a next token has
    a loss of NaN. The second result marks the non-finite values of each float array."""
    next_tokens, has_next = stored.next_tokens()
    computed = token_outputs(head, params, stored.take(x), next_tokens, spec.num_top, partition)
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


class StoredFeatures(NamedTuple):
    """The arrays of one SAE, in the order of `layout.feature_specs`: index and value [B, S, k], n_active [B, S]; with
    the reconstruction error, also squared_error and cosine [B, S]."""

    arrays: tuple[Shaped[Array, "B S *k"], ...]
    not_finite: Bool[Array, "B S"]  # tokens with a non-finite activation or feature


def encode_features(
    key: ActivationKey, spec: StepSpec, params: Params, x: Float[Array, "B T D"], stored: StoredTokens, mesh: Mesh
) -> dict[str, StoredFeatures]:
    """The features of each SAE that encodes this activation, by name. Empty slots have no features."""
    encoders = [encoder for encoder in spec.encoders if encoder.key == key]
    if not encoders:
        return {}
    taken = jnp.where(stored.exist[:, :, None], stored.take(x), 0)
    features = {}
    for encoder in encoders:
        arrays = params["encoders"][encoder.name]
        encoded = encode(encoder.sae, arrays, taken, encoder.top, encoder.threshold, mesh, encoder.decodes)
        with jax.named_scope("store"):
            is_finite = jnp.isfinite(taken).all(axis=-1) & jnp.isfinite(encoded.value).all(axis=-1)
            for part in encoded.reconstruction or ():
                is_finite &= jnp.isfinite(part)
            features[encoder.name] = StoredFeatures(
                (
                    jnp.where(stored.exist[:, :, None], encoded.index, -1),
                    jnp.where(stored.exist[:, :, None], encoded.value, 0).astype(encoder.dtype),
                    jnp.where(stored.exist, encoded.n_active, 0),
                    *(jnp.where(stored.exist, part, 0) for part in encoded.reconstruction or ()),
                ),
                ~is_finite,
            )
    return features
