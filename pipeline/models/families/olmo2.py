"""OLMo 2 (transformers' `Olmo2Model`): norms after the blocks instead of before, and over all heads at once."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import ATTENTION_BIASES, read_decoder
from pipeline.models.families.llama import KEY_TABLE as LLAMA_TABLE

KEY_TABLE: KeyTable = {key: entry for key, entry in LLAMA_TABLE.items() if "input_layernorm" not in key} | {
    "layers.*.self_attn.q_norm.weight": ("attention.q_norm", "NH"),
    "layers.*.self_attn.k_norm.weight": ("attention.k_norm", "KH"),
    "layers.*.post_attention_layernorm.weight": "attention.post_norm",
    "layers.*.post_feedforward_layernorm.weight": "mlp.post_norm",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """The architecture and its tensors. Raises CheckpointError for what is not implemented."""
    arch = read_decoder(config, default_max_positions=2048, default_eps=1e-5)
    table = KEY_TABLE | (ATTENTION_BIASES if config.flag("attention_bias", False) else {})
    return dataclasses.replace(arch, norm=Norm.rms_wide), table
