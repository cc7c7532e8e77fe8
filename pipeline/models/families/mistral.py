"""Mistral 7B and similar models (transformers' `MistralModel`): a LLaMA that may have a window in every layer."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families.hf_attention import read_local
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import KEY_TABLE, read_decoder


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """Reads the architecture and its key table. Raises CheckpointError for values that are not implemented."""
    arch = read_decoder(config, default_max_positions=131072)
    window = config.optional_int("sliding_window", 4096)
    local = read_local(config, "L" * arch.num_layers, window, arch.rope, arch.rope, arch.max_positions)
    return dataclasses.replace(arch, local=local), KEY_TABLE
