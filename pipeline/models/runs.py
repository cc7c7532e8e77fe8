"""Which layers a capture needs, and how they are cut into runs. Pure arithmetic on layer numbers.

A run is a sequence of layers that one `lax.scan` computes over weights stacked at load time. Runs are cut where the
residual stream is captured, and a layer whose insides are captured is a run of its own. Nothing above the last
captured site is in any run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipeline.sites import ActivationKey, Site

INNER_SITES = frozenset({Site.attn_out, Site.resid_mid, Site.mlp_out})


@dataclass(frozen=True)
class LayerRun:
    """Layers first..stop-1. `has_mlp` is false where the capture ends with the attention of the only layer."""

    first: int
    stop: int
    has_mlp: bool = True

    def __len__(self) -> int:
        return self.stop - self.first


def residual_index(key: ActivationKey, num_layers: int) -> int | None:
    """How many layers the residual stream has passed where it is captured; None for sites inside a layer."""
    match key.site:
        case Site.embed:
            return 0
        case Site.resid_pre:
            return key.layer
        case Site.resid_post:
            return key.layer + 1
        case Site.final_norm:
            return num_layers
    return None


def layer_runs(keys: Iterable[ActivationKey], num_layers: int) -> tuple[LayerRun, ...]:
    """The runs that produce `keys`, in order; empty when the embedding is enough."""
    cuts = {0}
    half_layers = 0  # an attention block is one, an MLP block another
    for key in keys:
        index = residual_index(key, num_layers)
        if index is None:
            cuts |= {key.layer, key.layer + 1}
            half_layers = max(half_layers, 2 * key.layer + (2 if key.site is Site.mlp_out else 1))
        else:
            cuts.add(index)
            half_layers = max(half_layers, 2 * index)
    return tuple(LayerRun(first, stop, has_mlp=2 * stop <= half_layers) for first, stop in pairwise(sorted(cuts)))
