"""What `ActivationStore.batches` is told about the order, the selection and the form of its batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from numpy.typing import DTypeLike

from pipeline.store.format.normalisation import Normalisation
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import Framework


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
