"""What a compiled step computes and stores, in plain numbers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.models.sae.params import params_bytes
from pipeline.models.sae.spec import SAESpec
from pipeline.store.format.layout import ITEM_BYTES, LARGEST, SELECTED, TOKENS, ArraySpec, feature_specs, scale_spec


@dataclass(frozen=True)
class EncoderSpec:
    """An SAE that encodes one of the captured activations, and how its features are stored."""

    key: ActivationKey
    name: str  # prefix of its arrays' names: features.blocks.5.resid_post
    sae: SAESpec
    arrays: tuple[str, ...]  # the SAE's arrays that the step needs
    top: int  # stored features per token
    dtype: str  # of the features' values
    threshold: float  # features with larger values are stored
    indexed: bool = True  # whether the store has an index by feature
    decodes: bool = False  # whether the reconstruction error is measured

    @property
    def index_bytes(self) -> int:
        """Bytes in the index per token, if all its slots are filled."""
        return self.top * (ITEM_BYTES["int32"] + ITEM_BYTES[self.dtype]) if self.indexed else 0

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the products with the encoder's and, if it decodes, the decoder's matrix."""
        return 2 * (self.sae.d_in + self.decodes * self.sae.d_out) * self.sae.width

    def device_bytes(self, dtype: str, tensor: int) -> int:
        """Bytes of the arrays on each device, if `tensor` devices divide the features."""
        return params_bytes(self.sae, self.arrays, dtype, tensor)


@dataclass(frozen=True)
class StoredArrays:
    """A store's arrays that a step fills, in the order of `StepOutputs.arrays`."""

    activations: tuple[ArraySpec, ...]
    scales: tuple[ArraySpec, ...]  # one per activation for scaled dtypes; else none
    outputs: tuple[ArraySpec, ...]  # arrays computed from activations, by the model's head and by SAEs

    def __iter__(self) -> Iterator[ArraySpec]:
        return iter((*self.activations, *self.scales, *self.outputs))

    def __len__(self) -> int:
        return len(self.activations) + len(self.scales) + len(self.outputs)


@dataclass(frozen=True)
class StepSpec:
    """The shape of a step and of its outputs, over all devices. The plan makes it for `compile_step`.

    Letters: B rows, T positions, K slots for selected tokens, D width of an activation, G scales of a token.
    """

    activations: Mapping[ActivationKey, ArraySpec]  # the stored ones, in the order of the forward pass
    rows: int  # B
    length: int  # T
    dtype: str  # of the stored activations, except indices, which are int32
    attention: str = "auto"  # the requested implementation; auto is resolved when the devices are known
    statistics: bool = True  # whether statistics of activations and features are stored
    selected: int | None = None  # K; None: the activations of all tokens are stored
    scale_group: int | None = None  # scaled dtypes only: features that share a scale; None: all of a token's features
    head_outputs: tuple[ArraySpec, ...] = ()  # arrays that the model's head computes for each slot's token
    encoders: tuple[EncoderSpec, ...] = ()  # SAEs whose features are stored
    single_layers: tuple[ActivationKey, ...] = ()  # residual streams that make each layer a run

    @property
    def keys(self) -> tuple[ActivationKey, ...]:
        return tuple(self.activations)

    @cached_property
    def stored_arrays(self) -> StoredArrays:
        activations = tuple(self.activations.values())
        groups = [array.width // (self.scale_group or array.width) for array in activations]
        slots = (TOKENS if self.selected is None else SELECTED).slots
        features = (
            feature_specs(
                encoder.name, encoder.top, encoder.dtype, slots, encoder.key.name if encoder.decodes else None
            )
            for encoder in self.encoders
        )
        return StoredArrays(
            activations,
            scales=tuple(map(scale_spec, activations, groups)) if self.dtype in LARGEST else (),
            outputs=(*self.head_outputs, *(array for arrays in features for array in arrays)),
        )

    @property
    def slots(self) -> int:
        """A row's slots for activations: T, or K."""
        return self.length if self.selected is None else self.selected

    @property
    def forward_keys(self) -> tuple[ActivationKey, ...]:
        """The activations that the forward pass computes: the stored ones, those that the head and SAEs read, and
        those that end runs of layers."""
        read = (*(encoder.key for encoder in self.encoders), *([FINAL_NORM] if self.head_outputs else []))
        return tuple(dict.fromkeys((*self.keys, *read, *self.single_layers)))

    @property
    def head_share(self) -> float:
        """The share of the token slots for which the head is computed."""
        return self.slots / self.length if self.head_outputs else 0.0

    @property
    def encoder_flops(self) -> int:
        """FLOPs of all SAEs per token slot."""
        return round(sum(encoder.flops_per_token for encoder in self.encoders) * self.slots / self.length)

    @property
    def index_bytes(self) -> float:
        """Bytes of all indexes by feature, per token slot."""
        return sum(encoder.index_bytes for encoder in self.encoders) * self.slots / self.length

    @property
    def counted_names(self) -> tuple[str, ...]:
        """The arrays in which the step counts tokens with non-finite values."""
        outputs = (spec.name for spec in self.head_outputs if spec.dtype == "float32")
        return (*(key.name for key in self.keys), *outputs, *(encoder.name for encoder in self.encoders))

    @property
    def num_top(self) -> int:
        """The number of likeliest next tokens that are stored."""
        return max((spec.width or 0 for spec in self.head_outputs), default=0)

    @property
    def row_bytes(self) -> int:
        """Bytes per row in all arrays."""
        return self.slots * sum(array.position_bytes for array in self.stored_arrays)

    @property
    def largest_row_bytes(self) -> int:
        """Bytes per row in the largest array, ignoring scales."""
        stored = self.stored_arrays
        return self.slots * max(array.position_bytes for array in (*stored.activations, *stored.outputs))

    @property
    def statistics_widths(self) -> dict[ActivationKey, int]:
        """D of the activations with statistics: the stored ones, then those that SAEs reconstruct."""
        stored = {key: array.width for key, array in self.activations.items()}
        reconstructed = {encoder.key: encoder.sae.d_in for encoder in self.encoders if encoder.decodes}
        return stored | reconstructed if self.statistics else {}

    @property
    def measures_error(self) -> bool:
        """Whether the statistics include the error of storing, as for scaled dtypes."""
        return self.statistics and bool(self.activations) and self.dtype in LARGEST

    @property
    def statistics_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes per row of the arrays of `RowStatistics`, all float32, by name; empty if the step computes none."""
        widths = self.statistics_widths
        if not widths:
            return {}
        shapes = {"moments": (2, sum(widths.values())), "norms": (len(widths), self.slots)}
        return shapes | ({"squared_errors": (len(self.activations),)} if self.measures_error else {})

    @property
    def row_statistics_bytes(self) -> int:
        """Bytes of a row's `RowStatistics`."""
        return ITEM_BYTES["float32"] * sum(map(math.prod, self.statistics_shapes.values()))
