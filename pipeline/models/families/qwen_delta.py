"""Qwen3-Next and Qwen3.5, dense and with experts (transformers' `Qwen3NextModel`, `Qwen3_5TextModel`,
`Qwen3_5MoeTextModel`), and the language models of Qwen3.5's multimodal checkpoints.

Most layers have a gated DeltaNet; by default, every fourth layer has attention, with gated heads. Norms are scaled by
1 + weight.
"""

import dataclasses

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Architecture, DeltaNet, Experts, FileTensor, KeyTable, Norm
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import GLOBAL, parse_rope, read_pattern, rope_values, rotary_dim
from pipeline.models.families.hf_config import HfConfig, read_text
from pipeline.models.families.qwen import HEAD_NORMS

LINEAR = "linear_attention"

_ATTENTION: KeyTable = HEAD_NORMS | {
    "layers.*.self_attn.q_proj.weight": FileTensor(("attention.q", "attention.gate"), by="N"),
}
_BIASES: KeyTable = llama.ATTENTION_BIASES | {
    "layers.*.self_attn.q_proj.bias": FileTensor(("attention.q_bias", "attention.gate_bias"), by="N"),
}
_DELTA: KeyTable = {
    "layers.*.linear_attn.conv1d.weight": FileTensor(("delta.q_taps", "delta.k_taps", "delta.v_taps")),
    "layers.*.linear_attn.dt_bias": "delta.decay_offset",
    "layers.*.linear_attn.A_log": "delta.decay_log_rate",
    "layers.*.linear_attn.norm.weight": "delta.z_norm",
    "layers.*.linear_attn.out_proj.weight": "delta.o",
}
_FUSED_PROJECTIONS: KeyTable = {
    "layers.*.linear_attn.in_proj_qkvz.weight": FileTensor(("delta.q", "delta.k", "delta.v", "delta.z"), by="J"),
    "layers.*.linear_attn.in_proj_ba.weight": FileTensor(("delta.write", "delta.decay"), by="J"),
}
_SEPARATE_PROJECTIONS: KeyTable = {
    "layers.*.linear_attn.in_proj_qkv.weight": FileTensor(("delta.q", "delta.k", "delta.v")),
    "layers.*.linear_attn.in_proj_z.weight": "delta.z",
    "layers.*.linear_attn.in_proj_b.weight": "delta.write",
    "layers.*.linear_attn.in_proj_a.weight": "delta.decay",
}
_STACKED_EXPERTS: KeyTable = {
    "layers.*.mlp.gate.weight": "mlp.router",
    "layers.*.mlp.experts.gate_up_proj": FileTensor(("mlp.experts_gate", "mlp.experts_up"), "E M D", by="E"),
    "layers.*.mlp.experts.down_proj": FileTensor(("mlp.experts_down",), "E D M"),
}


def read_qwen3_next(config: HfConfig) -> tuple[Architecture, KeyTable]:
    if config.flag("use_sliding_window", False):
        raise CheckpointError(
            f"{config.where}: use_sliding_window is true, which is not implemented. Use another model."
        )
    arch, table = _read(config, default_kv_heads=2)
    experts = moe.read_experts(config, arch.num_layers, 512, 10, 512, sums_to_one=True)
    experts = dataclasses.replace(experts, d_shared=config.positive_int("shared_expert_intermediate_size", 512))
    return dataclasses.replace(arch, experts=experts), table | _FUSED_PROJECTIONS | moe.EXPERTS | moe.SHARED


def read_qwen3_5(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.ignore("mlp_only_layers")  # in published files, although there are no experts
    return _read_qwen3_5(config, default_kv_heads=4)


def read_qwen3_5_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """For a checkpoint of the language model alone, in which transformers writes a tensor per expert."""
    config.ignore(*moe.TRAINING_KEYS)
    d_expert = config.positive_int("moe_intermediate_size", 512)
    arch, table = _read_qwen3_5(config, default_kv_heads=2, d_mlp=d_expert)
    num_experts, per_token = moe.read_counts(config, arch.num_layers, 256, 8, "num_experts")
    d_shared = config.positive_int("shared_expert_intermediate_size", 512)
    experts = Experts("S" * arch.num_layers, num_experts, per_token, d_expert, sums_to_one=True, d_shared=d_shared)
    return dataclasses.replace(arch, experts=experts), table | moe.EXPERTS | moe.SHARED


def read_qwen3_5_multimodal(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """`read_qwen3_5` for the language model of a checkpoint with vision."""
    return read_text(config, qwen3_5_text=read_qwen3_5)


def read_qwen3_5_moe_multimodal(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """`read_qwen3_5_moe` for the language model of a checkpoint with vision, in which all experts are in one tensor."""
    arch, table = read_text(config, qwen3_5_moe_text=read_qwen3_5_moe)
    return arch, {key: entry for key, entry in table.items() if key not in moe.EXPERTS} | _STACKED_EXPERTS


def _read_qwen3_5(config: HfConfig, default_kv_heads: int, d_mlp: int | None = None) -> tuple[Architecture, KeyTable]:
    if not config.flag("attn_output_gate", True):
        raise CheckpointError(
            f"{config.where}: attn_output_gate is false, which is not implemented. Use another model."
        )
    config.choice("output_gate_type", ("swish",), "swish")
    config.choice("mamba_ssm_dtype", ("float32",), "float32")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # multi-token prediction
    arch, table = _read(config, default_kv_heads, d_mlp)
    return arch, table | _SEPARATE_PROJECTIONS


def _read(config: HfConfig, default_kv_heads: int, d_mlp: int | None = None) -> tuple[Architecture, KeyTable]:
    """Everything except the experts and the projections of DeltaNet."""
    max_positions = config.positive_int("max_position_embeddings", 32768)
    values = rope_values(config)
    values.ignore("mrope_section", "mrope_interleaved")  # for images; in text, all sections have the same positions
    rope = parse_rope(values, config.positive_float("rope_theta", 10000.0), max_positions)
    fraction = values.positive_float("partial_rotary_factor", config.positive_float("partial_rotary_factor", 0.25))
    values.finish()
    arch = llama.read_decoder(
        config, max_positions, default_kv_heads=default_kv_heads, default_head_dim=256, rope=rope, d_mlp=d_mlp
    )
    arch = dataclasses.replace(
        arch,
        norm=Norm.rms_plus_one,
        rotary_dim=rotary_dim(config, arch.head_dim, fraction),
        delta=_read_delta(config, arch.num_layers),
    )
    table = llama.KEY_TABLE | _ATTENTION | (_BIASES if config.flag("attention_bias", False) else {})
    return arch, table | _DELTA


def _read_delta(config: HfConfig, num_layers: int) -> DeltaNet:
    interval = config.positive_int("full_attention_interval", 4)
    default = "".join("D" if (layer + 1) % interval else "A" for layer in range(num_layers))
    pattern = read_pattern(config, default, {"D": LINEAR, "A": GLOBAL})
    num_heads = config.positive_int("linear_num_key_heads", 16)
    num_values = config.positive_int("linear_num_value_heads", 32)
    if num_values % num_heads:
        raise CheckpointError(
            f"{config.where}: linear_num_value_heads is {num_values}, expected a multiple of linear_num_key_heads, "
            f"which is {num_heads}. Is the file damaged?"
        )
    return DeltaNet(
        pattern,
        num_heads,
        num_values // num_heads,
        config.positive_int("linear_key_head_dim", 128),
        config.positive_int("linear_value_head_dim", 128),
        config.positive_int("linear_conv_kernel_dim", 4),
    )
