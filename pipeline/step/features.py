"""SAE features of the stored tokens' activations, in their stored form.

Letters: B rows, S slots of a row for activations, D width of the site, k stored features per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Shaped

from pipeline.core.sites import ActivationKey
from pipeline.models.decoder import Params
from pipeline.models.sae.encoding import encode
from pipeline.step.head_outputs import StoredTokens
from pipeline.step.spec import StepSpec


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
