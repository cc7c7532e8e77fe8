"""Which layers a capture needs, and how they are cut into runs. Pure arithmetic on layer numbers.

A run is a sequence of layers that one `lax.scan` computes over weights stacked at load time. A run ends where the
residual stream is captured, and where dense and sparse layers meet; a layer with a captured site inside is a run of its
own. No run contains anything after the last captured site.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture
from pipeline.models.weight_specs import Step, layer_steps, required_steps


@dataclass(frozen=True)
class LayerRun:
    """Layers first..stop-1. Where the capture ends inside the run's only layer, `ends_at` has that layer's captured
    sites."""

    first: int
    stop: int
    ends_at: frozenset[Site] = frozenset()

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    def steps(self, arch: Architecture) -> frozenset[Step]:
        """The steps that each layer of the run computes."""
        is_sparse = arch.is_sparse(self.first)
        return required_steps(self.ends_at, arch, is_sparse) if self.ends_at else frozenset(layer_steps(is_sparse))


def residual_index(key: ActivationKey, num_layers: int) -> int | None:
    """How many layers precede the captured residual stream; None for sites inside a layer."""
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


def layer_runs(keys: Iterable[ActivationKey], arch: Architecture) -> tuple[LayerRun, ...]:
    """The runs that produce `keys`, in order; empty when the embedding is enough."""
    cuts = {0}
    num_whole = 0  # layers that are computed completely
    inner: dict[int, set[Site]] = {}
    for key in keys:
        index = residual_index(key, arch.num_layers)
        if index is None:
            inner.setdefault(key.layer, set()).add(key.site)
            cuts |= {key.layer, key.layer + 1}
            index = key.layer
        cuts.add(index)
        num_whole = max(num_whole, index)
    cuts |= {layer for layer in range(1, max(cuts)) if arch.is_sparse(layer) != arch.is_sparse(layer - 1)}
    return tuple(
        LayerRun(first, stop, frozenset(inner[first]) if stop > num_whole else frozenset())
        for first, stop in pairwise(sorted(cuts))
    )
