"""Phi-1, Phi-1.5 and Phi-2 (transformers' `PhiModel`): attention and MLP in parallel after one LayerNorm, and rotation
in part."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm, biases
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import Defaults, read_decoder

_LAYERS: KeyTable = {
    "layers.*.input_layernorm.weight": "attention.norm",
    "layers.*.self_attn.q_proj.weight": "attention.q",
    "layers.*.self_attn.k_proj.weight": "attention.k",
    "layers.*.self_attn.v_proj.weight": "attention.v",
    "layers.*.self_attn.dense.weight": "attention.o",
    "layers.*.mlp.fc1.weight": "mlp.up",
    "layers.*.mlp.fc2.weight": "mlp.down",
    "final_layernorm.weight": "final_norm",
}
_HEAD_NORMS: KeyTable = {
    "layers.*.self_attn.q_layernorm.weight": "attention.q_norm",
    "layers.*.self_attn.k_layernorm.weight": "attention.k_norm",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    activation = config.activation("hidden_act", "gelu_new")
    arch = read_decoder(config, Defaults(2048, fraction=0.5, eps_key="layer_norm_eps", eps=1e-5), activation=activation)
    table = _LAYERS | (_HEAD_NORMS if config.flag("qk_layernorm", False) else {})
    table |= biases(table) | {"embed_tokens.weight": "embed"}
    return dataclasses.replace(arch, norm=Norm.layer, parallel=True, gated=False), table
