"""Which tokens a reader leaves out. Shapes: T positions per row, n tokens, D features."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Int, Shaped

from pipeline.core.arguments import integer, items, number, shown
from pipeline.core.errors import ArgumentError
from pipeline.store.format.layout import DOCUMENTS, POSITIONS, TOKENS
from pipeline.store.format.normalisation import l2_norms
from pipeline.store.format.scaled import Dequantised

Limits = Mapping[str, tuple[float, float]]

_TOKENS_AT_A_TIME = 4096  # for computing norms: few enough for the processor's caches

_MAX_TOKEN = (1 << 31) - 1
_MAX_DOCUMENT = (1 << 63) - 1

COMPLETIONS = "completions"  # the name of an additional side array: whether a slot holds a completion's token


class Part(StrEnum):
    """The part of a document with a completion (data=generate)."""

    prompt = "prompt"
    completion = "completion"


@dataclass(frozen=True)
class TokenFilter:
    """Which tokens to leave out, in addition to padding.

    drop_tokens: token ids, such as those of special tokens.
    skip_first: positions at the beginning of each document window, where attention sinks are. A document longer than a
    row has several windows.
    norms: the minimum and maximum L2 norm, by array name. A token is left out if any of its activations is outside.
    `store.statistics(...).norm_quantile` gives suitable limits.
    part: keep only tokens of prompts, or only tokens of completions.
    documents: keep only tokens of these documents, by number; None for all. Other blocks are not read.
    """

    drop_tokens: tuple[int, ...] = ()
    skip_first: int = 0
    norms: Limits = field(default_factory=dict)
    part: Part | str | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.part is not None and not (isinstance(self.part, str) and self.part in list(Part)):
            raise ArgumentError(f"part is {shown(self.part)}. Choose one of {', '.join(Part)}, or None.")
        object.__setattr__(self, "part", None if self.part is None else Part(self.part))
        # Plain numbers in a fixed order: a reader's state has a checksum of the repr, so equal filters need equal ones.
        given = items("drop_tokens", self.drop_tokens, "a list of token ids")
        tokens = tuple(integer("an entry of drop_tokens", token, most=_MAX_TOKEN) for token in given)
        object.__setattr__(self, "drop_tokens", tokens)
        if self.documents is not None:
            given = items("documents", self.documents, "a list of document numbers")
            documents = {integer("an entry of documents", number, most=_MAX_DOCUMENT) for number in given}
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
        conditions[DOCUMENTS.name] = self.documents is not None
        return tuple(name for name, condition in conditions.items() if condition)

    def keeps(self, side_arrays: Mapping[str, Shaped[np.ndarray, "rows T"]]) -> Bool[np.ndarray, "rows T"]:
        """Whether each slot passes the conditions on tokens, positions, documents and their parts."""
        keep = side_arrays["segments"] > 0
        if self.drop_tokens:
            keep &= ~np.isin(side_arrays["tokens"], self.drop_tokens)
        if self.skip_first:
            keep &= side_arrays["positions"] >= self.skip_first
        if self.documents is not None:
            keep &= np.isin(side_arrays["documents"], self.documents)
        if self.part is not None:
            keep &= side_arrays[COMPLETIONS] == (self.part is Part.completion)
        return keep

    def within_norms(
        self, slots: Int[np.ndarray, " n"], activations: Mapping[str, np.ndarray | Dequantised]
    ) -> Int[np.ndarray, " kept"]:
        """The slots whose activations have norms within the limits. activations: [slots, D] by array name."""
        for name, (least, greatest) in self.norms.items():
            chunks = (slots[i : i + _TOKENS_AT_A_TIME] for i in range(0, len(slots), _TOKENS_AT_A_TIME))
            parts = [l2_norms(activations[name][chunk]) for chunk in chunks]
            norms = np.concatenate([np.empty(0, np.float32), *parts])
            slots = slots[(norms >= least) & (norms <= greatest)]
        return slots
