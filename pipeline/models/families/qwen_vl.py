"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (transformers' `Qwen2VLTextModel`, `Qwen2_5_VLTextModel`,
`Qwen3VLTextModel`, `Qwen3VLMoeTextModel`).

Sections of the rotary dimensions rotate by a token's time, height and width. These are equal in text, where the rotary
embedding is the usual one.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families import llama, moe
from pipeline.models.families.hf_attention import rope_values
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.qwen import HEAD_NORMS, with_windows


def read_qwen2_vl(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """For Qwen2-VL and Qwen2.5-VL. In published files, the language model's attributes are not in `text_config`."""
    if "text_config" in config:
        return text_reader(qwen2_5_vl_text=_read_qwen2, qwen2_vl_text=_read_qwen2)(config)
    config.ignore("vision_config")
    return _read_qwen2(config)


def _read_qwen2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(
        config, llama.Defaults(32768, kv_heads=8, eps=1e-5, theta=1e6), rope_config=_rope_values(config)
    )
    return with_windows(config, arch, default_first=80), llama.KEY_TABLE | llama.QKV_BIASES


def _read_qwen3(
    config: HfConfig, default_kv_heads: int = 32, default_head_dim: int | None = 128
) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(
        config,
        llama.Defaults(128_000, kv_heads=default_kv_heads, head_dim=default_head_dim, theta=5e5),
        rope_config=_rope_values(config),
    )
    return arch, llama.KEY_TABLE | HEAD_NORMS | llama.attention_biases(config)


def _read_qwen3_moe(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = _read_qwen3(config, default_kv_heads=16, default_head_dim=None)
    experts = moe.read_experts(config, arch.num_layers, 60, 4, 1408)
    experts = dataclasses.replace(experts, sums_to_one=True)  # transformers does not read norm_topk_prob
    table |= moe.stacked("layers.*.mlp.gate.weight", "layers.*.mlp.experts", inputs_first=True)
    return dataclasses.replace(arch, experts=experts), table


def _rope_values(config: HfConfig) -> HfConfig:
    values = rope_values(config)
    kinds = {key: "default" for key in ("rope_type", "type") if values.values.get(key) == "mrope"}
    values = HfConfig(values.values | kinds, values.where)
    values.ignore("mrope_section", "mrope_interleaved")
    return values


read_qwen3_vl = text_reader(qwen3_vl_text=_read_qwen3)
read_qwen3_vl_moe = text_reader(qwen3_vl_moe_text=_read_qwen3_moe)
