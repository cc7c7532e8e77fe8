"""What is asked of `ActivationStore.batches`: arrays, and the order, the selection and the form of batches."""

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
from pipeline.store.read.features import array_name
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import Framework

Key = ActivationKey | tuple[SupportsIndex | None, Site | str] | str


@dataclass(frozen=True)
class BatchOptions:
    """How the activations of a store are read in batches.

    shuffle: blocks come in random order, and their pieces fill a buffer that is emptied in random order while another
    is filled. Otherwise tokens come in the order of their rows.
    seed: of the random order, which depends on it, on the epoch and on the other options, not on timing.
    epochs: passes over the store; None for no end. Batches never mix epochs.
    rank, world: this reader is number `rank` of `world`, whose shares of the store do not overlap. Each has the same
    number of batches, all full. For that the segments of the whole store are read first (4 bytes per token); with
    epochs=None they are not, and no reader ends.
    token_filter: the tokens to leave out.
    normalisation: by array name; gives float32.
    stack: activations of one width as one array [n, K, D].
    dtype: of the activations; None for the store's (of int8: float32).
    framework: of the arrays: numpy, jax or torch.
    outputs: arrays of `capture.outputs` that batches hold too: loss, entropy, top_logprobs, top_ids. They take memory
        beside `buffer_mib`, and other outputs give another order.
    features: batches hold the features of all SAEs of `capture.encode` too, in the store's dtype. They count towards
        `buffer_mib`, so they may give another order.
    drop_last: drop the last batch of an epoch where it is short.
    buffer_mib: MiB of activations that one buffer holds; there are two.

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
                f"how many tokens of each of {self.world} readers pass a filter of norms is not known before they are "
                "read, so their numbers of batches could differ. Use epochs=None, and stop after a number of steps."
            )


def with_fields(options: BatchOptions, given: Mapping[str, Any]) -> BatchOptions:
    """The options with some fields replaced. Raises TypeError for a field that they do not have."""
    names = [field.name for field in fields(BatchOptions)]
    for name in given.keys() - set(names):
        raise TypeError(f"batches has no option {name!r}.{did_you_mean(name, names)} It has {', '.join(names)}.")
    return replace(options, **given)


@dataclass(frozen=True)
class Reading:
    """The arrays to read, and how. `single`: one activation was asked for, not a list of them. `features`: the widths
    of the SAEs whose features are read, by what the names of their arrays begin with."""

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
                raise ValueError(f"{what} names {unknown}, but the arrays that are read are {list(self.names)}")

    @property
    def normalisation(self) -> Mapping[str, Normalisation]:
        return self.options.normalisation or {}

    @property
    def sparse(self) -> tuple[str, ...]:
        """The arrays of features that are read piece by piece, as activations are."""
        return tuple(array_name(name, part) for name in self.features for part in ("index", "value"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The arrays that are read block by block, as side arrays are."""
        return tuple(dict.fromkeys((*self.options.outputs, *(array_name(name, "n_active") for name in self.features))))

    @property
    def seed(self) -> int | None:
        """None: tokens come in the order of their rows."""
        return self.options.seed if self.options.shuffle else None


@dataclass(frozen=True)
class Readable:
    """What batches can be made of. subject: whose arrays these are, in messages. features: the widths of its SAEs, by
    what the names of their arrays begin with. error: what is raised for an array that is not there."""

    subject: str
    layout: StoreLayout
    features: Mapping[str, int]
    error: type[PipelineError]

    @property
    def keys(self) -> tuple[ActivationKey, ...]:
        return tuple(ActivationKey.parse(spec.name) for spec in self.layout.arrays)

    def reading(self, keys: Key | Sequence[Key], batch_size: int, options: BatchOptions) -> Reading:
        """The arrays that `keys` name, and how to read them. Raises `error`, and ValueError."""
        single = is_key(keys)
        names = [self.key(key).name for key in ([keys] if single else keys)]
        if options.features and not self.features:
            raise self.error(f"{self.subject} has no features (capture.encode). Leave out features=True.")
        if not names and not options.features:
            raise self.error(f"no activations of {self.subject} are asked for; it has {self._key_names()}.")
        forms = {spec.name: (spec.width, spec.dtype) for spec in self.layout.arrays if spec.name in names}
        if options.stack and len(set(forms.values())) != 1:
            raise ValueError(f"stack=True needs one width and dtype, got {forms}. Leave it out to get them by name.")
        outputs = [spec.name for spec in self.layout.outputs]
        if unknown := sorted(set(options.outputs) - set(outputs)):
            raise self.error(f"{self.subject} has no outputs {unknown}; it has {outputs} (capture.outputs).")
        return Reading(tuple(names), batch_size, single, options, self.features if options.features else {})

    def key(self, key: Key) -> ActivationKey:
        """Raises `error` for what names no array of activations here."""
        try:
            parsed = _parse_key(key)
        except (TypeError, ValueError) as error:
            raise self.error(
                f"{key!r} names no activation ({error}); {self.subject} has {self._key_names()}."
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
    """Raises TypeError or ValueError for what names no activation."""
    if isinstance(key, ActivationKey):
        return key
    if isinstance(key, str):
        return ActivationKey.parse(key)
    layer, site = key
    return ActivationKey(-1 if layer is None else operator.index(layer), Site(site))
