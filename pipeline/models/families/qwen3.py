"""Qwen3's dense models (transformers' `Qwen3Model`): a norm of every head's queries and keys, no biases by default."""

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import ATTENTION_BIASES, read_decoder
from pipeline.models.families.llama import KEY_TABLE as LLAMA_TABLE
from pipeline.models.families.qwen2 import read_windows

HEAD_NORMS: KeyTable = {
    "layers.*.self_attn.q_norm.weight": "attention.q_norm",
    "layers.*.self_attn.k_norm.weight": "attention.k_norm",
}
KEY_TABLE: KeyTable = LLAMA_TABLE | HEAD_NORMS


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """The architecture and its tensors. Raises CheckpointError for what is not implemented."""
    arch = read_decoder(config, default_max_positions=32768, default_head_dim=128)
    table = KEY_TABLE | (ATTENTION_BIASES if config.flag("attention_bias", False) else {})
    return read_windows(config, arch), table
