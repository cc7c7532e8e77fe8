"""The options of batches: their tokens, order and form, and the arrays that they contain.

Shapes: T positions per row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from pipeline.core.arguments import flag, integer, items, names, number, shown
from pipeline.core.errors import ArgumentError, PipelineError
from pipeline.core.sites import ActivationKey, find_array, spelled
from pipeline.data.text.labels import WORDS, chosen
from pipeline.store.format.layout import DOCUMENTS, LABELS_ARRAY, POSITIONS, TOKENS, StoreLayout, scale_name
from pipeline.store.format.statistics import Normalisation
from pipeline.store.read.frameworks import Dtype, Framework, parsed_dtype, parsed_framework

Key = ActivationKey | str
Limits = Mapping[str, tuple[float, float]]

_MAX_TOKEN = (1 << 31) - 1
_MAX_DOCUMENT = (1 << 63) - 1
_MAX_MIB = 1e9
_MAX_WORLD = 1 << 20
_FLAGS = ("shuffle", "stack", "features", "pin_memory", "drop_last", "labels")

COMPLETIONS = "completions"  # the name of an additional side array: whether a slot holds a completion's token


@dataclass(frozen=True)
class TokenFilter:
    """Which tokens to leave out, in addition to padding.

    drop_tokens: token ids, such as those of special tokens.
    skip_first: positions at the beginning of each document window, where attention sinks are. A document longer than a
    row has several windows.
    norms: the minimum and maximum L2 norm, by array name. A token is left out if any of its activations is outside.
    `store.statistics(...).norm_quantile` gives suitable limits.
    part: "prompt" or "completion": keep only the tokens of prompts, or of completions (data=generate).
    documents: keep only tokens of these documents, by number; None for all. Other blocks are not read.
    labels: keep only tokens with these labels (data.messages): `written` by the assistant, one of the given roles, and
    one of the given parts, as in `capture.labels`.
    """

    drop_tokens: tuple[int, ...] = ()
    skip_first: int = 0
    norms: Limits = field(default_factory=dict)
    part: str | None = None
    documents: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(sorted(names("labels", self.labels))))
        if unknown := [word for word in self.labels if word not in WORDS]:
            raise ArgumentError(f"labels contains {shown(unknown[0])}. Choose from {', '.join(WORDS)}.")
        if self.part is not None and not (isinstance(self.part, str) and self.part in ("prompt", "completion")):
            raise ArgumentError(f"part is {shown(self.part)}. Choose one of prompt, completion, or None.")
        # Plain numbers in a fixed order: a reader's state has a checksum of the repr, so equal filters need equal ones.
        given = items("drop_tokens", self.drop_tokens, "a list of token ids")
        tokens = tuple(integer("an entry of drop_tokens", token, most=_MAX_TOKEN) for token in given)
        object.__setattr__(self, "drop_tokens", tokens)
        if self.documents is not None:
            given = items("documents", self.documents, "a list of document numbers")
            documents = {integer("an entry of documents", document, most=_MAX_DOCUMENT) for document in given}
            object.__setattr__(self, "documents", tuple(sorted(documents)))
        object.__setattr__(self, "skip_first", integer("skip_first", self.skip_first, most=_MAX_TOKEN))
        try:
            limits = {str(name): (number(name, low), number(name, high)) for name, (low, high) in self.norms.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"norms is {shown(self.norms)}, expected a dict: (minimum, maximum) by array name."
            ) from error
        object.__setattr__(self, "norms", dict(sorted(limits.items())))

    @property
    def side_arrays(self) -> tuple[str, ...]:
        """The names of the side arrays that `keeps` needs in addition to segments; may include `COMPLETIONS`."""
        conditions = {TOKENS.name: self.drop_tokens, POSITIONS.name: self.skip_first, COMPLETIONS: self.part}
        conditions |= {DOCUMENTS.name: self.documents is not None, LABELS_ARRAY.name: self.labels}
        return tuple(name for name, condition in conditions.items() if condition)

    def keeps(self, side_arrays: Mapping[str, Shaped[np.ndarray, "rows T ..."]]) -> Bool[np.ndarray, "rows T"]:
        """Whether each slot passes the conditions on tokens, positions, documents and their parts, and labels."""
        keep = side_arrays["segments"] > 0
        if self.drop_tokens:
            keep &= ~np.isin(side_arrays["tokens"], self.drop_tokens)
        if self.skip_first:
            keep &= side_arrays["positions"] >= self.skip_first
        if self.documents is not None:
            keep &= np.isin(side_arrays["documents"], self.documents)
        if self.part is not None:
            keep &= side_arrays[COMPLETIONS] == (self.part == "completion")
        if self.labels:
            keep &= chosen(self.labels, side_arrays[LABELS_ARRAY.name])
        return keep


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `ActivationStore.batches` but its arrays, parsed.

    Raises ArgumentError for arguments of a wrong type or out of range, and those that contradict each other.
    """

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    epochs: int | None = 1
    rank: int = 0
    world: int = 1
    token_filter: TokenFilter = field(default_factory=TokenFilter)
    stack: bool = False
    dtype: Dtype = None
    framework: Framework | str = Framework.numpy
    outputs: Sequence[str] = ()
    features: bool = False
    pin_memory: bool = False
    drop_last: bool = False
    buffer_mib: float = 256.0
    labels: bool = False

    def __post_init__(self) -> None:
        parsed: dict[str, Any] = {"framework": parsed_framework(self.framework), "dtype": parsed_dtype(self.dtype)}
        parsed |= {name: flag(name, getattr(self, name)) for name in _FLAGS}
        parsed |= {
            "batch_size": integer("batch_size", self.batch_size, 1, _MAX_TOKEN),
            "seed": integer("seed", self.seed),
        }
        parsed |= {"rank": integer("rank", self.rank), "world": integer("world", self.world, 1, _MAX_WORLD)}
        parsed["epochs"] = None if self.epochs is None else integer("epochs", self.epochs, 1)
        parsed["token_filter"] = TokenFilter() if self.token_filter is None else self.token_filter
        parsed |= {"outputs": names("outputs", self.outputs), "buffer_mib": number("buffer_mib", self.buffer_mib)}
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
        if self.world > 1 and self.epochs is not None and self.token_filter.norms:
            raise ArgumentError(
                f"the {self.world} readers could have different numbers of batches, since only reading tells how many "
                "tokens pass a filter of norms. Use epochs=None, and stop after a number of steps."
            )

    @property
    def order_seed(self) -> int | None:
        """The seed of the random order; None for row order."""
        return self.seed if self.shuffle else None


