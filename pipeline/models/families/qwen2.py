"""Qwen2 and Qwen2.5 (transformers' `Qwen2Model`): biases on q, k and v, none elsewhere."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families.hf_attention import read_local
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import KEY_TABLE as LLAMA_TABLE
from pipeline.models.families.llama import read_decoder

QKV_BIASES: KeyTable = {
    "layers.*.self_attn.q_proj.bias": "attention.q_bias",
    "layers.*.self_attn.k_proj.bias": "attention.k_bias",
    "layers.*.self_attn.v_proj.bias": "attention.v_bias",
}
KEY_TABLE: KeyTable = LLAMA_TABLE | QKV_BIASES


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """The architecture and its tensors. Raises CheckpointError for what is not implemented."""
    return read_windows(config, read_decoder(config, default_max_positions=32768)), KEY_TABLE


def read_windows(config: HfConfig, arch: Architecture) -> Architecture:
    """Adds Qwen's sliding window: of the layers from `max_window_layers` on, if it is used at all."""
    is_used = config.flag("use_sliding_window", False)
    window = config.optional_int("sliding_window", 4096)
    first = min(config.count("max_window_layers", 28), arch.num_layers)
    pattern = "G" * first + "L" * (arch.num_layers - first)
    local = read_local(config, pattern, window if is_used else None, arch.rope, arch.rope, arch.max_positions)
    return dataclasses.replace(arch, local=local)
