"""The options of batches: which arrays to read, and the order, selection and form of batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipeline.core.arguments import flag, integer, items, names, number, shown
from pipeline.core.errors import ArgumentError, PipelineError
from pipeline.core.sites import ActivationKey, find_array, spelled
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import Dtype, Framework, parsed_dtype, parsed_framework

_MAX_MIB = 1e9
_MAX_WORLD = 1 << 20
_FLAGS = ("shuffle", "stack", "features", "pin_memory", "drop_last")

Key = ActivationKey | str


@dataclass(frozen=True)
class BatchOptions:
    """How activations are read in batches: the arguments of `ActivationStore.batches`, parsed.

    Raises ArgumentError for arguments of a wrong type or out of range, and those that contradict each other.
    """

    shuffle: bool = False
    seed: int = 0
    epochs: int | None = 1
    rank: int = 0
    world: int = 1
    token_filter: TokenFilter | None = None
    normalisation: Mapping[str, Normalisation] | None = None
    stack: bool = False
    dtype: Dtype = None
    framework: Framework | str = Framework.numpy
    outputs: Sequence[str] = ()
    features: bool = False
    pin_memory: bool = False
    drop_last: bool = False
    buffer_mib: float = 256.0

    def __post_init__(self) -> None:
        parsed: dict[str, Any] = {"framework": parsed_framework(self.framework), "dtype": parsed_dtype(self.dtype)}
        parsed |= {name: flag(name, getattr(self, name)) for name in _FLAGS}
        parsed |= {"seed": integer("seed", self.seed), "world": integer("world", self.world, 1, _MAX_WORLD)}
        parsed |= {"rank": integer("rank", self.rank), "outputs": names("outputs", self.outputs)}
        parsed["epochs"] = None if self.epochs is None else integer("epochs", self.epochs, 1)
        parsed["token_filter"] = TokenFilter() if self.token_filter is None else self.token_filter
        parsed["buffer_mib"] = number("buffer_mib", self.buffer_mib)
        for name, value in parsed.items():
            object.__setattr__(self, name, value)
        if self.rank >= self.world:
            raise ArgumentError(f"rank is {self.rank} with world={self.world}: expected a rank from 0 to world - 1")
        if self.pin_memory and self.framework is not Framework.torch:
            raise ArgumentError(f'pin_memory=True needs framework="torch", got {self.framework}.')
        if not 0 < self.buffer_mib <= _MAX_MIB:
            raise ArgumentError(f"buffer_mib is {self.buffer_mib}, expected more than 0, and at most {_MAX_MIB:g}.")
        if not isinstance(self.token_filter, TokenFilter):
            raise ArgumentError(f"token_filter is {shown(self.token_filter)}, expected a TokenFilter or None.")
        given = {} if self.normalisation is None else self.normalisation
        if not isinstance(given, Mapping) or not all(isinstance(value, Normalisation) for value in given.values()):
            raise ArgumentError(f"normalisation is {shown(given)}, expected a dict: a Normalisation by array name.")
        if self.world > 1 and self.epochs is not None and self.token_filter.norms:
            raise ArgumentError(
                f"the {self.world} readers could have different numbers of batches, since only reading tells how many "
                "tokens pass a filter of norms. Use epochs=None, and stop after a number of steps."
            )


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
        object.__setattr__(self, "batch_size", integer("batch_size", self.batch_size, 1))
        for named, what in ((self.options.token_filter.norms, "norms"), (self.normalisation, "normalisation")):
            unknown = sorted(set(named) - set(self.names))
            if unknown:
                raise ArgumentError(f"{what} names {unknown}, but the arrays to read are {list(self.names)}")

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
    """The arrays from which batches can be made.

    subject: what has these arrays, for messages. features: the widths of its SAEs, by the prefix of their arrays'
    names. error: the exception for an array that does not exist. hooks: TransformerLens' name by array name.
    """

    subject: str
    layout: StoreLayout
    features: Mapping[str, int]
    error: type[PipelineError]
    hooks: Mapping[str, str]

    def reading(self, keys: Key | Iterable[Key], batch_size: int, options: BatchOptions) -> Reading:
        """The arrays named by `keys`, and how to read them. Raises `error` and ArgumentError."""
        single = isinstance(keys, Key)
        arrays = [self.key(key).name for key in as_keys(keys)]
        if options.features and not self.features:
            raise self.error(f"{self.subject} has no features (capture.encode). Remove features=True.")
        if not arrays and not options.features:
            raise self.error(f"keys is empty; {self.subject} has {self._key_names}.")
        forms = {spec.name: (spec.width, spec.dtype) for spec in self.layout.arrays if spec.name in arrays}
        if options.stack and len(set(forms.values())) != 1:
            raise ArgumentError(
                f"stack=True needs equal widths and dtypes, got {forms}. Remove it to get arrays by name."
            )
        if options.stack and len(forms) < len(arrays):
            raise ArgumentError(f"stack=True needs each key once, got {arrays}. Remove the repeated ones.")
        outputs = [spec.name for spec in self.layout.outputs]
        if unknown := sorted(set(options.outputs) - set(outputs)):
            raise self.error(f"{self.subject} has no outputs {unknown}; it has {outputs} (capture.outputs).")
        return Reading(tuple(arrays), batch_size, single, options, self.features if options.features else {})

    def key(self, key: Key) -> ActivationKey:
        """The activation that a user means. Raises `error` if there is no such array, or more than one."""
        try:
            array = find_array(spelled(key), self.hooks)
        except ValueError as error:
            raise self.error(f"{self.subject} has {self._key_names}; {error}") from error
        if array is None:
            raise self.error(f"{self.subject} has no array {shown(key)}, or several: it has {self._key_names}.")
        return ActivationKey.parse(array)

    @cached_property
    def _key_names(self) -> str:
        return ", ".join(self.hooks) or "features only: use batches([], ..., features=True)"


def as_keys(keys: Key | Iterable[Key]) -> list[Key]:
    """The keys as a list. Raises ArgumentError if this is neither one nor several."""
    return [keys] if isinstance(keys, Key) else items("keys", keys, "the name of an array, or a list of names")