@dataclass(frozen=True)
class BatchArrays:
    """The arrays of batches from one store or stream.

    names: of the activations. is_single: `keys` was one activation, not a list. features: the widths of the SAEs whose
    features are read, by the prefix of their arrays' names. outputs: names of outputs. has_labels: whether labels are
    read.
    """

    layout: StoreLayout
    names: tuple[str, ...]
    is_single: bool = False
    features: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    normalisation: Mapping[str, Normalisation] = field(default_factory=dict)
    has_labels: bool = False

    @property
    def by_piece(self) -> tuple[str, ...]:
        """All arrays that are read by pieces: activations, their scales if any, and features."""
        scales = tuple(scale_name(name) for name in self.names if self.layout.scales)
        return (*dict.fromkeys(self.names + scales), *self.sparse)

    @property
    def sparse(self) -> tuple[str, ...]:
        """The arrays of features that are read by pieces."""
        return tuple(f"{name}.{part}" for name in self.features for part in ("index", "value"))

    @property
    def by_block(self) -> tuple[str, ...]:
        """The arrays that are read by blocks, like side arrays, since their chunks hold many tokens."""
        labels = (LABELS_ARRAY.name,) if self.has_labels else ()
        return tuple(dict.fromkeys((*self.outputs, *(f"{name}.n_active" for name in self.features), *labels)))


@dataclass(frozen=True)
class ArrayNames:
    """The arrays that a store or stream has.

    subject: what has these arrays, for messages. features: the widths of its SAEs, by the prefix of their arrays'
    names. error: the exception for an array that does not exist. hooks: TransformerLens' name by array name.
    """

    subject: str
    layout: StoreLayout
    features: Mapping[str, int]
    error: type[PipelineError]
    hooks: Mapping[str, str]

    def batch_arrays(
        self,
        keys: Key | Iterable[Key],
        options: BatchOptions,
        normalisation: Mapping[str, Normalisation] | None = None,
    ) -> BatchArrays:
        """The arrays of batches with these activations and options. Raises `error` and ArgumentError."""
        arrays = [self.key(key).name for key in as_keys(keys)]
        if options.features and not self.features:
            raise self.error(f"{self.subject} has no features (capture.encode). Remove features=True.")
        if not arrays and not options.features:
            raise self.error(f"keys is empty; {self.subject} has {self._key_names}.")
        if options.stack:
            self._require_stackable(arrays)
        outputs = [spec.name for spec in self.layout.outputs]
        if unknown := sorted(set(options.outputs) - set(outputs)):
            raise self.error(f"{self.subject} has no outputs {unknown}; it has {outputs} (capture.outputs).")
        needs_labels = options.labels or bool(options.token_filter.labels)
        if needs_labels and not self.layout.has_labels:
            raise self.error(f"{self.subject} has no labels of tokens (data.messages). Remove labels.")
        given = {} if normalisation is None else normalisation
        if not isinstance(given, Mapping) or not all(isinstance(value, Normalisation) for value in given.values()):
            raise ArgumentError(f"normalisation is {shown(given)}, expected a dict: a Normalisation by array name.")
        for named, what in ((options.token_filter.norms, "norms"), (given, "normalisation")):
            if unknown := sorted(set(named) - set(arrays)):
                raise ArgumentError(f"{what} names {unknown}, but the arrays to read are {arrays}")
        features = self.features if options.features else {}
        is_single, outputs = isinstance(keys, Key), tuple(options.outputs)
        return BatchArrays(self.layout, tuple(arrays), is_single, features, outputs, given, needs_labels)

    def _require_stackable(self, arrays: Sequence[str]) -> None:
        forms = {spec.name: (spec.width, spec.dtype) for spec in self.layout.arrays if spec.name in arrays}
        if len(set(forms.values())) != 1:
            raise ArgumentError(
                f"stack=True needs equal widths and dtypes, got {forms}. Remove it to get arrays by name."
            )
        if len(forms) < len(arrays):
            raise ArgumentError(f"stack=True needs each key once, got {arrays}. Remove the repeated ones.")

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
