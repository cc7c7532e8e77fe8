"""What a plan needs to know about a model."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture


class ModelFacts(Protocol):
    """Sizes that config.json determines; `pipeline.models.registry.Model` implements them."""

    arch: Architecture
    num_layers: int
    max_positions: int
    sites: tuple[Site, ...]
    tensor_dims: Mapping[str, int]  # the dimensions that the mesh's tensor axis divides, by name

    def width(self, site: Site) -> int: ...

    def weight_bytes(self, keys: Sequence[ActivationKey], dtype: str, with_int8: bool) -> tuple[int, int]:
        """Bytes of the layers' matrices, and of all other weights, that capturing `keys` needs."""

    def generation_weight_bytes(self, dtype: str, with_int8: bool) -> tuple[int, int]:
        """The same for generation, which needs all layers and the head. Raises ConfigError for an encoder."""
