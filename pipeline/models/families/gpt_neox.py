"""GPT-NeoX and Pythia (transformers' `GPTNeoXModel`): parallel residual, LayerNorm, partial rotary embeddings."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, biases
from pipeline.models.families.hf_attention import read_fraction, read_rope, rope_values
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_ATTENTION: KeyTable = {
    "layers.*.attention.query_key_value.weight": "attention.qkv",
    "layers.*.attention.dense.weight": "attention.o",
}
_OTHERS: KeyTable = {
    "layers.*.input_layernorm.weight": "attention.norm",
    "layers.*.post_attention_layernorm.weight": "mlp.norm",
    "layers.*.mlp.dense_h_to_4h.weight": "mlp.up",
    "layers.*.mlp.dense_4h_to_h.weight": "mlp.down",
    "final_layer_norm.weight": "final_norm",
}
KEY_TABLE: KeyTable = {"embed_in.weight": "embed"} | _ATTENTION | _OTHERS | biases(_OTHERS)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("is_decoder")  # the model is always causal
    max_positions = config.positive_int("max_position_embeddings", 2048)
    values = rope_values(config)
    fraction = read_fraction(config, values, 0.25, "rotary_pct")
    rope = read_rope(config, max_positions, values=values, theta_key="rotary_emb_base")
    arch = read_multi_head(config, max_positions=2048, eps=1e-5, activation="gelu", rope=rope)
    table = KEY_TABLE | (biases(_ATTENTION) if config.flag("attention_bias", True) else {})
    arch = dataclasses.replace(arch, rotary_dim=int(arch.head_dim * fraction))
    return dataclasses.replace(arch, parallel=config.flag("use_parallel_residual", True)), table
