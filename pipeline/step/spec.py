"""What a compiled step computes and what it leaves for the store, in plain numbers."""

from dataclasses import dataclass

from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.models.sae.params import params_bytes
from pipeline.models.sae.spec import SAESpec
from pipeline.store.format.layout import ITEM_BYTES, SELECTED, TOKENS, ArraySpec, feature_specs

CompilerOption = bool | int | float | str


@dataclass(frozen=True)
class EncoderSpec:
    """An SAE that encodes one of the captured activations, and what is stored of its features."""

    key: ActivationKey
    name: str  # what its arrays' names begin with: features.blocks.5.resid_post
    sae: SAESpec
    arrays: tuple[str, ...]  # of the SAE, that encoding needs
    top: int  # features of each token that are stored
    dtype: str  # of their values
    threshold: float  # what a value must exceed
    indexed: bool = True  # whether the store has an index by feature
    decodes: bool = False  # whether its reconstruction is measured

    @property
    def index_bytes(self) -> int:
        """Of the features of a token in the index, all slots being filled."""
        return self.top * (ITEM_BYTES["int32"] + ITEM_BYTES[self.dtype]) if self.indexed else 0

    @property
    def flops_per_token(self) -> int:
        """Of the product with the encoder's matrix, and with the decoder's."""
        return 2 * (self.sae.d_in + self.decodes * self.sae.d_out) * self.sae.width

    def device_bytes(self, dtype: str, tensor: int) -> int:
        """Of the arrays on each device, where `tensor` devices divide the features."""
        return params_bytes(self.sae, self.arrays, dtype, tensor)


@dataclass(frozen=True)
class StepSpec:
    """The shape of a step and of its outputs, over all devices. A plan makes it, `compile_step` takes it.

    Letters: B rows, T positions, K slots for selected tokens, D width of a key, G scales of a token.
    """

    keys: tuple[ActivationKey, ...]  # the stored activations
    widths: tuple[int, ...]  # D of each key
    rows: int  # B
    length: int  # T
    dtype: str  # of the stored activations, but for integers: `dtypes`
    attention: str = "auto"  # the implementation that is asked for; auto is decided where the devices are known
    statistics: bool = True  # whether they are kept, of activations and of features
    selected: int | None = None  # K of a row; None: the activations of all tokens are stored
    int8_group: int | None = None  # of int8: features that share a scale; None: all of a token's
    head_outputs: tuple[ArraySpec, ...] = ()  # what the model's head says of each slot's token
    encoders: tuple[EncoderSpec, ...] = ()  # SAEs whose features are stored
    compiler_options: tuple[tuple[str, CompilerOption], ...] = ()  # XLA's, by name

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each key's array."""
        return tuple(key.site.stored_dtype(self.dtype) for key in self.keys)

    @property
    def slots(self) -> int:
        """A row's slots for activations: T, or K."""
        return self.length if self.selected is None else self.selected

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """The arrays of what is computed from activations: by the model's head, and by SAEs."""
        slots = (TOKENS if self.selected is None else SELECTED).slots
        features = (
            feature_specs(
                encoder.name, encoder.top, encoder.dtype, slots, encoder.key.name if encoder.decodes else None
            )
            for encoder in self.encoders
        )
        return (*self.head_outputs, *(array for arrays in features for array in arrays))

    @property
    def forward_keys(self) -> tuple[ActivationKey, ...]:
        """The activations that the forward pass needs: those that are stored, and what the head and SAEs read."""
        read = (*(encoder.key for encoder in self.encoders), *([FINAL_NORM] if self.head_outputs else []))
        return tuple(dict.fromkeys((*self.keys, *read)))

    @property
    def head_share(self) -> float:
        """The share of the token slots for which the head is computed."""
        return self.slots / self.length if self.head_outputs else 0.0

    @property
    def encoder_flops(self) -> int:
        """Per token slot."""
        return round(sum(encoder.flops_per_token for encoder in self.encoders) * self.slots / self.length)

    @property
    def index_bytes(self) -> float:
        """Per token slot, of the indexes by feature."""
        return sum(encoder.index_bytes for encoder in self.encoders) * self.slots / self.length

    @property
    def counted_names(self) -> tuple[str, ...]:
        """The arrays whose tokens with a value that is not finite the step counts."""
        outputs = (spec.name for spec in self.head_outputs if spec.dtype == "float32")
        return (*(key.name for key in self.keys), *outputs, *(encoder.name for encoder in self.encoders))

    @property
    def num_top(self) -> int:
        """How many of the likeliest next tokens are stored."""
        return max((spec.width or 0 for spec in self.head_outputs), default=0)

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
    def statistics_widths(self) -> dict[ActivationKey, int]:
        """D of the activations whose statistics the step computes: the stored ones, then what is reconstructed."""
        stored = dict(zip(self.keys, self.widths, strict=True))
        reconstructed = {encoder.key: encoder.sae.d_in for encoder in self.encoders if encoder.decodes}
        return stored | reconstructed if self.statistics else {}

    @property
    def measures_error(self) -> bool:
        """Whether the statistics include the error of storing: for dtypes of one byte."""
        return self.statistics and bool(self.keys) and ITEM_BYTES[self.dtype] == 1

    @property
    def row_statistics_bytes(self) -> int:
        """Of what the step computes of a row's activations: `RowStatistics`."""
        numbers = 2 * sum(self.statistics_widths.values()) + len(self.statistics_widths) * self.slots
        numbers += len(self.keys) * self.measures_error
        return numbers * ITEM_BYTES["float32"]
