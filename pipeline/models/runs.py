"""Which layers a capture needs, and how they are divided into runs. Pure arithmetic on layer numbers.

A run is a sequence of layers that one `lax.scan` computes over weights stacked at load time: layers of the
same kind, or a repeating period of different kinds, such as three with a DeltaNet and one with attention. A run ends
where the residual stream is captured. A layer with a captured site inside is a separate run, and so is a layer whose
keys later layers use. No layer after that of the last captured site is part of a run; that one is loaded whole, and the
compiler drops what no captured site needs.

A run of one layer is not scanned, and its weights are not in a stack. On GPUs each layer is one (`single_layers`),
since XLA would copy its weights out of their stacks in every step. With fsdp only those of models with experts are:
XLA would gather many layers early, and take 11 in place of 1.5 GiB for Llama-3-70B on 8 GPUs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture, LayerKind

_MAX_PERIOD = 8  # layers in the body of a scan


@dataclass(frozen=True)
class LayerRun:
    """Layers first..stop-1, `period` of them in each step of the scan."""

    first: int
    stop: int
    period: int = 1

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @property
    def stacks(self) -> tuple[range, ...]:
        """The layers whose weights are stacked together: those at the same offset in each period."""
        return tuple(range(self.first + offset, self.stop, self.period) for offset in range(self.period))


def residual_index(key: ActivationKey, num_layers: int) -> int | None:
    """The number of layers before the captured residual stream; None for sites inside a layer."""
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
    """The runs that produce `keys`, in order; empty if they need no layer."""
    cuts = {0}
    for key in keys:
        index = residual_index(key, arch.num_layers)
        cuts |= {key.layer, key.layer + 1} if index is None else {index}
    sources = {arch.keys_of(layer) for layer in range(max(cuts))} - {None}
    cuts |= {layer + after for layer in sources for after in (0, 1)}
    return tuple(
        run
        for first, stop in pairwise(sorted(cuts))
        for run in _repeating(first, [arch.kind(layer) for layer in range(first, stop)])
    )


def single_layers(keys: Iterable[ActivationKey], arch: Architecture) -> tuple[ActivationKey, ...]:
    """The residual streams before the layers that `keys` need. Captured too, they make each layer a run."""
    last = max((run.stop for run in layer_runs(keys, arch)), default=0)
    return tuple(ActivationKey(layer, Site.resid_pre) for layer in range(last))


def _repeating(first: int, kinds: list[LayerKind]) -> Iterator[LayerRun]:
    """Divides layers `first`, `first` + 1, ..., of these kinds, into runs, each as long as possible."""
    while kinds:
        lengths = {period: _repeated(kinds, period) for period in range(1, min(_MAX_PERIOD, len(kinds)) + 1)}
        period = max(lengths, key=lengths.__getitem__)  # the shortest period among equally long runs
        yield LayerRun(first, first + lengths[period], period=period)
        first, kinds = first + lengths[period], kinds[lengths[period] :]


def _repeated(kinds: list[LayerKind], period: int) -> int:
    """The number of layers that consist of repetitions of the first `period` layers. 0 if these occur only once, unless
    `period` is 1."""
    end = period
    while kinds[end : end + period] == kinds[:period]:
        end += period
    return end if end > period or period == 1 else 0
