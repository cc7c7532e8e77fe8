"""Gemma 1, Gemma 2 and the text models of Gemma 3 (transformers' `GemmaModel`, `Gemma2Model`, `Gemma3TextModel`), and
the language models of Gemma 3's multimodal checkpoints.

Norms are scaled by 1 + weight, embeddings by sqrt(D). Gemma 2 and 3 also have norms after each block, and local and
global layers. Gemma 2 caps attention scores. Gemma 3 has norms of queries and keys, and a different theta in local
layers.
"""

import dataclasses

from pipeline.models.architecture import Activation, Architecture, KeyTable, Norm, Rope
from pipeline.models.families.hf_attention import (
    every_nth_global,
    nested_ropes,
    read_local,
    read_rope,
)
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.llama import KEY_TABLE as LLAMA_TABLE
from pipeline.models.families.llama import Defaults, attention_biases, read_decoder
from pipeline.models.families.qwen import HEAD_NORMS

KEY_TABLE: KeyTable = LLAMA_TABLE | {
    "layers.*.post_attention_layernorm.weight": "attention.post_norm",
    "layers.*.pre_feedforward_layernorm.weight": "mlp.norm",
    "layers.*.post_feedforward_layernorm.weight": "mlp.post_norm",
}


def read_gemma(config: HfConfig) -> tuple[Architecture, KeyTable]:
    config.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    if activation is Activation.gelu:  # as in transformers: the first published files meant the approximation
        activation = Activation.gelu_tanh
    arch = read_decoder(config, Defaults(8192, head_dim=256), activation=activation)
    arch = dataclasses.replace(arch, norm=Norm.rms_plus_one, embed_scale=arch.d_model**0.5)
    return arch, LLAMA_TABLE | attention_biases(config)


def read_gemma2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 8192)
    rope = read_rope(config, max_positions)
    arch = _read(config, max_positions, rope, rope, period=2, default_vocab=256_000)
    softcap = config.optional_float("attn_logit_softcapping", 50.0)
    return dataclasses.replace(arch, softcap=softcap), KEY_TABLE | attention_biases(config)


def read_gemma3(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 131072)
    rope, local_rope = _read_ropes(config, max_positions)
    period = config.positive_int("sliding_window_pattern", 6)
    arch = _read(config, max_positions, rope, local_rope, period, default_vocab=262_208)
    return arch, KEY_TABLE | HEAD_NORMS | attention_biases(config)


read_gemma3_multimodal = text_reader("mm_tokens_per_image", gemma3_text=read_gemma3)


def _read(
    config: HfConfig, max_positions: int, rope: Rope, local_rope: Rope, period: int, default_vocab: int
) -> Architecture:
    """The architecture of Gemma 2 or 3. Every `period`-th layer is global."""
    config.set_defaults(num_attention_heads=8, vocab_size=default_vocab)
    config.ignore("hidden_act", "sliding_window_size")  # in published files, but transformers reads other attributes
    arch = read_decoder(
        config,
        Defaults(max_positions, kv_heads=4, head_dim=256),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        rope=rope,
    )
    pattern = every_nth_global(arch.num_layers, period)
    window = config.optional_int("sliding_window", 4096)
    return dataclasses.replace(
        arch,
        norm=Norm.rms_plus_one,
        embed_scale=arch.d_model**0.5,
        attention_scale=config.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        local=read_local(config, arch, pattern, window, local_rope),
    )


def _read_ropes(config: HfConfig, max_positions: int) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of local layers. Newer files have a mapping for each."""
    default_theta, default_local_theta = 1e6, 1e4
    if "rope_parameters" not in config:
        local_theta = config.positive_float("rope_local_base_freq", default_local_theta)
        return read_rope(config, max_positions, default_theta), Rope(local_theta)
    return nested_ropes(config, max_positions, default_theta, default_local_theta)
