"""Phi-3 and Phi-4 (transformers' `Phi3Model`): a LLaMA with q, k and v in one tensor, gate and up in another."""

import dataclasses

from pipeline.models.architecture import Architecture, FileTensor, KeyTable
from pipeline.models.families.hf_attention import all_local, parse_rope, rope_values, rotary_dim
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import read_decoder, table_without

_FUSED = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
KEY_TABLE: KeyTable = table_without(*_FUSED) | {
    "layers.*.self_attn.qkv_proj.weight": FileTensor(("attention.q", "attention.k", "attention.v")),
    "layers.*.mlp.gate_up_proj.weight": FileTensor(("mlp.gate", "mlp.up")),
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 4096)
    original = config.positive_int("original_max_position_embeddings", 4096)  # takes precedence over the mapping
    values = rope_values(config)
    values = HfConfig(values.values | {"original_max_position_embeddings": original}, values.where)
    values.choice("rope_type" if "rope_type" in values else "type", ("default", "longrope"), "default")
    values.ignore("original_max_position_embeddings")  # read for LongRoPE only
    theta = config.positive_float("rope_theta", 10000.0)
    rope = parse_rope(values, theta, max_positions)
    fraction = values.positive_float("partial_rotary_factor", config.positive_float("partial_rotary_factor", 1.0))
    values.finish()
    arch = read_decoder(config, default_max_positions=4096, default_eps=1e-5, rope=rope)
    arch = dataclasses.replace(arch, rotary_dim=rotary_dim(config, arch.head_dim, fraction))
    return dataclasses.replace(arch, local=all_local(arch, config.optional_int("sliding_window", None))), KEY_TABLE
