"""Command R, Aya and Command R7B (transformers' `CohereModel`, `Cohere2Model`): attention and MLP in parallel after one
LayerNorm without bias, and rotation of adjacent dimensions. In Cohere 2, only layers with a window rotate."""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, Norm, RotaryPairs
from pipeline.models.families import llama
from pipeline.models.families.hf_attention import every_nth_global, with_rotating_windows
from pipeline.models.families.hf_config import HfConfig

KEY_TABLE = llama.table_without("mlp.norm")
_IMPLEMENTED: dict[str, object] = {  # in published files, but transformers does not read them
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,  # Command R+, and read by transformers
}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    return _read(config, default_theta=500000.0)


def read_cohere2(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch, table = _read(config, default_theta=10000.0)
    period = config.positive_int("sliding_window_pattern", 4)
    config.ignore("layer_switch")
    window = config.optional_int("sliding_window", 4096)
    return with_rotating_windows(config, arch, every_nth_global(arch.num_layers, period), window), table


def logit_scale(config: HfConfig) -> float:
    return config.positive_float("logit_scale", 0.0625)


def _read(config: HfConfig, default_theta: float) -> tuple[Architecture, KeyTable]:
    config.require(_IMPLEMENTED)
    config.ignore("model_max_length", "use_parallel_embedding")  # not of the architecture
    arch = llama.read_decoder(config, llama.Defaults(8192, theta=default_theta, eps_key="layer_norm_eps", eps=1e-5))
    arch = dataclasses.replace(arch, norm=Norm.layer, parallel=True, rotary_pairs=RotaryPairs.adjacent)
    return arch, KEY_TABLE | llama.attention_biases(config)
