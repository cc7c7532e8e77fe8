"""LFM2 (transformers' `Lfm2Model`): gated short convolutions in most layers, attention in the others."""

import dataclasses

from pipeline.models.architecture import Activation, Architecture, FileTensor, KeyTable, ShortConv, biases
from pipeline.models.families.hf_attention import GLOBAL, read_pattern
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import Defaults, read_decoder

_CONV: KeyTable = {
    "layers.*.conv.in_proj.weight": FileTensor(("conv.in_gate", "conv.out_gate", "conv.in")),
    "layers.*.conv.conv.weight": "conv.taps",
    "layers.*.conv.out_proj.weight": "conv.o",
}
KEY_TABLE: KeyTable = _CONV | {
    "embed_tokens.weight": "embed",
    "layers.*.operator_norm.weight": "attention.norm",
    "layers.*.self_attn.q_proj.weight": "attention.q",
    "layers.*.self_attn.k_proj.weight": "attention.k",
    "layers.*.self_attn.v_proj.weight": "attention.v",
    "layers.*.self_attn.out_proj.weight": "attention.o",
    "layers.*.self_attn.q_layernorm.weight": "attention.q_norm",
    "layers.*.self_attn.k_layernorm.weight": "attention.k_norm",
    "layers.*.ffn_norm.weight": "mlp.norm",
    "layers.*.feed_forward.w1.weight": "mlp.gate",
    "layers.*.feed_forward.w3.weight": "mlp.up",
    "layers.*.feed_forward.w2.weight": "mlp.down",
    "embedding_norm.weight": "final_norm",
}
_UNUSED = (  # in published files; transformers reads none of them
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
)


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore(*_UNUSED)
    is_tied = config.flag("tie_word_embeddings", True)
    config.require({"tie_embedding": is_tied})
    arch = read_decoder(
        config,
        Defaults(128000, kv_heads=8, theta=1e6, eps_key="norm_eps", eps=1e-5),
        activation=Activation.silu,
        d_mlp=_read_d_mlp(config),
    )
    attention = config.whole_numbers("full_attn_idxs") if "full_attn_idxs" in config else range(arch.num_layers)
    default = "".join("A" if layer in attention else "C" for layer in range(arch.num_layers))
    pattern = read_pattern(config, default, {"A": GLOBAL, "C": "conv"})
    conv = ShortConv(pattern, config.positive_int("conv_L_cache", 3))
    conv_biases = biases(_CONV) if config.flag("conv_bias", False) else {}
    return dataclasses.replace(arch, conv=conv), KEY_TABLE | conv_biases


def _read_d_mlp(config: HfConfig) -> int:
    """`Lfm2MLP`'s number of neurons."""
    size = config.positive_int("block_ff_dim", config.positive_int("intermediate_size", 12288))
    multiple = config.positive_int("block_multiple_of", 256)
    multiplier = config.optional_float("block_ffn_dim_multiplier", 1.0)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if multiplier is None else -(-int(multiplier * size) // multiple) * multiple
