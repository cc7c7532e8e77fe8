"""The options of `ActivationStore.batches`: which arrays to read, and the order, selection and form of batches."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsIndex

from numpy.typing import DTypeLike

from pipeline.core.errors import PipelineError
from pipeline.core.sites import ActivationKey, Site
from pipeline.core.suggestions import did_you_mean
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import Framework

Key = ActivationKey | tuple[SupportsIndex | None, Site | str] | str


@dataclass(frozen=True)
class BatchOptions:
    """How the activations of a store are read in batches.

    shuffle: read blocks in random order; their pieces fill a buffer, from which tokens are taken in random order while
        a second one is filled. Otherwise, tokens are in row order.
    seed: the random order depends on the seed, the epoch and the other options, but not on timing.
    epochs: passes over the store; None for endless reading. A batch never mixes epochs.
    rank, world: this reader is number `rank` of `world` readers with disjoint shares of the store. All have the same
        number of batches, all full. This requires reading the segments of the whole store first (4 bytes per token),
        except with epochs=None, where readers never end.
    token_filter: which tokens to leave out.
    normalisation: by array name; gives float32.
    stack: return activations of the same width as one array [n, K, D].
    dtype: that of the activations; None for the store's (float32 if that is int8).
    framework: numpy, jax or torch.
    outputs: arrays of `capture.outputs` to read, too: loss, entropy, top_logprobs, top_ids. They take memory in
        addition to `buffer_mib`. Different outputs change the order.
    features: read the features of all SAEs of `capture.encode`, too, in the store's dtype. They count towards
        `buffer_mib`, so they may change the order.
    drop_last: drop the last batch of an epoch if it is not full.
    buffer_mib: the size of a buffer for activations in MiB; there are two buffers.

    Raises ValueError for options that contradict each other.
    """

    shuffle: bool = False
    seed: int = 0
    epochs: int | None = 1
    rank: int = 0
    world: int = 1
    token_filter: TokenFilter = field(default_factory=TokenFilter)
    normalisation: Mapping[str, Normalisation] | None = None
    stack: bool = False
    dtype: DTypeLike = None
    framework: Framework | str = Framework.numpy
    outputs: tuple[str, ...] = ()
    features: bool = False
    drop_last: bool = False
    buffer_mib: float = 256.0

    def __post_init__(self) -> None:
        if self.framework not in list(Framework):
            raise ValueError(f"framework is {self.framework!r}. Choose one of {', '.join(Framework)}.")
        object.__setattr__(self, "framework", Framework(self.framework))
        if isinstance(self.outputs, str) or len(set(self.outputs)) < len(self.outputs):
            raise ValueError(f"outputs is {self.outputs!r}. Name each array once, in a tuple such as ('loss',).")
        object.__setattr__(self, "outputs", tuple(self.outputs))
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, must be at least 1, or None for no end")
        if self.world > 1 and self.epochs is not None and self.token_filter.norms:
            raise ValueError(
                f"the {self.world} readers could have different numbers of batches, since only reading tells how many "
                "tokens pass a filter of norms. Use epochs=None, and stop after a number of steps."
            )


def with_fields(options: BatchOptions, given: Mapping[str, Any]) -> BatchOptions:
    """The options with some fields replaced. Raises TypeError for a field that they do not have."""
    names = [field.name for field in fields(BatchOptions)]
    for name in given.keys() - set(names):
        raise TypeError(f"batches has no option {name!r}.{did_you_mean(name, names)} It has {', '.join(names)}.")
    return replace(options, **given)


@dataclass(frozen=True)
class Reading:
    """The arrays to read, and how. single: `keys` was one activation, not a list. features: the widths of the SAEs
    whose features are read, by the prefix of their arrays' names."""

    names: tuple[str, ...]
    batch_size: int
    single: bool = False
    options: BatchOptions = field(default_factory=BatchOptions)
    features: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, must be at least 1")
        for named, what in ((self.options.token_filter.norms, "norms"), (self.normalisation, "normalisation")):
            unknown = sorted(set(named) - set(self.names))
            if unknown:
                raise ValueError(f"{what} names {unknown}, but the arrays to read are {list(self.names)}")

    @property
    def normalisation(self) -> Mapping[str, Normalisation]:
        return self.options.normalisation or {}

    @property
    def sparse(self) -> tuple[str, ...]:
        """The arrays of features that are read by pieces, like activations."""
        return tuple(f"{name}.{part}" for name in self.features for part in ("index", "value"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The arrays that are read by blocks, like side arrays."""
        return tuple(dict.fromkeys((*self.options.outputs, *(f"{name}.n_active" for name in self.features))))

    @property
    def seed(self) -> int | None:
        """The seed of the random order; None for row order."""
        return self.options.seed if self.options.shuffle else None


@dataclass(frozen=True)
class Readable:
    """The arrays from which batches can be made. subject: what has these arrays, for messages. features: the widths of
    its SAEs, by the prefix of their arrays' names. error: the exception for an array that does not exist."""

    subject: str
    layout: StoreLayout
    features: Mapping[str, int]
    error: type[PipelineError]

    @property
    def keys(self) -> tuple[ActivationKey, ...]:
        return tuple(ActivationKey.parse(spec.name) for spec in self.layout.arrays)

    def reading(self, keys: Key | Sequence[Key], batch_size: int, options: BatchOptions) -> Reading:
        """The arrays named by `keys`, and how to read them. Raises `error` and ValueError."""
        single = is_key(keys)
        names = [self.key(key).name for key in ([keys] if single else keys)]
        if options.features and not self.features:
            raise self.error(f"{self.subject} has no features (capture.encode). Remove features=True.")
        if not names and not options.features:
            raise self.error(f"keys is empty; {self.subject} has {self._key_names()}.")
        forms = {spec.name: (spec.width, spec.dtype) for spec in self.layout.arrays if spec.name in names}
        if options.stack and len(set(forms.values())) != 1:
            raise ValueError(f"stack=True needs equal widths and dtypes, got {forms}. Remove it to get arrays by name.")
        if options.stack and len(forms) < len(names):
            raise ValueError(f"stack=True needs each key once, got {names}. Remove the repeated ones.")
        outputs = [spec.name for spec in self.layout.outputs]
        if unknown := sorted(set(options.outputs) - set(outputs)):
            raise self.error(f"{self.subject} has no outputs {unknown}; it has {outputs} (capture.outputs).")
        return Reading(tuple(names), batch_size, single, options, self.features if options.features else {})

    def key(self, key: Key) -> ActivationKey:
        """The parsed key. Raises `error` if there is no such activation array."""
        try:
            parsed = _parse_key(key)
        except (TypeError, ValueError) as error:
            raise self.error(
                f"{key!r} is not the name of an activation ({error}); {self.subject} has {self._key_names()}."
            ) from error
        if parsed not in self.keys:
            raise self.error(f"{self.subject} has no {parsed.name}; it has {self._key_names()}.")
        return parsed

    def _key_names(self) -> str:
        names = ", ".join(spec.name for spec in self.layout.arrays)
        return names or "features only: use batches([], ..., features=True)"


def is_key(keys: Key | Sequence[Key]) -> bool:
    """Whether this is one key, not several: a pair (layer, site) is a tuple too."""
    if isinstance(keys, tuple) and keys:
        return keys[0] is None or isinstance(keys[0], SupportsIndex)
    return isinstance(keys, (ActivationKey, str))


def _parse_key(key: Key) -> ActivationKey:
    """Raises TypeError or ValueError if this is not the key of an activation."""
    if isinstance(key, ActivationKey):
        return key
    if isinstance(key, str):
        return ActivationKey.parse(key)
    layer, site = key
    return ActivationKey(-1 if layer is None else operator.index(layer), Site(site))
