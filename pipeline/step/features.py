"""What SAEs make of the stored tokens' activations, as the store will hold it.

Letters: B rows, S slots of a row for activations, D width of the site, k features of a token that are stored.
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
    """In the order of `layout.feature_specs`: index and value [B, S, k], n_active [B, S], and where the reconstruction
    is measured squared_error and cosine [B, S]."""

    arrays: tuple[Shaped[Array, "B S *k"], ...]
    not_finite: Bool[Array, "B S"]  # tokens with an activation, or a value, that is not


def features_of(
    key: ActivationKey, spec: StepSpec, params: Params, x: Float[Array, "B T D"], stored: StoredTokens, mesh: Mesh
) -> dict[str, StoredFeatures]:
    """Of each SAE that encodes this activation, by name; nothing where there is no token."""
    encoders = [encoder for encoder in spec.encoders if encoder.key == key]
    if not encoders:
        return {}
    taken = jnp.where(stored.exist[:, :, None], stored.take(x), 0)
    features = {}
    for encoder in encoders:
        arrays = params["encoders"][encoder.name]
        found = encode(encoder.sae, arrays, taken, encoder.top, encoder.threshold, mesh, encoder.decodes)
        with jax.named_scope("store"):
            is_finite = jnp.isfinite(taken).all(axis=-1) & jnp.isfinite(found.value).all(axis=-1)
            for part in found.reconstruction or ():
                is_finite &= jnp.isfinite(part)
            features[encoder.name] = StoredFeatures(
                (
                    jnp.where(stored.exist[:, :, None], found.index, -1),
                    jnp.where(stored.exist[:, :, None], found.value, 0).astype(encoder.dtype),
                    jnp.where(stored.exist, found.n_active, 0),
                    *(jnp.where(stored.exist, part, 0) for part in found.reconstruction or ()),
                ),
                ~is_finite,
            )
    return features
