"""GPT-NeoX and Pythia (transformers' `GPTNeoXModel`): parallel residual, LayerNorm, partial rotary embeddings."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families.hf_attention import parse_rope, rope_values, rotary_dim
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

KEY_TABLE: KeyTable = {
    "embed_in.weight": "embed",
    "layers.*.input_layernorm.weight": "attention.norm",
    "layers.*.input_layernorm.bias": "attention.norm_bias",
    "layers.*.attention.query_key_value.weight": "attention.qkv",
    "layers.*.attention.dense.weight": "attention.o",
    "layers.*.post_attention_layernorm.weight": "mlp.norm",
    "layers.*.post_attention_layernorm.bias": "mlp.norm_bias",
    "layers.*.mlp.dense_h_to_4h.weight": "mlp.up",
    "layers.*.mlp.dense_h_to_4h.bias": "mlp.up_bias",
    "layers.*.mlp.dense_4h_to_h.weight": "mlp.down",
    "layers.*.mlp.dense_4h_to_h.bias": "mlp.down_bias",
    "final_layer_norm.weight": "final_norm",
    "final_layer_norm.bias": "final_norm_bias",
}

ATTENTION_BIASES: KeyTable = {
    "layers.*.attention.query_key_value.bias": "attention.qkv_bias",
    "layers.*.attention.dense.bias": "attention.o_bias",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("is_decoder")  # the model is always causal
    max_positions = config.positive_int("max_position_embeddings", 2048)
    values = rope_values(config)
    fraction = values.positive_float("partial_rotary_factor", config.positive_float("rotary_pct", 0.25))
    rope = parse_rope(values, config.positive_float("rotary_emb_base", 10000.0), max_positions)
    values.finish()
    arch = read_multi_head(config, max_positions=2048, eps=1e-5, activation="gelu", rope=rope)
    table = KEY_TABLE | (ATTENTION_BIASES if config.flag("attention_bias", True) else {})
    arch = dataclasses.replace(arch, rotary_dim=rotary_dim(config, arch.head_dim, fraction))
    return dataclasses.replace(arch, parallel=config.flag("use_parallel_residual", True)), table
