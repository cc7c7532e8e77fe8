"""GLM-4, GLM-4-0414 and GLM-4.5 (transformers' `GlmModel`, `Glm4Model`, `Glm4MoeModel`): rotation in part.

GLM-4 rotates adjacent dimensions; its 0414 models also have norms after each block. GLM-4.5 has DeepSeek-V3's experts.
"""

import dataclasses

from pipeline.models.architecture import Architecture, FileTensor, KeyTable, RotaryPairs, Router
from pipeline.models.families import deepseek, llama
from pipeline.models.families.hf_attention import read_partial_rope, rotary_dim
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.qwen import HEAD_NORMS, QKV_BIASES

_GLM: KeyTable = llama.KEY_TABLE | {"layers.*.mlp.gate_up_proj.weight": FileTensor(("mlp.gate", "mlp.up"))}
_GLM = {key: entry for key, entry in _GLM.items() if entry not in ("mlp.gate", "mlp.up")}
_POST_NORMS: KeyTable = {
    "layers.*.post_self_attn_layernorm.weight": "attention.post_norm",
    "layers.*.post_mlp_layernorm.weight": "mlp.post_norm",
}


def read_glm(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = _read(config, default_kv_heads=2, default_head_dim=128, default_eps=1.5625e-07)
    arch = dataclasses.replace(arch, rotary_pairs=RotaryPairs.adjacent)
    return arch, _GLM | (QKV_BIASES if config.flag("attention_bias", True) else {})


def read_glm4(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = read_glm(config)
    return arch, table | _POST_NORMS


def read_glm4_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = _read(config, default_kv_heads=8, default_head_dim=None, default_eps=1e-5)
    experts = deepseek.read_experts(
        config, arch.num_layers, 1, default_num=128, default_d_expert=1408, default_num_shared=1
    )
    experts = dataclasses.replace(
        experts,
        scaling=config.positive_float("routed_scaling_factor", 1.0),
        router=Router.sigmoid_groups,
        sums_to_one=config.flag("norm_topk_prob", True),
    )
    num_groups, groups_per_token = config.positive_int("n_group", 1), config.positive_int("topk_group", 1)
    experts = deepseek.with_groups(config, experts, num_groups, groups_per_token)
    num_ignored = config.count("num_nextn_predict_layers", 1)
    table = llama.KEY_TABLE | deepseek.EXPERTS | deepseek.CORRECTION
    table |= QKV_BIASES if config.flag("attention_bias", False) else {}
    table |= HEAD_NORMS if config.flag("use_qk_norm", False) else {}
    return dataclasses.replace(arch, experts=experts, num_ignored_layers=num_ignored), table


def _read(config: HfConfig, default_kv_heads: int, default_head_dim: int | None, default_eps: float) -> Architecture:
    max_positions = config.positive_int("max_position_embeddings", 131072)
    rope, fraction = read_partial_rope(config, max_positions, 0.5)
    arch = llama.read_decoder(
        config,
        max_positions,
        default_kv_heads=default_kv_heads,
        default_head_dim=default_head_dim,
        default_eps=default_eps,
        rope=rope,
    )
    return dataclasses.replace(arch, rotary_dim=rotary_dim(config, arch.head_dim, fraction))
