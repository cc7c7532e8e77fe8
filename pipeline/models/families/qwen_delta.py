"""Qwen3-Next and Qwen3.5, dense and with experts (transformers' `Qwen3NextModel`, `Qwen3_5TextModel`,
`Qwen3_5MoeTextModel`), and the language models of Qwen3.5's multimodal checkpoints.

Most layers have a gated DeltaNet; by default, every fourth layer has attention, with gated heads. Norms are scaled by
1 + weight.
"""

import dataclasses

from pipeline.models.architecture import Architecture, DeltaNet, FileTensor, KeyTable, Norm, biases
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import GLOBAL, read_pattern, rope_values
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.qwen import HEAD_NORMS

LINEAR = "linear_attention"

_GATED: KeyTable = {"layers.*.self_attn.q_proj.weight": FileTensor(("attention.q", "attention.gate"), by="N")}
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


def read_qwen3_next(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.require({"use_sliding_window": False})
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
    arch, table = _read_qwen3_5(config, 2, config.positive_int("moe_intermediate_size", 512))
    d_shared = config.positive_int("shared_expert_intermediate_size", 512)
    arch = moe.with_experts(config, arch, 256, 8, "num_experts", sums_to_one=True, d_shared=d_shared)
    return arch, table | moe.EXPERTS | moe.SHARED


read_qwen3_5_multimodal = text_reader(qwen3_5_text=read_qwen3_5)


def read_qwen3_5_moe_multimodal(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """`read_qwen3_5_moe` for the language model of a checkpoint with vision, in which all experts are in one tensor."""
    arch, table = text_reader(qwen3_5_moe_text=read_qwen3_5_moe)(config)
    table = {key: entry for key, entry in table.items() if key not in moe.EXPERTS}
    return arch, table | moe.stacked("layers.*.mlp.gate.weight", "layers.*.mlp.experts")


def _read_qwen3_5(config: HfConfig, default_kv_heads: int, d_mlp: int | None = None) -> tuple[Architecture, KeyTable]:
    config.require({"attn_output_gate": True})
    config.choice("output_gate_type", ("swish",), "swish")
    config.choice("mamba_ssm_dtype", ("float32",), "float32")
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # multi-token prediction
    arch, table = _read(config, default_kv_heads, d_mlp)
    return arch, table | _SEPARATE_PROJECTIONS


def _read(config: HfConfig, default_kv_heads: int, d_mlp: int | None = None) -> tuple[Architecture, KeyTable]:
    """Everything except the experts and the projections of DeltaNet."""
    values = rope_values(config)
    values.ignore("mrope_section", "mrope_interleaved")  # for images; in text, all sections have the same positions
    arch = llama.read_decoder(
        config,
        llama.Defaults(32768, kv_heads=default_kv_heads, head_dim=256, fraction=0.25),
        rope_config=values,
        d_mlp=d_mlp,
    )
    arch = dataclasses.replace(arch, norm=Norm.rms_plus_one, delta=_read_delta(config, arch.num_layers))
    has_biases = config.flag("attention_bias", False)
    bias_table = llama.ATTENTION_BIASES | biases(_GATED) if has_biases else {}
    return arch, llama.KEY_TABLE | HEAD_NORMS | _GATED | _DELTA | bias_table


def _read_delta(config: HfConfig, num_layers: int) -> DeltaNet:
    interval = config.positive_int("full_attention_interval", 4)
    default = "".join("D" if (layer + 1) % interval else "A" for layer in range(num_layers))
    pattern = read_pattern(config, default, {"D": LINEAR, "A": GLOBAL})
    num_heads = config.positive_int("linear_num_key_heads", 16)
    num_values = config.positive_int("linear_num_value_heads", 32)
    config.expect(num_values % num_heads == 0, f"a multiple of {num_heads} key heads as value heads, got {num_values}")
    return DeltaNet(
        pattern,
        num_heads,
        num_values // num_heads,
        config.positive_int("linear_key_head_dim", 128),
        config.positive_int("linear_value_head_dim", 128),
        config.positive_int("linear_conv_kernel_dim", 4),
    )
