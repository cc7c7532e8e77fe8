"""OPT and Galactica (transformers' `OPTModel`): learned positions, of which the first two rows are unused."""

import dataclasses

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Architecture, KeyTable, Norm
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.multi_head import read_multi_head

_PLACES = {
    "layers.*.self_attn_layer_norm": "attention.norm",
    "layers.*.self_attn.q_proj": "attention.q",
    "layers.*.self_attn.k_proj": "attention.k",
    "layers.*.self_attn.v_proj": "attention.v",
    "layers.*.self_attn.out_proj": "attention.o",
    "layers.*.final_layer_norm": "mlp.norm",
    "layers.*.fc1": "mlp.up",
    "layers.*.fc2": "mlp.down",
    "final_layer_norm": "final_norm",
}
_EMBEDDINGS: KeyTable = {"embed_tokens.weight": "embed", "embed_positions.weight": "position_embed"}
_NAMES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("activation_dropout", "dropout", "layerdrop", "init_std")  # training
    config.ignore("output_projection")  # an unread name of the head
    arch = read_multi_head(config, max_positions=2048, eps=1e-5, activation="relu", names=_NAMES)
    if (width := config.positive_int("word_embed_proj_dim", arch.d_model)) != arch.d_model:
        raise CheckpointError(
            f"{config.where}: word_embed_proj_dim is {width}, expected hidden_size, {arch.d_model}: projected "
            f"embeddings are not implemented. Use another size of OPT."
        )
    config.require({"do_layer_norm_before": True, "_remove_final_layer_norm": False})
    config.require({"learned_embeddings": True, "scale_embeddings": False})  # Galactica
    has_bias, has_scale = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    table = dict(_EMBEDDINGS)
    for place, key in _PLACES.items():
        is_norm = key.endswith("norm")
        if has_scale or not is_norm:
            table[f"{place}.weight"] = key
        if has_scale if is_norm else has_bias:
            table[f"{place}.bias"] = f"{key}_bias"
    return dataclasses.replace(arch, position_offset=2, norm=Norm.layer if has_scale else Norm.layer_plain), table
