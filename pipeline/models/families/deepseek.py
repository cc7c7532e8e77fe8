"""DeepSeek-V2, V3, V3.2 and R1, and Kimi K2 (transformers' `DeepseekV2Model`, `DeepseekV3Model`, `DeepseekV32Model`):
latent attention, experts in groups, and a shared expert.

In V3.2, an indexer chooses the keys that a query attends to: all of them in rows of up to `index_topk` positions.
Longer rows are refused, so the indexer is not needed. Kimi K2 is a V3; Kimi K2.5 also has vision.
"""

import dataclasses

from pipeline.models.architecture import (
    Architecture,
    Experts,
    FileTensor,
    KeyTable,
    LatentAttention,
    RotaryPairs,
    Router,
    biases,
)
from pipeline.models.checkpoints.json_config import REQUIRED
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import read_pattern, rope_values, yarn_growth
from pipeline.models.families.hf_config import HfConfig, text_reader

_LATENT: KeyTable = {
    "layers.*.self_attn.kv_a_proj_with_mqa.weight": FileTensor(("attention.kv_down", "attention.k_rotary")),
    "layers.*.self_attn.kv_a_layernorm.weight": "attention.kv_down_norm",
    "layers.*.self_attn.kv_b_proj.weight": "attention.kv_up",
}
_LATENT_QUERIES: KeyTable = {
    "layers.*.self_attn.q_a_proj.weight": "attention.q_down",
    "layers.*.self_attn.q_a_layernorm.weight": "attention.q_down_norm",
    "layers.*.self_attn.q_b_proj.weight": "attention.q_up",
}
EXPERTS: KeyTable = moe.EXPERTS | {
    f"layers.*.mlp.shared_experts.{name}_proj.weight": f"mlp.shared_{name}" for name in ("gate", "up", "down")
}
CORRECTION: KeyTable = {"layers.*.mlp.gate.e_score_correction_bias": "mlp.router_correction"}
_INDEXER: KeyTable = {
    f"layers.*.self_attn.indexer.{name}": FileTensor(())
    for name in ("k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight")
}
_TRAINING_KEYS = ("aux_loss_alpha", "ep_size", "output_router_logits", "seq_aux")


def read_v2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = _read(config, RotaryPairs.adjacent, default_max_positions=2048)
    config.choice("scoring_func", ("softmax",), "softmax")
    config.require({"norm_topk_prob": False})  # transformers ignores it, DeepSeek's own code does not
    config.positive_int("num_experts_per_tok")  # required
    experts = read_experts(config, arch.num_layers, 0, default_num=64, default_d_expert=1407, default_num_shared=2)
    experts = dataclasses.replace(experts, scaling=config.positive_float("routed_scaling_factor", 1.0))
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        config.ignore("n_group", "topk_group")
    else:
        experts = with_groups(config, experts)
    return dataclasses.replace(arch, experts=experts), table


def read_v3(config: HfConfig, default_max_positions: int = 4096) -> tuple[Architecture, KeyTable]:
    are_adjacent = config.flag("rope_interleave", True, null=False)
    pairs = RotaryPairs.to_halves if are_adjacent else RotaryPairs.halves
    arch, table = _read(config, pairs, default_max_positions)
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    experts = read_experts(config, arch.num_layers, 3, default_num=256, default_d_expert=2048, default_num_shared=1)
    experts = dataclasses.replace(
        experts,
        scaling=config.positive_float("routed_scaling_factor", 2.5),
        router=Router.sigmoid_groups,
        sums_to_one=config.flag("norm_topk_prob", True, null=False),
    )
    experts = with_groups(config, experts, 8, 4)
    num_ignored = config.count("num_nextn_predict_layers", 1)
    return dataclasses.replace(arch, experts=experts, num_ignored_layers=num_ignored), table | CORRECTION


