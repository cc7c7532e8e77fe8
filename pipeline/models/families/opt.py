"""OPT and Galactica (transformers' `OPTModel`): learned positions, of which the first two rows are unused."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm, biases
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_MATRICES: KeyTable = {
    "layers.*.self_attn.q_proj.weight": "attention.q",
    "layers.*.self_attn.k_proj.weight": "attention.k",
    "layers.*.self_attn.v_proj.weight": "attention.v",
    "layers.*.self_attn.out_proj.weight": "attention.o",
    "layers.*.fc1.weight": "mlp.up",
    "layers.*.fc2.weight": "mlp.down",
}
_NORMS: KeyTable = {
    "layers.*.self_attn_layer_norm.weight": "attention.norm",
    "layers.*.final_layer_norm.weight": "mlp.norm",
    "final_layer_norm.weight": "final_norm",
}
_EMBEDDINGS: KeyTable = {"embed_tokens.weight": "embed", "embed_positions.weight": "position_embed"}
_NAMES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("activation_dropout", "dropout", "layerdrop", "init_std")  # training
    config.ignore("output_projection")  # an unread name of the head
    arch = read_multi_head(config, max_positions=2048, eps=1e-5, activation="relu", names=_NAMES)
    config.require({"word_embed_proj_dim": arch.d_model})
    config.require({"do_layer_norm_before": True, "_remove_final_layer_norm": False})
    config.require({"learned_embeddings": True, "scale_embeddings": False})  # Galactica
    has_bias, has_scale = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    table = _EMBEDDINGS | _MATRICES | (biases(_MATRICES) if has_bias else {})
    table |= _NORMS | biases(_NORMS) if has_scale else {}
    return dataclasses.replace(arch, position_offset=2, norm=Norm.layer if has_scale else Norm.layer_plain), table
