"""The tokens that a reader leaves out. Shapes: T positions of a row, n tokens, D features."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Float32, Int, Shaped

from pipeline.store.format.int8 import Dequantised
from pipeline.store.format.layout import POSITIONS, TOKENS
from pipeline.store.format.norms import l2_norms

Limits = Mapping[str, tuple[float, float]]

_TOKENS_AT_A_TIME = 4096  # whose norms are computed: few enough for the processor's caches


COMPLETIONS = "completions"  # an input like the side arrays: whether a slot holds a completion's token


class Part(StrEnum):
    """A part of a document that the model wrote (data=generate)."""

    prompt = "prompt"
    completion = "completion"


@dataclass(frozen=True)
class TokenFilter:
    """The tokens to leave out, besides padding.

    drop_tokens: token ids, such as the tokenizer's special ones. skip_first: positions at the beginning of each
    document (of each of its windows, where it is longer than a row), where attention sinks are. norms: by array name,
    the least and the greatest L2 norm of an activation; a token is left out when one of its activations is outside.
    `store.statistics(...).norm_quantile` gives such limits. part: the prompts' tokens only, or the completions'.
    """

    drop_tokens: tuple[int, ...] = ()
    skip_first: int = 0
    norms: Limits = field(default_factory=dict)
    part: Part | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", None if self.part is None else Part(self.part))
        # Plain numbers in a fixed order, so that equal filters have equal reprs: a reader's state has a checksum of it.
        object.__setattr__(self, "drop_tokens", tuple(map(int, self.drop_tokens)))
        limits = {name: (float(least), float(greatest)) for name, (least, greatest) in sorted(self.norms.items())}
        object.__setattr__(self, "norms", limits)

    @property
    def side_arrays(self) -> tuple[str, ...]:
        """The names of the side arrays, besides segments, that `keeps` needs, and `COMPLETIONS` where it does."""
        wanted = {TOKENS.name: self.drop_tokens, POSITIONS.name: self.skip_first, COMPLETIONS: self.part}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def keeps(self, side_arrays: Mapping[str, Shaped[np.ndarray, "rows T"]]) -> Bool[np.ndarray, "rows T"]:
        """Whether each slot passes the filters of tokens, positions and parts of documents."""
        keep = side_arrays["segments"] > 0
        if self.drop_tokens:
            keep &= ~np.isin(side_arrays["tokens"], self.drop_tokens)
        if self.skip_first:
            keep &= side_arrays["positions"] >= self.skip_first
        if self.part is not None:
            keep &= side_arrays[COMPLETIONS] == (self.part is Part.completion)
        return keep

    def within_norms(
        self, slots: Int[np.ndarray, " n"], activations: Mapping[str, np.ndarray | Dequantised]
    ) -> Int[np.ndarray, " kept"]:
        """The slots whose activations, [slot, D] by array name, are within the limits."""
        for name, (least, greatest) in self.norms.items():
            chunks = (slots[i : i + _TOKENS_AT_A_TIME] for i in range(0, len(slots), _TOKENS_AT_A_TIME))
            kept = [chunk[_between(l2_norms(activations[name][chunk]), least, greatest)] for chunk in chunks]
            slots = np.concatenate([slots[:0], *kept])
        return slots


def _between(norms: Float32[np.ndarray, " n"], least: float, greatest: float) -> Bool[np.ndarray, " n"]:
    return (norms >= least) & (norms <= greatest)
