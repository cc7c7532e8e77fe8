"""Phi-3 and Phi-4 (transformers' `Phi3Model`): a LLaMA with q, k and v in one tensor, gate and up in another."""

import dataclasses

from pipeline.models.architecture import Architecture, FileTensor, KeyTable
from pipeline.models.families.hf_attention import all_local, rope_values
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import FUSED_MLP, Defaults, read_decoder, table_without

_FUSED = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
KEY_TABLE: KeyTable = table_without(*_FUSED) | FUSED_MLP
KEY_TABLE |= {"layers.*.self_attn.qkv_proj.weight": FileTensor(("attention.q", "attention.k", "attention.v"))}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    original = config.positive_int("original_max_position_embeddings", 4096)  # takes precedence over the mapping
    values = rope_values(config)
    values = HfConfig(values.values | {"original_max_position_embeddings": original}, values.where)
    values.choice("rope_type" if "rope_type" in values else "type", ("default", "longrope"), "default")
    values.ignore("original_max_position_embeddings")  # read for LongRoPE only
    arch = read_decoder(config, Defaults(4096, fraction=1.0, eps=1e-5), rope_config=values)
    return dataclasses.replace(arch, local=all_local(arch, config.optional_int("sliding_window", None))), KEY_TABLE
