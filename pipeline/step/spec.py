"""What a compiled step computes and what it leaves for the store, in plain numbers."""

from dataclasses import dataclass

from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.store.format.layout import ITEM_BYTES, ArraySpec


@dataclass(frozen=True)
class StepSpec:
    """The shape of a step and of its outputs, over all devices. A plan makes it, `compile_step` takes it.

    Letters: B rows, T positions, K slots for selected tokens, D width of a key, G scales of a token.
    """

    keys: tuple[ActivationKey, ...]  # the captured activations
    widths: tuple[int, ...]  # D of each key
    rows: int  # B
    length: int  # T
    dtype: str  # of the stored activations, but for integers: `dtypes`
    attention: str = "auto"  # the implementation that is asked for; auto is decided where the devices are known
    statistics: bool = True  # whether the step computes them too
    selected: int | None = None  # K of a row; None: the activations of all tokens are stored
    int8_group: int | None = None  # of int8: features that share a scale; None: all of a token's
    outputs: tuple[ArraySpec, ...] = ()  # what the model's head says of each slot's token

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each key's array."""
        return tuple(key.site.stored_dtype(self.dtype) for key in self.keys)

    @property
    def slots(self) -> int:
        """A row's slots for activations: T, or K."""
        return self.length if self.selected is None else self.selected

    @property
    def forward_keys(self) -> tuple[ActivationKey, ...]:
        """The activations that the forward pass needs: those that are captured, and what the head reads."""
        needs_more = self.outputs and FINAL_NORM not in self.keys
        return (*self.keys, FINAL_NORM) if needs_more else self.keys

    @property
    def head_share(self) -> float:
        """The share of the token slots for which the head is computed."""
        return self.slots / self.length if self.outputs else 0.0

    @property
    def counted_names(self) -> tuple[str, ...]:
        """The arrays whose tokens with a value that is not finite the step counts."""
        outputs = (spec.name for spec in self.outputs if spec.dtype == "float32")
        return (*(key.name for key in self.keys), *outputs)

    @property
    def num_top(self) -> int:
        """How many of the likeliest next tokens are stored."""
        return max((spec.width or 0 for spec in self.outputs), default=0)

    @property
    def scale_counts(self) -> tuple[int, ...]:
        """G of each key for int8; else ()."""
        if self.dtype != "int8":
            return ()
        return tuple(width // (self.int8_group or width) for width in self.widths)

    @property
    def row_bytes(self) -> int:
        """Of a row's activations, with their scales and outputs."""
        item_bytes = sum(self._item_bytes) + sum(self.scale_counts) * ITEM_BYTES["float32"]
        item_bytes += sum(spec.position_bytes for spec in self.outputs)
        return self.slots * item_bytes

    @property
    def _item_bytes(self) -> list[int]:
        """Of a token in each key's array."""
        return [width * ITEM_BYTES[dtype] for width, dtype in zip(self.widths, self.dtypes, strict=True)]

    @property
    def largest_row_bytes(self) -> int:
        """Of a row in the largest array."""
        return self.slots * max(*self._item_bytes, *(spec.position_bytes for spec in self.outputs), 0)

    @property
    def measures_error(self) -> bool:
        """Whether the statistics include the error of storing: for dtypes of one byte."""
        return self.statistics and ITEM_BYTES[self.dtype] == 1

    @property
    def row_statistics_bytes(self) -> int:
        """Of what the step computes of a row's activations: `RowStatistics`."""
        if not self.statistics:
            return 0
        numbers = 2 * sum(self.widths) + len(self.keys) * (self.slots + self.measures_error)
        return numbers * ITEM_BYTES["float32"]
