"""What a plan needs to know about a model."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.head import Head


class GenerationFacts(Protocol):
    def weight_bytes(self, dtype: str, with_int8: bool) -> WeightBytes:
        """Bytes of all layers and the head."""


class ModelFacts(Protocol):
    """Sizes that config.json determines; `pipeline.models.model.Model` implements them."""

    family: str
    arch: Architecture
    head: Head | None  # None: an encoder
    generation: GenerationFacts  # raises ConfigError for an encoder
    num_layers: int
    max_positions: int
    sites: tuple[Site, ...]
    tensor_dims: Mapping[str, int]  # the sizes that the mesh's tensor axis divides, by name

    def width(self, key: ActivationKey, length: int = 0) -> int: ...

    def hook_name(self, key: ActivationKey) -> str: ...

    def weight_bytes(
        self, keys: Sequence[ActivationKey], dtype: str, with_int8: bool, with_head: bool = False
    ) -> WeightBytes:
        """Bytes of the weights that capturing `keys` needs; `with_head` adds the head."""