def read_v32(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("index_head_dim", "index_n_heads")
    arch, table = read_v3(config, default_max_positions=163840)
    read_pattern(config, "I" * arch.num_layers, {"I": "indexed_attention"})
    pattern = read_pattern(config, arch.experts.pattern, {"D": "dense", "S": "sparse"}, "mlp_layer_types")
    arch = dataclasses.replace(
        arch,
        experts=dataclasses.replace(arch.experts, pattern=pattern),
        max_positions=min(arch.max_positions, config.positive_int("index_topk", 2048)),
    )
    return arch, table | _INDEXER


_OF_VISION = (
    *("ignore_index", "projection_hidden_size", "projection_layer_norm_eps", "use_unified_vision_chunk"),
    "video_placeholder",
)
read_kimi_k25 = text_reader(*_OF_VISION, deepseek_v3=read_v3, kimi_k2=read_v3)


def _read(config: HfConfig, pairs: RotaryPairs, default_max_positions: int) -> tuple[Architecture, KeyTable]:
    """Everything except the experts. The key table covers dense and sparse layers."""
    num_unrotated = config.positive_int("qk_nope_head_dim", 128)
    num_rotary = config.positive_int("qk_rope_head_dim", 64)
    q_rank = config.optional_int("q_lora_rank", 1536)
    values = rope_values(config)
    is_yarn = "yarn" in (values.values.get("rope_type"), values.values.get("type"))
    mscale = values.optional_float("mscale_all_dim", None) if is_yarn else None  # also of dimensions without rotation
    arch = llama.read_decoder(config, llama.Defaults(default_max_positions, head_dim=num_rotary), rope_config=values)
    growth = 1 if mscale is None else mscale * yarn_growth(arch.rope.factor) + 1
    head_dim = num_unrotated + num_rotary
    config.require({"head_dim": num_rotary, "qk_head_dim": head_dim, "num_key_value_heads": arch.num_heads})
    latent = LatentAttention(
        config.positive_int("kv_lora_rank", 512), q_rank, config.positive_int("v_head_dim", 128), pairs
    )
    queries = {"layers.*.self_attn.q_proj.weight": "attention.q"} if q_rank is None else _LATENT_QUERIES
    table = llama.table_without("attention.q", "attention.k", "attention.v") | _LATENT | queries | EXPERTS
    if config.flag("attention_bias", False):
        table |= biases(table, "attention.kv_down", "attention.o", "attention.q_down")
    scale = None if growth == 1 else head_dim**-0.5 * growth * growth
    return (
        dataclasses.replace(arch, head_dim=head_dim, rotary_dim=num_rotary, latent=latent, attention_scale=scale),
        table,
    )


def read_experts(
    config: HfConfig,
    num_layers: int,
    default_dense: int,
    default_num: int,
    default_d_expert: int,
    default_num_shared: int,
) -> Experts:
    """The experts, not yet divided into groups. The first layers are dense."""
    config.ignore(*_TRAINING_KEYS)
    num_experts, per_token = moe.read_counts(config, default_num, 8, "n_routed_experts")
    num_dense = min(config.count("first_k_dense_replace", default_dense), num_layers)
    d_expert = config.positive_int("moe_intermediate_size", default_d_expert)
    return Experts(
        "D" * num_dense + "S" * (num_layers - num_dense),
        num_experts,
        per_token,
        d_expert,
        sums_to_one=False,
        router=Router.groups,
        d_shared=d_expert * config.positive_int("n_shared_experts", default_num_shared),
        rounds_weights=False,
    )


def with_groups(
    config: HfConfig, experts: Experts, default_num: object = REQUIRED, default_per_token: object = REQUIRED
) -> Experts:
    """The experts, divided into groups; a token uses some of the groups."""
    num_groups, per_token = (
        config.positive_int("n_group", default_num),
        config.positive_int("topk_group", default_per_token),
    )
    return dataclasses.replace(experts, num_groups=num_groups, groups_per_token=per_token)
