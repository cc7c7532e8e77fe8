"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (transformers' `Qwen2VLTextModel`, `Qwen2_5_VLTextModel`,
`Qwen3VLTextModel`, `Qwen3VLMoeTextModel`).

Sections of the rotary dimensions rotate by a token's time, height and width. These are equal in text, where the rotary
embedding is the usual one.
"""

import dataclasses

from pipeline.models.architecture import Architecture, FileTensor, KeyTable, Rope
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import parse_rope, rope_values
from pipeline.models.families.hf_config import HfConfig, read_text
from pipeline.models.families.qwen import HEAD_NORMS, QKV_BIASES, with_windows

_EXPERTS: KeyTable = {
    "layers.*.mlp.gate.weight": "mlp.router",
    "layers.*.mlp.experts.gate_up_proj": FileTensor(("mlp.experts_gate", "mlp.experts_up"), "E D M", by="D"),
    "layers.*.mlp.experts.down_proj": FileTensor(("mlp.experts_down",), "E M D"),
}


def read_qwen2_vl(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """For Qwen2-VL and Qwen2.5-VL. In published files, the language model's attributes are not in `text_config`."""
    if "text_config" in config:
        return read_text(config, qwen2_5_vl_text=_read_qwen2, qwen2_vl_text=_read_qwen2)
    config.ignore("vision_config")
    return _read_qwen2(config)


def read_qwen3_vl(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return read_text(config, qwen3_vl_text=_read_qwen3)


def read_qwen3_vl_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return read_text(config, qwen3_vl_moe_text=_read_qwen3_moe)


def _read_qwen2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 32768)
    rope = _read_rope(config, max_positions, 1e6)
    arch = llama.read_decoder(config, max_positions, default_kv_heads=8, default_eps=1e-5, rope=rope)
    return with_windows(config, arch, default_first=80), llama.KEY_TABLE | QKV_BIASES


def _read_qwen3(
    config: HfConfig, default_kv_heads: int = 32, default_head_dim: int | None = 128
) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 128_000)
    rope = _read_rope(config, max_positions, 5e5)
    arch = llama.read_decoder(
        config, max_positions, default_kv_heads=default_kv_heads, default_head_dim=default_head_dim, rope=rope
    )
    return arch, llama.KEY_TABLE | HEAD_NORMS | llama.attention_biases(config)


def _read_qwen3_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = _read_qwen3(config, default_kv_heads=16, default_head_dim=None)
    experts = moe.read_experts(config, arch.num_layers, 60, 4, 1408)
    experts = dataclasses.replace(experts, sums_to_one=True)  # transformers does not read norm_topk_prob
    return dataclasses.replace(arch, experts=experts), table | _EXPERTS


def _read_rope(config: HfConfig, max_positions: int, default_theta: float) -> Rope:
    values = rope_values(config)
    kinds = {key: "default" for key in ("rope_type", "type") if values.values.get(key) == "mrope"}
    values = HfConfig(values.values | kinds, values.where)
    values.ignore("mrope_section", "mrope_interleaved")
    rope = parse_rope(values, config.positive_float("rope_theta", default_theta), max_positions)
    values.finish()
    return rope
