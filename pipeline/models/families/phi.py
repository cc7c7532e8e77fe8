"""Phi-1, Phi-1.5 and Phi-2 (transformers' `PhiModel`): attention and MLP in parallel after one LayerNorm, and rotation
in part."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm
from pipeline.models.families.hf_attention import read_partial_rope, rotary_dim
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import read_decoder

_PLACES = {
    "layers.*.input_layernorm": "attention.norm",
    "layers.*.self_attn.q_proj": "attention.q",
    "layers.*.self_attn.k_proj": "attention.k",
    "layers.*.self_attn.v_proj": "attention.v",
    "layers.*.self_attn.dense": "attention.o",
    "layers.*.mlp.fc1": "mlp.up",
    "layers.*.mlp.fc2": "mlp.down",
    "final_layernorm": "final_norm",
}
_HEAD_NORMS = {
    "layers.*.self_attn.q_layernorm": "attention.q_norm",
    "layers.*.self_attn.k_layernorm": "attention.k_norm",
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 2048)
    rope, fraction = read_partial_rope(config, max_positions, 0.5)
    arch = read_decoder(config, max_positions, activation=config.activation("hidden_act", "gelu_new"), rope=rope)
    arch = dataclasses.replace(
        arch,
        norm=Norm.layer,
        norm_eps=config.positive_float("layer_norm_eps", 1e-5),
        parallel=True,
        gated=False,
        rotary_dim=rotary_dim(config, arch.head_dim, fraction),
    )
    places = _PLACES | (_HEAD_NORMS if config.flag("qk_layernorm", False) else {})
    table: KeyTable = {"embed_tokens.weight": "embed"}
    table |= {f"{place}.weight": key for place, key in places.items()}
    return arch, table | {f"{place}.bias": f"{key}_bias" for place, key in places.items()}
