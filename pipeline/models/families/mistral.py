"""Mistral 7B and similar models, Ministral 3 (transformers' `MistralModel`, `Ministral3Model`), and the language models
of Mistral 3's multimodal checkpoints.

They may have a window in every layer. Ministral 3 scales queries by their positions.
"""

import dataclasses

from pipeline.models.architecture import Architecture, KeyTable, QueryScaling
from pipeline.models.families.hf_attention import all_local, read_local, rope_values
from pipeline.models.families.hf_config import HfConfig, text_reader
from pipeline.models.families.llama import KEY_TABLE, Defaults, read_decoder

_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
_MINISTRAL_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def read(config: HfConfig) -> tuple[Architecture, KeyTable]:
    arch = read_decoder(config, Defaults(131072))
    local = read_local(config, arch, "L" * arch.num_layers, config.optional_int("sliding_window", 4096))
    return dataclasses.replace(arch, local=local), KEY_TABLE


def read_ministral(config: HfConfig) -> tuple[Architecture, KeyTable]:
    values = rope_values(config, _MINISTRAL_ROPE)
    values.ignore("max_position_embeddings")
    beta = values.float_from_0("llama_4_scaling_beta")
    period = values.positive_int("original_max_position_embeddings")
    arch = read_decoder(config, Defaults(262144, kv_heads=8, head_dim=128, eps=1e-5), rope_config=values)
    return dataclasses.replace(
        arch,
        local=all_local(arch, config.optional_int("sliding_window", None)),
        query_scaling=QueryScaling(beta, period) if beta else None,
    ), KEY_TABLE


_OF_VISION = ("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer")
read_multimodal = text_reader(*_OF_VISION, mistral=read, ministral3=read_ministral)
