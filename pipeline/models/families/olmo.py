"""OLMo 1, 2 and 3 (transformers' `OlmoModel`, `Olmo2Model`, `Olmo3Model`).

OLMo 1 has LayerNorm without weights, and may clip queries, keys and values. OLMo 2 and 3 have norms after the blocks
instead of before them, and norms of queries and keys over all heads together. In OLMo 3, most layers have a window.
"""

import dataclasses

from pipeline.models.architecture import Architecture, FileTensor, KeyTable, Norm, Rope
from pipeline.models.families.hf_attention import (
    every_nth_global,
    nested_ropes,
    read_local,
    read_rope,
)
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.llama import Defaults, attention_biases, read_decoder, table_without

NORMS_OVER_HEADS: KeyTable = {
    "layers.*.self_attn.q_norm.weight": FileTensor(("attention.q_norm",), "NH"),
    "layers.*.self_attn.k_norm.weight": FileTensor(("attention.k_norm",), "KH"),
}
KEY_TABLE: KeyTable = table_without("attention.norm") | NORMS_OVER_HEADS
KEY_TABLE |= {
    "layers.*.post_attention_layernorm.weight": "attention.post_norm",
    "layers.*.post_feedforward_layernorm.weight": "mlp.post_norm",
}
_OLMO3_THETA = 500_000.0


def read_olmo(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = dataclasses.replace(
        read_decoder(config, Defaults(2048)),
        norm=Norm.layer_plain,
        norm_eps=1e-5,
        clip_qkv=config.optional_float("clip_qkv", None),
    )
    return arch, table_without("attention.norm", "mlp.norm", "final_norm") | attention_biases(config)


def read_olmo2(config: HfConfig, rope: Rope | None = None) -> tuple[Architecture, KeyTable]:
    arch = read_decoder(config, Defaults(2048, eps=1e-5), rope=rope)
    return dataclasses.replace(arch, norm=Norm.rms_wide), KEY_TABLE | attention_biases(config)


def read_olmo3(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 2048)
    rope, local_rope = _read_ropes(config, max_positions)
    arch, table = read_olmo2(config, rope)
    pattern = every_nth_global(arch.num_layers, 4)
    window = config.optional_int("sliding_window", 4096)
    return dataclasses.replace(arch, local=read_local(config, arch, pattern, window, local_rope)), table


def _read_ropes(config: HfConfig, max_positions: int) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of local layers. In older files, `rope_scaling` applies to global layers
    only.

    `rope_theta` of an older file applies to all layers in transformers 4, but only to global layers in transformers 5.
    """
    if "rope_parameters" in config:
        return nested_ropes(config, max_positions, _OLMO3_THETA, _OLMO3_THETA)
    rope = read_rope(config, max_positions, _OLMO3_THETA)
    config.expect(
        rope.theta == _OLMO3_THETA,
        f"{_OLMO3_THETA:g} as rope_theta, since transformers 4 and 5 disagree on whether other values apply to local "
        f"layers, got {rope.theta:g}",
        "Replace rope_theta and rope_scaling with rope_parameters of full_attention and sliding_attention.",
    )
    return rope, Rope(_OLMO3_THETA)
