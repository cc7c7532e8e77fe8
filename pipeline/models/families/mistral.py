"""Mistral 7B and similar models, Ministral 3 (transformers' `MistralModel`, `Ministral3Model`), and the language models
of Mistral 3's multimodal checkpoints.

They may have a window in every layer. Ministral 3 scales queries by their positions.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, QueryScaling
from pipeline.models.families.hf_attention import all_local, parse_rope, read_local, rope_values
from pipeline.models.families.hf_config import HfConfig, read_text
from pipeline.models.families.llama import KEY_TABLE, read_decoder

_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_MINISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = read_decoder(config, default_max_positions=131072)
    window = config.optional_int("sliding_window", 4096)
    local = read_local(config, "L" * arch.num_layers, window, arch.rope, arch.rope, arch.max_positions)
    return dataclasses.replace(arch, local=local), KEY_TABLE


def read_ministral(config: HfConfig) -> tuple[Architecture, KeyTable]:
    max_positions = config.positive_int("max_position_embeddings", 262144)
    values = rope_values(config)
    if not values.values and "rope_parameters" not in config:
        values = HfConfig(_MINISTRAL_ROPE, config.where)
    values.ignore("max_position_embeddings")
    rope = parse_rope(values, config.positive_float("rope_theta", 10000.0), max_positions)
    beta = values.float_from_0("llama_4_scaling_beta")
    period = values.positive_int("original_max_position_embeddings")
    values.finish()
    arch = read_decoder(config, max_positions, default_kv_heads=8, default_head_dim=128, default_eps=1e-5, rope=rope)
    return dataclasses.replace(
        arch,
        local=all_local(arch, config.optional_int("sliding_window", None)),
        query_scaling=QueryScaling(beta, period) if beta else None,
    ), KEY_TABLE


def read_multimodal(config: HfConfig) -> tuple[Architecture, KeyTable]:
    """For the language model of a checkpoint with vision."""
    config.ignore("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer")
    return read_text(config, mistral=read, ministral3=read_ministral)
