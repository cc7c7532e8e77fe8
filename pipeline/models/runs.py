"""Which layers a capture needs, and how they are cut into runs. Pure arithmetic on layer numbers.

A run is a sequence of layers that one `lax.scan` computes over weights stacked at load time. Runs are cut where the
residual stream is captured, and a layer whose insides are captured is a run of its own. Nothing above the last
captured site is in any run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.sites import ActivationKey, Site


@dataclass(frozen=True)
class LayerRun:
    """Layers first..stop-1. Where the capture ends inside of the only layer, `ends_at` are the sites wanted of it."""

    first: int
    stop: int
    ends_at: frozenset[Site] = frozenset()

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
    num_whole = 0  # layers that are computed to their end
    inner: dict[int, set[Site]] = {}
    for key in keys:
        index = residual_index(key, num_layers)
        if index is None:
            inner.setdefault(key.layer, set()).add(key.site)
            cuts |= {key.layer, key.layer + 1}
            index = key.layer
        cuts.add(index)
        num_whole = max(num_whole, index)
    return tuple(
        LayerRun(first, stop, frozenset(inner[first]) if stop > num_whole else frozenset())
        for first, stop in pairwise(sorted(cuts))
    )
