"""GLM-4, GLM-4-0414 and GLM-4.5 (transformers' `GlmModel`, `Glm4Model`, `Glm4MoeModel`): rotation in part.

GLM-4 rotates adjacent dimensions; its 0414 models also have norms after each block. GLM-4.5 has DeepSeek-V3's experts.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, RotaryPairs, Router
from pipeline.models.families import deepseek, llama
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.families.qwen import HEAD_NORMS

_GLM: KeyTable = llama.table_without("mlp.gate", "mlp.up") | llama.FUSED_MLP
_POST_NORMS: KeyTable = {
    "layers.*.post_self_attn_layernorm.weight": "attention.post_norm",
    "layers.*.post_mlp_layernorm.weight": "mlp.post_norm",
}


def read_glm(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(131072, kv_heads=2, head_dim=128, eps=1.5625e-07, fraction=0.5))
    arch = dataclasses.replace(arch, rotary_pairs=RotaryPairs.adjacent)
    return arch, _GLM | (llama.QKV_BIASES if config.flag("attention_bias", True) else {})


def read_glm4(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = read_glm(config)
    return arch, table | _POST_NORMS


def read_glm4_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(131072, kv_heads=8, eps=1e-5, fraction=0.5))
    experts = deepseek.read_experts(
        config, arch.num_layers, 1, default_num=128, default_d_expert=1408, default_num_shared=1
    )
    experts = dataclasses.replace(
        experts,
        scaling=config.positive_float("routed_scaling_factor", 1.0),
        router=Router.sigmoid_groups,
        sums_to_one=config.flag("norm_topk_prob", True),
    )
    experts = deepseek.with_groups(config, experts, 1, 1)
    num_ignored = config.count("num_nextn_predict_layers", 1)
    table = llama.KEY_TABLE | deepseek.EXPERTS | deepseek.CORRECTION
    table |= llama.QKV_BIASES if config.flag("attention_bias", False) else {}
    table |= HEAD_NORMS if config.flag("use_qk_norm", False) else {}
    return dataclasses.replace(arch, experts=experts, num_ignored_layers=num_ignored), table
