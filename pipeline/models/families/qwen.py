"""The dense models of Qwen2, Qwen2.5 and Qwen3 (transformers' `Qwen2Model`, `Qwen3Model`).

Qwen2 and Qwen2.5 have biases for q, k and v only. Qwen3 has norms of each head's queries and keys, and by default no
biases.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.families import llama
from pipeline.models.families.hf_attention import read_local
from pipeline.models.families.hf_config import HfConfig

HEAD_NORMS: KeyTable = {
    "layers.*.self_attn.q_norm.weight": "attention.q_norm",
    "layers.*.self_attn.k_norm.weight": "attention.k_norm",
}


def read_qwen2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(32768))
    return with_windows(config, arch), llama.KEY_TABLE | llama.QKV_BIASES


def read_qwen3(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = llama.read_decoder(config, llama.Defaults(32768, head_dim=128))
    return with_windows(config, arch), llama.KEY_TABLE | HEAD_NORMS | llama.attention_biases(config)


def with_windows(config: HfConfig, arch: Architecture, default_first: int = 28) -> Architecture:
    """Adds Qwen's sliding window, if it is used, to layer `max_window_layers` and all later layers."""
    is_used = config.flag("use_sliding_window", False)
    window = config.optional_int("sliding_window", 4096)
    first = min(config.count("max_window_layers", default_first), arch.num_layers)
    pattern = "G" * first + "L" * (arch.num_layers - first)
    return dataclasses.replace(arch, local=read_local(config, arch, pattern, window if is_used else None))
